"""Figures of a run that rules judge by: robust means, noise, the link's rate. NumPy only."""

from __future__ import annotations

import warnings

import numpy as np

from .run_log import Run

# The first steps are left out: they compile, connect and warm up. There must be FEWEST more.
WARM_UP = 5
FEWEST = 20
ENOUGH = WARM_UP + FEWEST
_PARTS = 10


def link_of(run: Run) -> tuple[float, float]:
    """Milliseconds per collective and per byte sent: measured when the run began, or else estimated from its buckets.

    The estimate is the least time per byte of any bucket, which is at least that of the link.
    """
    link = run.meta.get("link")
    if link:
        return link["latency_ms"], 1e-6 * link["ns_per_byte"]
    latency, per_byte = [], []
    for name in run.first.buckets:
        ranks = [rank.buckets[name] for rank in run.ranks if name in rank.buckets]
        length = min(len(columns["bytes"]) for columns in ranks)
        wire = np.min([columns["wire_ms"][:length] for columns in ranks], 0)[WARM_UP:]
        nbytes = ranks[0]["bytes"][:length][WARM_UP:]
        if len(wire) and np.median(nbytes) > 0:
            latency.append(float(np.percentile(wire, 25)))
            per_byte.append(latency[-1] / float(np.median(nbytes)))
    return min(latency, default=0.0), min(per_byte, default=0.0)


def rate(per_byte: float) -> str:
    """A link's rate in words, of milliseconds per byte."""
    return f"at {1e-6 / per_byte:.3g} GB/s" if per_byte > 0.0 else "over a link too fast to be measured"


def beginning(loss: np.ndarray) -> float:
    """The loss of the first steps; of the very first one, if it jumps up right then."""
    return float(min(loss[0], np.median(loss[: max(1, min(5, len(loss) // 20))])))


def windows(values: np.ndarray) -> np.ndarray:
    """Medians of ten parts."""
    return np.array([np.median(part) for part in np.array_split(values, _PARTS)])


def spread(values: np.ndarray) -> float:
    """How much successive values differ, as a standard deviation."""
    return float(1.4826 * np.median(np.abs(np.diff(values)))) / np.sqrt(2.0)


def late(values: np.ndarray) -> np.ndarray | None:
    """The known values after the first steps; None if there are too few."""
    values = values[~np.isnan(values)][WARM_UP:]
    return values if len(values) >= FEWEST else None


def median(run: Run, column: str) -> float:
    """The median of a column's `Run.fastest`, without the first steps."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return float(np.nanmedian(run.fastest(column)[WARM_UP:]))


def trimmed(values: np.ndarray) -> np.ndarray:
    """Means over the first axis without the largest and smallest fiftieth, so that one stall does not count."""
    ordered = np.sort(values, 0)
    cut = len(ordered) // 50
    return np.asarray(ordered[cut : len(ordered) - cut].mean(0))
