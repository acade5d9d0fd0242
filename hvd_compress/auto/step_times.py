"""What takes the time of a step, from the timestamps of its B buckets. Seconds.

These functions run on the host, in NumPy: as operations of TensorFlow they would take ten times as long.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

# The times of the first steps are ignored: kernels are compiled, connections are made.
UNTIMED = 2


class StepTimes(NamedTuple):
    """The exchange of one step on this rank."""

    waits: np.ndarray  # [B], for each bucket's gradients, after the bucket before was encoded
    coding: np.ndarray  # [B], encoding and decoding
    wire: np.ndarray  # [B]
    span: float  # from the first bucket's gradients to the last bucket's result


def of_buckets(timestamps: np.ndarray) -> StepTimes:
    """The times of a step, from its `clock.stacked` timestamps, float64 [4, B]."""
    ready, encoded, received, decoded = timestamps - timestamps[0, 0]
    before = np.concatenate([ready[:1], encoded[:-1]])  # when the bucket before was encoded
    # Horovod may fuse buckets, which then arrive together.
    free = np.concatenate([encoded[:1], np.maximum.accumulate(received)[:-1]])  # when the wire is free
    return StepTimes(
        np.maximum(0.0, ready - before),
        np.maximum(0.0, encoded - ready) + np.maximum(0.0, decoded - received),
        np.maximum(0.0, received - np.maximum(encoded, free)),
        float(decoded.max()),
    )


class RestClock:
    """Measures what a step takes besides its exchange."""

    def __init__(self) -> None:
        self._end: float | None = None  # of the exchange of the step before

    def measure(self, ready: float, span: float) -> float:
        """The seconds of the step before besides its exchange; 0 in the first call.

        Called once in each step, with the timestamp at which its first bucket was ready, and its span.
        """
        rest = 0.0 if self._end is None else max(0.0, ready - self._end)
        self._end = ready + span
        return rest
