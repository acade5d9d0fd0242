"""By which factor steps with each candidate take longer than predicted: the bias.

It covers what the cost model does not know. A candidate that is not in use is tried for two steps, and the second one
is timed. Only candidates whose predicted cost is close to that of the choice are tried. C candidates; float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from ..formats.auto import TRIAL_STEPS
from .arrays import cast

# A bias that was measured so many steps ago should be measured again.
STALE_STEPS = 200.0
# Steps from the beginning of one trial to that of the next. The first trial waits for some measurements of the choice.
TRIAL_INTERVAL = 8.0
# A candidate is tried only if it is predicted to cost less than so many times the choice.
_MAX_COST_RATIO = 1.4
# The least weight of a measurement of the choice: small, since the link tracker follows the same times much faster.
_MIN_WEIGHT_OF_CHOICE = 0.05
# The first measurements of the choice have a large weight, so they are limited to this factor: larger errors are the
# link's.
_MAX_FIRST_RATIO = 1.5
_MAX_RATIO = 4.0
# Candidates that are not in use take over this share of the choice's error.
COMMON_SHARE = 0.5
# The exponent by which the biases of unused candidates go back to 1 in each step.
_BIAS_DECAY = 0.998


def measured(xp: Any, bias: Any, age: Any, used: Any, ratio: Any, chosen: Any, known: Any) -> tuple[Any, Any]:
    """Updates the biases with the time of one step.

    The biases of candidates that are not in use decay towards 1. They also take over half of the logarithm of the
    choice's error, as if half of every error were common to all candidates.

    Args:
        xp: The array module, see `arrays`.
        bias: [C], the biases so far.
        age: [C], steps since each bias was measured.
        used: [C], the share of the buckets that used each candidate.
        ratio: Scalar, the step's time divided by the time predicted with `bias`; 0 if nothing was measured.
        chosen: bool, whether the step used the choice, not a trial.
        known: Scalar, how often the choice was measured before. Its bias is the geometric mean of the first
            measurements: a trial should not be compared with a choice of which little is known.

    Returns:
        The new biases and ages.
    """
    timed = ratio > 0.0
    updated = timed & (used > 0.0)
    weight = xp.maximum(1.0 / (known + 1.0), _MIN_WEIGHT_OF_CHOICE)
    is_first = chosen & (weight > _MIN_WEIGHT_OF_CHOICE)
    limit = xp.where(is_first, np.float32(_MAX_FIRST_RATIO), np.float32(_MAX_RATIO))
    change = xp.clip(ratio, 1.0 / limit, limit) ** xp.where(chosen, weight, 1.0)
    # A candidate with few buckets learns no less from the choice than one with none.
    share = xp.where(timed, xp.maximum(used, COMMON_SHARE * cast(xp, chosen, np.float32)), 0.0)
    return (
        xp.clip(xp.where(updated, bias, bias**_BIAS_DECAY) * change**share, 0.1, 10.0),
        xp.where(updated, 0.0, xp.minimum(age + 1.0, STALE_STEPS)),
    )


def next_trial(
    trial: tf.Tensor, since: tf.Tensor, age: tf.Tensor, ratios: tf.Tensor, possible: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Which candidate to try next, if any.

    Args:
        trial: int32, the candidate that was tried last.
        since: Scalar, steps since that trial began.
        age: [C], steps since each bias was measured.
        ratios: [C], each candidate's predicted cost divided by the choice's.
        possible: bool [C], which candidates may be tried.

    Returns:
        The new `trial` and `since`, and the candidate to try in the next step, int32: -1 for none.
    """
    due = possible & (age >= STALE_STEPS) & (ratios < _MAX_COST_RATIO)
    begins = (since >= TRIAL_INTERVAL) & tf.reduce_any(due)
    cheapest = tf.argmin(tf.where(due, ratios, ratios.dtype.max), output_type=tf.int32)
    trial = tf.where(begins, cheapest, trial)
    since = tf.where(begins, 0.0, since + 1.0)
    return trial, since, tf.where(since < TRIAL_STEPS, trial, -1)
