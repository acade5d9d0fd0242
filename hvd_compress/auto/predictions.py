"""What `auto` may choose, and what it expects of its candidates before training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from . import policy
from .rows import RowSavings


class Predictions(NamedTuple):
    """The rules, and expected costs and progress, of B buckets and C candidates. The same on all ranks."""

    rules: policy.Rules  # what may be chosen, from the arguments of `auto`
    nbytes: Sequence[int]  # [B], bytes of each bucket, as float32
    costs: policy.Costs
    burst: float  # seconds of a step's transfer that may take no time, because the link transmits them at once
    prior: policy.Value  # what candidates are worth at least
    usual: np.ndarray  # float32 [C], the progress that they usually make
    row_savings: RowSavings  # what it saves to compress the rows of embeddings
    compile_seconds: Sequence[float]  # [C], that a later trace takes for kernels of a candidate that it adds
    others: Mapping[str, policy.Costs]  # costs [B, 1] of compressors that reports compare with, by their spec strings

    @property
    def sizes(self) -> np.ndarray:
        """`nbytes` as a float32 array."""
        return np.array(self.nbytes, np.float32)
