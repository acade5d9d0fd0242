"""What the model does not see, measured: by which factor steps with each candidate take longer than predicted.

Candidates that are not in use are tried for two steps, the second of which counts, where what is predicted for
them is close enough to what the choice takes that it may be wrong. C candidates; float32.
"""

from __future__ import annotations

import tensorflow as tf

# After so many steps what was measured should be measured anew.
STALE = 200.0
# Steps from one trial to the next; the first one waits until the choice was measured some times.
GAP = 8.0
# Steps that a trial lasts.
LASTS = 2.0
# What is predicted to cost more than so many times the choice is not tried.
_PLAUSIBLE = 1.4
# What a measurement of the choice weighs at least: the link is followed with it, too, and much faster.
_WEIGHT_OF_CHOICE = 0.05
# By how much the first ones, which weigh more, may be off: what is off by more is the link.
_PLAUSIBLE_AT_FIRST = 1.5
# How much of the choice's error is that of all.
_COMMON = 0.5
# How much of what was measured is still believed a step later.
_KEPT = 0.998


def measured(
    bias: tf.Tensor, age: tf.Tensor, used: tf.Tensor, ratio: tf.Tensor, chosen: tf.Tensor, before: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Takes in how long a step took.

    Args:
        bias: [C], the factors so far.
        age: [C], steps since each was measured.
        used: [C], the share of the buckets that had each candidate.
        ratio: Scalar, the step's time over the one that was predicted with `bias`; 0 if nothing was measured.
        chosen: bool, whether that was the choice, and not a trial.
        before: Scalar, how often the choice was measured before. The factor is the geometric mean of the first
            measurements, so that what is tried is not compared with a choice of which little is known.

    Returns:
        The new factors and ages. Factors of what is not used go back to 1 by and by, and take part in what is found
        of the choice: half of the logarithm, as if all were off by as much in common as each by itself.
    """
    timed = ratio > 0.0
    seen = timed & (used > 0.0)
    weight = tf.maximum(1.0 / (before + 1.0), _WEIGHT_OF_CHOICE)
    limit = tf.where(chosen & (weight > _WEIGHT_OF_CHOICE), _PLAUSIBLE_AT_FIRST, 4.0)
    change = tf.clip_by_value(ratio, 1.0 / limit, limit) ** tf.where(chosen, weight, 1.0)
    # Half of what is found of the choice also where a candidate has few buckets or none.
    share = tf.where(timed, tf.maximum(used, tf.where(chosen, _COMMON, 0.0)), 0.0)
    return (
        tf.clip_by_value(tf.where(seen, bias, bias**_KEPT) * change**share, 0.1, 10.0),
        tf.where(seen, 0.0, tf.minimum(age + 1.0, STALE)),
    )


def next_trial(
    trial: tf.Tensor, since: tf.Tensor, age: tf.Tensor, ratios: tf.Tensor, possible: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Which candidate should be tried, if any.

    Args:
        trial: int32, the one that was tried last.
        since: Scalar, steps since that began.
        age: [C], steps since each was measured.
        ratios: [C], what each is predicted to cost, over what the choice does.
        possible: bool [C], what may be tried at all.

    Returns:
        The new `trial` and `since`, and what should be tried next, int32: -1 for nothing.
    """
    due = possible & (age >= STALE) & (ratios < _PLAUSIBLE)
    begins = (since >= GAP) & tf.reduce_any(due)
    best = tf.argmin(tf.where(due, ratios, ratios.dtype.max), output_type=tf.int32)
    trial = tf.where(begins, best, trial)
    since = tf.where(begins, 0.0, since + 1.0)
    return trial, since, tf.where(since < LASTS, trial, -1)
