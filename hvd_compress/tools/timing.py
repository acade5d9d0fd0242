"""Timing in turns, and medians."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np


def interleave(
    functions: Mapping[str, Callable[[], Any]],
    rounds: int,
    before: Callable[[], Any] = lambda: None,
    watch: Callable[[], Any] = lambda: None,
) -> dict[str, list[float]]:
    """Seconds of each call. All functions are timed in turn in each round, so that drift affects them equally.

    Args:
        functions: By name; each must wait for its own results.
        rounds: How often each is timed.
        before: Called before each timing, for example a barrier.
        watch: Called before each round.
    """
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        watch()
        for name, function in functions.items():
            before()
            start = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - start)
    return times


def summary(times: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, median, high = np.percentile(times, (25, 50, 75)).tolist()
    return {"median": median, "low": low, "high": high}
