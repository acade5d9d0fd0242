"""The plan of faults of chaos.py: when each comes, of which kind it is, and which worker it hits. Pure functions."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        at: Seconds since the training's first commit.
        kind: One of `KINDS`.
        victim: From 0 to 1: which of the workers that are alive then, in the order of their hosts.
        seconds: How long it lasts; 0 if it does not end.
        fraction: From 0 to 1: the moment within a commit or a reset, or the part of a file that stays.
        parts: The faults of which a fault of kind "double" consists.
    """

    at: float
    kind: str
    victim: float
    seconds: float = 0.0
    fraction: float = 0.0
    parts: tuple[Fault, ...] = ()


# What happens, and from how many to how many seconds it lasts.
KINDS: dict[str, tuple[str, tuple[float, float]]] = {
    "kill": ("a worker is killed (SIGKILL)", (0, 0)),
    "stop": ("a worker is stopped and continues (SIGSTOP, SIGCONT)", (1, 40)),
    "segfault": ("a worker ends with a segmentation fault (SIGSEGV)", (0, 0)),
    "link_down": ("the link of a host is down", (1, 20)),
    "partition": ("a host is cut off from the others, but not from horovodrun", (1, 20)),
    "slow_link": ("the rate of a host's link falls to a hundredth", (5, 20)),
    "disk_full": ("the disk of the checkpoints is full", (5, 15)),
    "truncate": ("a file of the newest checkpoint is cut short, and all workers are killed", (0, 0)),
    "join": ("a host joins, or leaves if it had joined", (0, 0)),
    "double": ("two faults at once, on two hosts", (0, 0)),
    "kill_in_reset": ("a worker is killed, and another one while the workers reset", (0, 0)),
    "kill_in_commit": ("a worker is killed during a commit", (0, 0)),
}
# Two of these make a "double".
SINGLE = ("kill", "stop", "segfault", "link_down", "partition", "slow_link")


def plan(
    seed: int, mtbf: float, kinds: Sequence[str], count: int | None = None, seconds: float | None = None
) -> list[Fault]:
    """Draws the faults. The same arguments give the same plan.

    The times between faults are exponential. The kinds come from a shuffled deck, which is shuffled again when it is
    empty. So each kind comes once before any comes again.

    Args:
        seed: Determines the plan, together with the other arguments.
        mtbf: Mean time between two faults in seconds.
        kinds: Names from `KINDS`.
        count: The number of faults; None for no limit.
        seconds: No fault comes later; None for no limit.

    Raises:
        ValueError: Neither `count` nor `seconds` is given, or a kind is unknown.
    """
    if count is None and seconds is None:
        raise ValueError("the plan needs a number of faults or a time")
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown or not kinds:
        raise ValueError(f"unknown kind of fault {unknown[0]!r}" if unknown else "no kinds of faults")
    drawn = random.Random(f"chaos {seed}")
    deck = _dealt(drawn, kinds)
    faults: list[Fault] = []
    at = drawn.expovariate(1 / mtbf)
    while (count is None or len(faults) < count) and (seconds is None or at <= seconds):
        faults.append(_draw(drawn, next(deck), at))
        at += drawn.expovariate(1 / mtbf)
    return faults


def to_json(fault: Fault) -> dict[str, Any]:
    """The fault as values that JSON can represent; times in milliseconds' precision."""
    values = {"at": round(fault.at, 3), "kind": fault.kind, "victim": round(fault.victim, 4)}
    values |= {"seconds": round(fault.seconds, 3), "fraction": round(fault.fraction, 4)}
    return {**values, "parts": [to_json(part) for part in fault.parts]}


def pick(victim: float, candidates: Sequence[T]) -> T:
    """The candidate that a victim number stands for."""
    return candidates[min(int(victim * len(candidates)), len(candidates) - 1)]


def _draw(drawn: random.Random, kind: str, at: float) -> Fault:
    low, high = KINDS[kind][1]
    parts = [_draw(drawn, part, at) for part in drawn.sample(SINGLE, 2)] if kind == "double" else []
    return Fault(at, kind, drawn.random(), drawn.uniform(low, high), drawn.random(), tuple(parts))


def _dealt(drawn: random.Random, kinds: Sequence[str]) -> Iterator[str]:
    while True:
        deck = list(kinds)
        drawn.shuffle(deck)
        yield from deck
