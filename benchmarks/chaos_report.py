"""What chaos.py reports: how much training was left of the undisturbed one, and what each kind of fault cost."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from chaos_invariants import Event, of_kind


def commit_times(events: Iterable[Event]) -> list[float]:
    """When each commit was complete on the first rank, in order."""
    times: dict[Any, float] = {}
    for event in of_kind(events, "commit"):
        times.setdefault((event["round"], event["step"]), event["t"])
    return sorted(times.values())


def start_of(events: Iterable[Event]) -> float | None:
    """When training counts as started: at the first commit after a step; None before."""
    return next((event["t"] for event in of_kind(events, "commit") if event["loss"] is not None), None)


def progress(events: Iterable[Event]) -> dict[str, float]:
    """Committed steps, and steps times workers, from the start of training to its last commit, and the seconds.

    A step counts if it is part of the training at the end. So steps that were lost do not count.
    """
    commits = [event for event in of_kind(events, "commit") if event["loss"] is not None]
    sizes: dict[int, int] = {}
    for event in commits:
        for step in [step for step in sizes if step > event["step"]]:
            del sizes[step]  # training went back
        sizes[event["step"]] = event["size"]
    if len(sizes) < 2:
        return {"steps": 0, "worker_steps": 0, "seconds": 0.0}
    steps = sorted(sizes)
    return {
        "steps": steps[-1] - steps[0],
        "worker_steps": sum((b - a) * sizes[b] for a, b in zip(steps, steps[1:])),
        "seconds": commits[-1]["t"] - commits[0]["t"],
    }


def goodput(run: Mapping[str, float], undisturbed: Sequence[Mapping[str, float]], unit: str) -> float | None:
    """The `unit` per second of a run over the median of those of undisturbed runs."""
    rates = [other[unit] / other["seconds"] for other in undisturbed if other["seconds"]]
    return run[unit] / run["seconds"] / statistics.median(rates) if rates and run["seconds"] else None


def pauses(times: Sequence[float], done: Sequence[float], end: float) -> list[float]:
    """For each fault, done at these times: the longest time without a commit that it began or that it was part of.

    Only what follows the fault counts, until the next fault or the first commit after that.
    """
    found = []
    for start, stop in zip(done, [*done[1:], end]):
        gaps = [(max(a, start), b) for a, b in zip(times, times[1:]) if b > start and a <= max(stop, start)]
        found.append(max((b - a for a, b in gaps), default=0.0))
    return found


def losses_of_steps(events: Iterable[Event]) -> list[tuple[float, int]]:
    """How often training went back: when it had trained its last step, and how many steps it trained again."""
    found = []
    highest, base, when = 0, None, 0.0
    for event in sorted(events, key=lambda event: event["t"]):
        if event["event"] in ("synced", "loaded"):
            base = event["step"]
        elif event["event"] == "step":
            if base is not None and highest > base:
                found.append((when, highest - base))
                highest = base
            base = None
            highest, when = max(highest, event["step"]), event["t"]
    return found


def costs(events: Sequence[Event], faults: Sequence[Mapping[str, Any]], end: float) -> list[dict[str, Any]]:
    """For each fault its longest pause, and the steps lost. A loss counts for the fault that is nearest in time."""
    done = [fault["t"] for fault in faults]
    lost = [0 for _ in done]
    for when, steps in losses_of_steps(events):
        if done:
            lost[min(range(len(done)), key=lambda i: abs(done[i] - when))] += steps
    waits = pauses(commit_times(events), done, end)
    return [{**f, "pause": round(wait, 2), "lost_steps": n} for f, wait, n in zip(faults, waits, lost)]


def table(rows: Sequence[Mapping[str, Any]], restarts: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """A line for each kind of fault: number, median and longest pause, steps lost, restarts of the whole job."""
    lines = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        some = [row for row in rows if row["kind"] == kind]
        waits = [row["pause"] for row in some]
        lines.append([
            kind, str(len(some)), f"{statistics.median(waits):.1f}", f"{max(waits):.1f}",
            str(sum(row["lost_steps"] for row in some)), str(sum(r["after"] == kind for r in restarts)),
        ])  # fmt: skip
    return lines
