"""What must hold during chaos.py's training: functions that take what the workers wrote and return the violations.

A worker writes events, dictionaries with `event`, `t` (seconds), `pid` and what belongs to the event.
"""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Event = Mapping[str, Any]
# The rounding of a sum in float32, relative to the root of the sum of squares; as in tests/launch/test_elastic.py.
ROUNDING = 1e-5
_LOST = re.compile(r"the residuals of rank ([\d, ]+) of (\d+) are lost")


def of_kind(events: Iterable[Event], kind: str) -> list[Event]:
    """The events of one kind, in the order of time."""
    return sorted((event for event in events if event["event"] == kind), key=lambda event: event["t"])


def weights_differ(events: Iterable[Event]) -> list[str]:
    """Commits after which the ranks did not have the same weights."""
    sums: dict[Any, set[int]] = defaultdict(set)
    for event in of_kind(events, "commit"):
        sums[event["round"], event["step"]].add(event["weights"])
    return [f"weights differ after the commit of step {step}" for (_, step), found in sums.items() if len(found) > 1]


def residuals_changed(events: Iterable[Event]) -> list[str]:
    """Resets after which the sum of residuals is not that of the last commit, although no warning said so."""
    return [
        f"reset at step {event['step']}: the sum of residuals was {event['committed'][0]:.6g} and is "
        f"{event['now'][0]:.6g}"
        for event in of_kind(events, "synced")
        if not event["lost"] and not _same_sum(event["committed"], event["now"])
    ]


def _same_sum(before: Sequence[float], after: Sequence[float]) -> bool:
    squares = max(before[1], after[1])  # joined residuals have other squares
    return abs(before[0] - after[0]) <= ROUNDING * squares**0.5


def lost_without_reason(events: Iterable[Event]) -> list[str]:
    """Warnings of lost residuals although the worker, or the one with its copies, is still there."""
    found, events = [], list(events)
    rounds = of_kind(events, "synced")
    for warning in of_kind(events, "warning"):
        match = _LOST.search(warning["text"])
        if not match:
            continue
        lost, size = [int(rank) for rank in match[1].split(",")], int(match[2])
        before = {e["rank"]: e["pid"] for e in rounds if e["t"] <= warning["t"] and e["size"] == size}
        after = next((e["round"] for e in rounds if e["t"] > warning["t"] and e["pid"] == warning["pid"]), None)
        present = {event["pid"] for event in rounds if event["round"] == after}
        found += [
            f"the residuals of rank {rank} of {size} were given up, but it or the next rank is still there"
            for rank in lost
            if after is not None and {before.get(rank), before.get((rank + 1) % size)} & present
        ]
    return found


def loaded_wrongly(events: Iterable[Event]) -> list[str]:
    """Resumptions from a checkpoint whose contents are not what was saved at that step."""
    events = list(events)
    saves, weights = defaultdict(list), defaultdict(set)
    for event in of_kind(events, "saved"):
        saves[event["step"]].append(event)
    for event in of_kind(events, "saved_weights"):
        weights[event["step"]].add(event["weights"])
    found = []
    for event in of_kind(events, "loaded"):
        where = f"resumed at step {event['step']}, rank {event['rank']}"
        if event["weights"] not in weights[event["step"]]:
            found.append(f"{where}: the weights are none that were saved at this step")
        if event["size"] == 1:  # it sends nothing, and so leaves the residuals out, with a warning
            continue
        same = [s for s in saves[event["step"]] if _same_sum(s["sum"], event["sum"])]
        if not same:
            found.append(f"{where}: the sum of residuals is none that was saved at this step")
        own = [s["residuals"] for s in same if (s["rank"], s["size"]) == (event["rank"], event["size"])]
        if own and event["residuals"] not in own:
            found.append(f"{where}: the residuals are none that this rank saved at this step")
    return found


def copies_wrong(copies: Iterable[Mapping[str, Any]], events: Iterable[Event]) -> list[str]:
    """Copies of saves that `chaos_check.py` read and should have refused, or whose contents were not saved.

    A copy has `damaged` (the name of the file that was cut short, or None) and `files`: for each file what was read,
    a dictionary with `refused`, or with `step`, `rank`, `size` and `residuals`.
    """
    saved = {(e["step"], e["rank"], e["size"], e["residuals"]) for e in of_kind(events, "saved")}
    unheard = {(e["step"], e["size"]) for e in of_kind(events, "save_begins")} - {(s[0], s[2]) for s in saved}
    found = []
    for copy in copies:
        for name, read in copy["files"].items():
            damaged = copy["damaged"] in (name, "manifest.json")
            if "refused" in read:
                if not damaged:
                    found.append(f"{copy['name']}/{name} is whole, and was refused: {read['refused']}")
            elif damaged:
                found.append(f"{copy['name']}/{name} was read, although {copy['damaged']} was cut short")
            elif (read["step"], read["size"]) in unheard:  # a rank died between its save and its event
                continue
            elif (read["step"], read["rank"], read["size"], read["residuals"]) not in saved:
                found.append(f"{copy['name']}/{name} holds other residuals than were saved at its step")
    return found


def late(progress: float, now: float, limit: float) -> str | None:
    """Why the training counts as hanging, if the last progress is too long ago."""
    return f"no new commit for {now - progress:.0f} s" if now - progress > limit else None


def curve(events: Iterable[Event]) -> dict[int, float]:
    """The loss at each committed step; of a step that was trained twice, the last one."""
    return {event["step"]: event["loss"] for event in of_kind(events, "commit") if event["loss"] is not None}


def smoothed(losses: Mapping[int, float], width: int = 5) -> dict[int, float]:
    """The mean of each loss and its neighbours, `width` on each side."""
    steps = sorted(losses)
    return {
        step: statistics.fmean(losses[s] for s in steps[max(0, i - width) : i + width + 1])
        for i, step in enumerate(steps)
    }


def curve_astray(losses: Mapping[int, float], references: Sequence[Mapping[int, float]]) -> list[str]:
    """Whether the loss leaves the spread of undisturbed trainings with other seeds.

    All curves are smoothed. At each step, the spread goes from the lowest to the highest reference, and the allowed
    range is wider by the spread's own size on both sides, at least by 3% of the loss. A violation is a curve that is
    outside of it for more than a tenth of the steps, or a loss that is not finite.
    """
    if any(loss != loss or abs(loss) == float("inf") for loss in losses.values()):
        return ["a loss is not finite"]
    others = [smoothed(reference) for reference in references]
    outside, compared = [], 0
    for step, loss in smoothed(losses).items():
        values = [other[step] for other in others if step in other]
        if len(values) < len(others) or not values:
            continue
        compared += 1
        room = max(max(values) - min(values), 0.03 * max(values))
        if not min(values) - room <= loss <= max(values) + room:
            outside.append((step, loss, min(values), max(values)))
    if not compared or len(outside) <= compared / 10:
        return []
    step, loss, low, high = outside[-1]
    return [
        f"the loss is outside the spread of undisturbed trainings at {len(outside)} of {compared} commits; at step "
        f"{step} it is {loss:.3f}, and theirs is {low:.3f} to {high:.3f}"
    ]
