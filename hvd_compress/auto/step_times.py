"""What takes the time of a step, from the timestamps of its B buckets. Seconds.

It is computed on the host, in NumPy: operations of TensorFlow would take several times as long.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

# The times of the first steps are ignored: kernels are compiled, connections are made.
UNTIMED = 2


class StepTimes(NamedTuple):
    """One step on this rank; all are 0 in a step whose times are ignored."""

    waits: np.ndarray  # [B], for each bucket's gradients, after the bucket before was encoded
    coding: np.ndarray  # [B], encoding and decoding
    wire: np.ndarray  # [B]
    span: float  # from the first bucket's gradients to the last bucket's result
    rest: float  # of the step before, besides its span; 0 if it is not known

    @classmethod
    def unknown(cls, buckets: int) -> StepTimes:
        """Those of a step whose times are ignored."""
        zeros = np.zeros(buckets)
        return cls(zeros, zeros, zeros, 0.0, 0.0)


class StepTimer:
    """Measures the steps of a training. All but the first steps are timed."""

    def __init__(self) -> None:
        self._ended: float | None = None  # the exchange of the step before
        self._untimed = UNTIMED

    def restart(self) -> None:
        """The next steps are as the first ones."""
        self._untimed = UNTIMED

    def measure(self, timestamps: np.ndarray) -> StepTimes:
        """Called once in each step, with its `clock.stacked` timestamps, float64 [4, B]."""
        ready, encoded, received, decoded = timestamps - timestamps[0, 0]
        first, span = float(timestamps[0, 0]), float(decoded.max())
        rest = 0.0 if self._ended is None else max(0.0, first - self._ended)
        self._ended = first + span
        if self._untimed:
            self._untimed -= 1
            return StepTimes.unknown(len(ready))
        before = np.concatenate([ready[:1], encoded[:-1]])  # when the bucket before was encoded
        # Horovod may fuse buckets, which then arrive together.
        free = np.concatenate([encoded[:1], np.maximum.accumulate(received)[:-1]])  # when the wire is free
        return StepTimes(
            np.maximum(0.0, ready - before),
            np.maximum(0.0, encoded - ready) + np.maximum(0.0, decoded - received),
            np.maximum(0.0, received - np.maximum(encoded, free)),
            span,
            rest,
        )
