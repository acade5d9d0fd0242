"""What `auto` may choose, and what it expects of its candidates before training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from . import policy, progress, usual_progress
from .rows import RowSavings


class Predictions(NamedTuple):
    """The rules, and expected costs and progress, of B buckets and C candidates: NumPy arrays, equal on all ranks."""

    rules: policy.Rules  # what may be chosen, from the arguments of `auto`
    nbytes: Sequence[int]  # [B], bytes of each bucket, as float32
    costs: policy.Costs
    burst: float  # seconds of a step's transfer that may take no time, because the link transmits them at once
    prior: policy.Value  # what candidates are worth at least
    usual: np.ndarray  # float32 [C], the progress that they usually make
    names: Sequence[str]  # of the compressors; "" without one
    row_savings: RowSavings  # what it saves to compress the rows of embeddings
    compile_seconds: Sequence[float]  # [C], that a later trace takes for kernels of a candidate that it adds
    others: Mapping[str, policy.Costs]  # costs [B, 1] of compressors that reports compare with, by their spec strings

    def hoped(self, state: policy.State, measured: Sequence[int]) -> policy.Value:
        """What candidates may be worth, in a state of NumPy arrays.

        Those at the positions `measured` are worth what was measured.
        """
        value = policy.value_of(np, state, self.prior)
        is_clear = progress.outweighs_noise(np, state.progress)
        telling = [c for c in measured if is_clear[c]]
        hoped = usual_progress.hoped(self.usual.tolist(), self.names, {c: float(value.progress[c]) for c in telling})
        is_measured = np.isin(np.arange(len(hoped)), measured)
        most = np.where(is_measured, value.progress, np.maximum(value.progress, np.array(hoped, np.float32)))
        return value._replace(progress=most)

    @property
    def rows_at(self) -> int:
        """The position in `Traces.mask` of compressed rows of embeddings, after those of the candidates."""
        return len(self.names)

    @property
    def measuring_at(self) -> int:
        """The position in `Traces.mask` of the measurement of progress."""
        return len(self.names) + 1

    @property
    def sizes(self) -> np.ndarray:
        """`nbytes` as a float32 array."""
        return np.array(self.nbytes, np.float32)
