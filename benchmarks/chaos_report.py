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
    """Committed steps, and steps times workers, from the start of training to its last commit, and the seconds."""
    last: dict[int, Event] = {e["step"]: e for e in of_kind(events, "commit") if e["loss"] is not None}
    if len(last) < 2:
        return {"steps": 0, "worker_steps": 0, "seconds": 0.0}
    steps = sorted(last)
    pairs = list(zip(steps, steps[1:]))
    first = min(e["t"] for e in of_kind(events, "commit") if e["loss"] is not None)
    return {
        "steps": steps[-1] - steps[0],
        "worker_steps": sum((b - a) * last[b]["size"] for a, b in pairs),
        "seconds": last[steps[-1]]["t"] - first,
    }


def goodput(run: Mapping[str, float], undisturbed: Sequence[Mapping[str, float]], unit: str) -> float | None:
    """The `unit` per second of a run over the median of those of undisturbed runs."""
    rates = [other[unit] / other["seconds"] for other in undisturbed if other["seconds"]]
    return run[unit] / run["seconds"] / statistics.median(rates) if rates and run["seconds"] else None


def pauses(times: Sequence[float], done: Sequence[float], end: float) -> list[float]:
    """For each fault, done at these times, the longest time between two commits until the next fault."""
    found = []
    for start, stop in zip(done, [*done[1:], end]):
        gaps = [(a, b) for a, b in zip(times, times[1:]) if b > start and a < max(stop, start + 1e-9)]
        found.append(max((b - a for a, b in gaps), default=0.0))
    return found


def losses_of_steps(events: Iterable[Event]) -> list[tuple[float, int]]:
    """When training went back, and by how many steps that were trained already."""
    found = []
    highest, base, when = 0, None, 0.0
    for event in sorted(events, key=lambda event: event["t"]):
        if event["event"] in ("synced", "loaded"):
            base, when = event["step"], event["t"]
        elif event["event"] == "step":
            if base is not None and highest > base:
                found.append((when, highest - base))
                highest = base
            base = None
            highest = max(highest, event["step"])
    return found


def costs(events: Sequence[Event], faults: Sequence[Mapping[str, Any]], end: float) -> list[dict[str, Any]]:
    """For each fault that was done, its longest pause and the steps lost until the next one."""
    done = [fault["t"] for fault in faults]
    lost = losses_of_steps(events)
    rows = []
    for fault, stop, pause in zip(faults, [*done[1:], end], pauses(commit_times(events), done, end)):
        steps = sum(number for when, number in lost if fault["t"] < when <= stop)
        rows.append({**fault, "pause": round(pause, 2), "lost_steps": steps})
    return rows


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
