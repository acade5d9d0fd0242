"""Alpha, beta and burst of a link from the times of messages of several sizes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_LARGEST_BURST = 2**20


def midmean(times: np.ndarray) -> float:
    """The mean of the middle half: as robust as the median, and equal to it for up to three times.

    A small message takes one or two time slices of the scheduler. The median of a few such times jumps between the two.
    """
    if len(times) < 4:
        return float(np.median(times))
    quarter = len(times) // 4
    return float(np.mean(np.sort(times)[quarter : len(times) - quarter]))


def fit(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float, float]:
    """Seconds per call, seconds per byte, and the bytes of a burst; none of them is negative.

    With three or more sizes, the seconds per byte are the slope between the two largest, and the seconds per call are
    what the smallest takes. If these two predict more for the largest than was measured, the difference is a burst:
    bytes that a shaped link or a switch's buffer lets through at once. A burst of more than 1 MB is ignored: there the
    time per byte grows with the size instead.
    With two sizes, the sum of the squared relative errors is minimal.
    """
    times = np.asarray(seconds, np.float64)
    rows = np.stack([np.ones(len(sizes)), np.asarray(sizes, np.float64)], 1) / times[:, None]
    slope = (times[-1] - times[-2]) / (sizes[-1] - sizes[-2]) if len(sizes) > 2 else 0.0
    if slope > 0:
        burst = float(sizes[-1] - (times[-1] - times[0]) / slope)
        if 2 * sizes[0] < burst <= _LARGEST_BURST:  # without a burst this is the smallest size
            return float(times[0]), float(slope), burst
        return max(0.0, float(times[0] - slope * sizes[0])), float(slope), 0.0
    (per_call, per_byte), *_ = np.linalg.lstsq(rows, np.ones(len(sizes)), rcond=None)
    if per_call < 0:
        per_call, per_byte = 0.0, _least_squares(rows[:, 1])
    elif per_byte < 0:
        per_call, per_byte = _least_squares(rows[:, 0]), 0.0
    return float(per_call), float(per_byte), 0.0


def _least_squares(column: np.ndarray) -> float:
    """The factor with which a column comes closest to ones."""
    return float(column.sum() / (column**2).sum())
