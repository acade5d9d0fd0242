"""The numbers that each rank of `auto` sends in a step: its measurements, and what rank 0 decides."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from . import policy
from .progress import ROWS
from .step_times import StepTimes

# The wire times of ranks are sent in so many places, for a minimum over them; with more ranks, some share a place.
_PLACES = 16


class StepNumbers:
    """Packs the numbers of one rank. Unpacks the mean of all ranks' numbers.

    Args:
        ranks: The number of ranks.
        rank: This rank.
        buckets: The number of buckets, B.
        candidates: The number of candidates, C.

    Attributes:
        size: How many numbers there are, S.
    """

    def __init__(self, ranks: int, rank: int, buckets: int, candidates: int) -> None:
        self._ranks, self._rank = ranks, rank
        places = min(ranks, _PLACES)
        self._members = np.bincount(np.arange(ranks) % places, minlength=places)
        self._shapes = {  # in the order in which `pack` joins them
            "choice": (buckets,), "trial": (), "progress": (ROWS, candidates), "wire": (places,),
            "exchange": (buckets,), "waits": (buckets,), "rest": (), "span": (), "wanted": (candidates + 2,),
        }  # fmt: skip
        self._sizes = [math.prod(shape) for shape in self._shapes.values()]
        self.size = sum(self._sizes)
        self._progress_at, self._progress_shape = buckets + 1, (ROWS, candidates)
        self._rest_at = -4 - candidates

    def pack(
        self, choice: np.ndarray, tried: np.int32, probe: np.ndarray, times: StepTimes, wanted: np.ndarray
    ) -> np.ndarray:
        """The numbers of this rank, float32 [S]; 0 for what is not finite.

        Args:
            choice: The choice that this rank proposes, int32 [B].
            tried: The candidate that it proposes to try; -1 for none.
            probe: float32 [ROWS, C], see `ProgressSample.measure`.
            times: How long the step took.
            wanted: float32 [C + 2], what it wants to be traced, see `Traces.mask`.
        """
        waits, coding, wire, span, rest = times
        of_rank = np.zeros(len(self._members))
        of_rank[self._rank % len(of_rank)] = wire.sum()
        decides = float(self._rank == 0)
        proposed = decides * (np.append(choice, tried) + 1)
        parts = [proposed, probe.ravel(), of_rank, wire + coding, waits, [rest, span], decides * wanted]
        numbers = np.concatenate(parts).astype(np.float32)
        return np.where(np.isfinite(numbers), numbers, np.float32(0.0))

    def unpack(self, mean: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, policy.Measured]:
        """Rank 0's choice, int32 [B], its candidate to try, and the measurements.

        -1 stands for no choice and for no trial. There is neither if the numbers are zeros: in the first step, and
        after `AutoSelector.hold` or `restored`.
        """
        parts = tf.split(tf.ensure_shape(mean, [self.size]), self._sizes)
        fields = {name: tf.reshape(part, self._shapes[name]) for name, part in zip(self._shapes, parts)}
        del fields["wanted"]
        choice, trial = (self._proposed(fields.pop(name)) for name in ("choice", "trial"))
        # The smallest wire time: it is that of the ranks that were last, which did not wait for others.
        fields["wire"] = tf.reduce_min(fields["wire"] * (self._ranks / self._members))
        return choice, trial, policy.Measured(**fields)

    def progress(self, mean: np.ndarray) -> np.ndarray:
        """The field `progress` of `policy.Measured`, float32 [ROWS, C]."""
        rows, candidates = self._progress_shape
        return mean[self._progress_at : self._progress_at + rows * candidates].reshape(self._progress_shape)

    def times_and_wanted(self, mean: np.ndarray) -> tuple[float, float, Sequence[float]]:
        """The seconds `rest` and `span` of `policy.Measured`, and what rank 0 wants to be traced.

        The latter has a number above 0 for each position of `Traces.mask` that is wanted.
        """
        rest, span, *wanted = mean[self._rest_at :].tolist()
        return rest, span, wanted

    def _proposed(self, field: tf.Tensor) -> tf.Tensor:
        return tf.cast(tf.round(field * self._ranks), tf.int32) - 1
