"""Whether a new trace of the step, with more candidates, saves more time than it takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from . import policy
from .predictions import Predictions
from .progress import Row

# For each candidate, a later trace takes about so many times as long as the first one. With a second candidate it was
# 1.0 for a transformer and for dense layers, and 1.7 for a small CNN. A new model-wide one also compiles kernels.
_TRACE_FACTOR = 1.5
# Seconds. A trace takes at least so long: what the first one took is not known well if the rest of a step takes longer.
_LEAST_TRACE = 0.5
# The share of the time so far that a trace may take to measure the progress of a candidate that is hardly in doubt.
_OF_MEASURING = 0.03


class Traced(NamedTuple):
    """What steps are traced with, and what training has taken so far."""

    candidates: Sequence[int]  # positions
    compresses_rows: bool  # of embeddings
    measures_later: bool  # whether the progress of the only candidate is measured after another trace
    steps: int
    seconds: float
    first_trace: float  # seconds from the plan to the first exchange


def additions(predictions: Predictions, state: policy.State, traced: Traced, counts: np.ndarray) -> frozenset[int]:
    """Positions in `Traces.mask` of what might save the most time, less that of the trace. Nothing if none is worth it.

    It counts what is saved for the progress of as many uncompressed steps as were done. A measurement of progress
    counts as if it saved a share of the time so far.

    Args:
        predictions: What the candidates are expected to cost and to gain.
        state: What was measured, NumPy arrays.
        traced: What steps are traced with.
        counts: `State.embedding_counts`, int64 [embeddings, 3].
    """
    if not float(state.rest) > 0.0:
        return frozenset()
    value = predictions.hoped(state, np.flatnonzero(state.progress[Row.ENERGY] > 0.0).tolist())
    rules, costs, sizes = predictions.rules, predictions.costs, predictions.sizes
    options, savings = policy.possible_savings(rules, state, costs, value, sizes)
    saved_by: dict[frozenset[int], float] = {frozenset(): 0.0}  # the most, with the same candidates in addition
    for picks, saved in zip(options.tolist(), savings.tolist()):
        more = frozenset(picks) - frozenset(traced.candidates)
        saved_by[more] = max(saved_by.get(more, 0.0), saved)
    without = saved_by[frozenset()]  # by a switch among those that are traced
    saved_by = {more: max(0.0, saved - without) for more, saved in saved_by.items()}
    rows = frozenset([predictions.rows_at])
    if not traced.compresses_rows:
        saved_by_rows = predictions.row_savings.now(counts, float(state.link[1]))
        saved_by |= {more | rows: saved + saved_by_rows for more, saved in saved_by.items()}
    gains = {more: saved * traced.steps for more, saved in saved_by.items()}
    if traced.measures_later:  # with another candidate, both are measured in any case
        alone, measuring = [more for more in gains if more <= rows], frozenset([predictions.measuring_at])
        gains |= {more | measuring: gains[more] + _OF_MEASURING * traced.seconds for more in alone}
    # The first step itself is not a part of its trace, which may come before several backward passes.
    once = max(_LEAST_TRACE, traced.first_trace - float(state.rest))
    gains = {more: gain - cost(predictions, traced.candidates, more, once) for more, gain in gains.items() if more}
    return max((new for new in gains if gains[new] > 0.0), key=lambda new: gains[new], default=frozenset())


def cost(predictions: Predictions, traced: Sequence[int], more: Iterable[int], once: float) -> float:
    """Seconds that a trace with `more` positions in `Traces.mask` takes. The first trace took `once`."""
    candidates = {c for c in more if c < predictions.rows_at}
    kernels = sum(predictions.compile_seconds[c] for c in candidates)
    return once * _TRACE_FACTOR * len(candidates.union(traced)) + kernels
