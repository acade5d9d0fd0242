"""Which steps were trials of `auto`. NumPy only."""

from __future__ import annotations

import itertools

import numpy as np

from ..formats.auto import TRIAL_STEPS


def trial_steps(choices: np.ndarray, before: np.ndarray) -> np.ndarray:
    """Whether each step is a trial, bool [T].

    A trial is a run of one or two steps with another choice than the steps before. The last steps count as one until
    they go on for longer.

    Args:
        choices: The compressors of the buckets of `auto` in each step, [T, B].
        before: Those of the last step before that was no trial, [B].
    """
    trials: list[bool] = []
    rows = [tuple(row) for row in choices.tolist()]
    chosen = tuple(before.tolist())
    for choice, run in itertools.groupby(rows):
        length = len(list(run))
        is_trial = choice != chosen and length <= TRIAL_STEPS
        trials += [is_trial] * length
        chosen = chosen if is_trial else choice
    return np.array(trials, bool)
