"""The numbers that each rank of `auto` sends in a step: its measurements, and what rank 0 decides."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import policy
from .arrays import cast
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
        shapes: dict[str, tuple[int, ...]] = {  # in the order in which `pack` joins them
            "choice": (buckets,), "trial": (), "progress": (ROWS, candidates), "wire": (places,),
            "exchange": (buckets,), "waits": (buckets,), "rest": (), "span": (), "wanted": (candidates + 2,),
        }  # fmt: skip
        ends = np.cumsum([math.prod(shape) for shape in shapes.values()]).tolist()
        self.size = ends[-1]
        self._shapes, self._inner_ends = shapes, ends[:-1]
        begins = dict(zip(shapes, [0, *ends]))
        self._progress_at, self._span_at = slice(begins["progress"], begins["wire"]), begins["span"]

    def pack(
        self, choice: np.ndarray, tried: np.int32, probe: np.ndarray, times: StepTimes, wanted: np.ndarray
    ) -> np.ndarray:
        """The numbers of this rank, float32 [S]; 0 for what is not finite, and for all of a candidate's progress then.

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
        probe = np.where(np.isfinite(probe).all(0), probe, 0.0)
        parts = [proposed, probe.ravel(), of_rank, wire + coding, waits, [rest, span], decides * wanted]
        numbers = np.concatenate(parts).astype(np.float32)
        return np.where(np.isfinite(numbers), numbers, np.float32(0.0))

    def unpack(self, xp: Any, mean: Any) -> tuple[Any, Any, policy.Measured]:
        """Rank 0's choice, int32 [B], its candidate to try, and the measurements, of `mean`, float32 [S].

        `xp` is the array module, see `arrays`.
        -1 stands for no choice and for no trial. There is neither if the numbers are zeros: in the first step, and
        after `AutoSelector.hold` or `restored`.
        """
        parts = zip(self._shapes.items(), xp.split(mean, self._inner_ends))
        fields = {name: xp.reshape(part, shape) for (name, shape), part in parts if name != "wanted"}
        proposed = (fields.pop(name) * self._ranks for name in ("choice", "trial"))  # whole numbers, nearly
        choice, trial = (cast(xp, xp.floor(number + 0.5), np.int32) - 1 for number in proposed)
        # The smallest wire time: it is that of the ranks that were last, which did not wait for others.
        fields["wire"] = xp.min(fields["wire"] * np.asarray(self._ranks / self._members, np.float32))
        return choice, trial, policy.Measured(**fields)

    def progress(self, mean: np.ndarray) -> np.ndarray:
        """The field `progress` of `policy.Measured`, float32 [ROWS, C]."""
        return mean[self._progress_at].reshape(self._shapes["progress"])

    def span_and_wanted(self, mean: np.ndarray) -> tuple[float, Sequence[float]]:
        """The seconds `span` of `policy.Measured`, and what rank 0 wants to be traced.

        The latter has a number above 0 for each position of `Traces.mask` that is wanted.
        """
        span, *wanted = mean[self._span_at :].tolist()
        return span, wanted
