"""The rules of `auto` for model-wide candidates.

A model-wide candidate (`powersgd`) needs gradients in their own shapes, so it is used for all buckets or for none. Its
whole cost stands with the last bucket, and zeros with the others: it is exchanged when the last gradient is ready. It
loses the same share of every bucket. B buckets, C candidates; float32.

`lost` [B, C] is the share of its energy that each bucket loses, `nbytes` [B] the bytes of gradient, and `model_wide`,
bool [C], whether candidates are model-wide.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import tensorflow as tf


def averaged(lost: tf.Tensor, nbytes: tf.Tensor, model_wide: Sequence[bool]) -> tf.Tensor:
    """Replaces the shares that model-wide candidates lose by their mean over the buckets, weighted by bytes."""
    mean = tf.reduce_sum(lost * nbytes[:, None], 0) / tf.reduce_sum(nbytes)
    return tf.where(tf.constant(list(model_wide)), mean, lost)


def admit(reached: tf.Tensor, lost: tf.Tensor, nbytes: tf.Tensor, model_wide: Sequence[bool]) -> tf.Tensor:
    """Which candidates may be chosen, bool [B, C].

    Candidates that reach the target may be chosen. If no model-wide candidate reaches it, and some bucket has no other
    candidate that does, then the candidates that lose least may be chosen, too: either a model-wide one or, for each
    bucket, the best of the others.

    `reached`, bool [B, C], says which candidates reach the target; `lost` is what `averaged` returned.
    """
    is_model_wide = tf.constant(list(model_wide))
    every_bucket = tf.reduce_all(tf.reduce_any(reached & ~is_model_wide, -1))
    enough = every_bucket | tf.reduce_any(reached[0] & is_model_wide)
    least_per_bucket = tf.reduce_min(tf.where(is_model_wide, math.inf, lost), -1, keepdims=True)
    least_model_wide = tf.reduce_min(tf.where(is_model_wide, lost[0], math.inf))
    mean = tf.reduce_sum(least_per_bucket[:, 0] * nbytes) / tf.reduce_sum(nbytes)
    loses_least = tf.where(
        least_model_wide < mean,
        is_model_wide & (lost <= least_model_wide),
        ~is_model_wide & (lost <= least_per_bucket),
    )
    return reached | (loses_least & ~enough)


def allowed(options: tf.Tensor, admitted: tf.Tensor) -> tf.Tensor:
    """Which of the choices, int32 [N, B], use only candidates that are `admitted`, bool [B, C]: bool [N]."""
    is_chosen = tf.one_hot(options, admitted.shape[1], True, False, dtype=tf.bool)  # [N, B, C]
    return tf.reduce_all(tf.reduce_any(is_chosen & admitted, -1), -1)


def with_measured_loss(
    lost: tf.Tensor, energy: tf.Tensor, shares: tf.Tensor, loss: tf.Tensor, used: tf.Tensor, weight: float
) -> tf.Tensor:
    """Replaces what a probe measured of the candidate in use by what that candidate lost of the whole model.

    Args:
        lost: [B, C], running averages of the energies that candidates lose, updated with this step's probe.
        energy: [B], running averages of the energies of the probed chunks, updated in the same way.
        shares: [B, C], the lost shares before this step; zeros where there was no probe yet.
        loss: [2], the energies of the residuals and of gradients + residuals; zeros if they were not measured.
        used: int32, the candidate in use.
        weight: The weight of the newest share in the running average.

    Returns:
        The new `lost`.
    """
    share = tf.math.divide_no_nan(loss[0], loss[1])
    new = tf.where(shares > 0.0, shares + weight * (share - shares), share) * energy[:, None]
    is_used = tf.one_hot(used, lost.shape[1], True, False, dtype=tf.bool)
    return tf.where(is_used & (loss[1] > 0.0), new, lost)
