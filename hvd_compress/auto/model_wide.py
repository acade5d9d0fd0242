"""Candidates that need gradients in their own shapes, and so are for all buckets at once or for none (`powersgd`).

What they cost stands with the last bucket, and zeros with the others: they cross when the last gradients are there,
as the last bucket does. What they lose is the same share of all buckets. B buckets, C candidates; float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import tensorflow as tf


def of_model(lost: tf.Tensor, nbytes: tf.Tensor, whole: Sequence[bool]) -> tf.Tensor:
    """`lost` [B, C] with the mean over the buckets, by their bytes [B], for candidates that are `whole` [C]."""
    mean = tf.reduce_sum(lost * nbytes[:, None], 0) / tf.reduce_sum(nbytes)
    return tf.where(tf.constant(list(whole)), mean, lost)


def admit(reached: tf.Tensor, lost: tf.Tensor, nbytes: tf.Tensor, whole: Sequence[bool]) -> tf.Tensor:
    """Which candidates may be chosen, bool [B, C].

    Those that reach the target; where neither one that is `whole` does nor some other one for each bucket, also what
    loses least: the one that is whole, or for each bucket another.

    Args:
        reached: bool [B, C], whether they let enough through.
        lost: [B, C], of `of_model`.
        nbytes: [B], of gradient.
        whole: bool [C].
    """
    is_whole = tf.constant(list(whole))
    enough = tf.reduce_all(tf.reduce_any(reached & ~is_whole, -1)) | tf.reduce_any(reached[0] & is_whole)
    several = tf.reduce_min(tf.where(is_whole, math.inf, lost), -1, keepdims=True)
    one = tf.reduce_min(tf.where(is_whole, lost[0], math.inf))
    better = one < tf.reduce_sum(several[:, 0] * nbytes) / tf.reduce_sum(nbytes)
    least = tf.where(better, is_whole & (lost <= one), ~is_whole & (lost <= several))
    return reached | (least & ~enough)


def allowed(options: tf.Tensor, admitted: tf.Tensor) -> tf.Tensor:
    """Which choices, int32 [N, B], take nothing but what is admitted, bool [B, C]; bool [N]."""
    hot = tf.one_hot(options, admitted.shape[1], True, False, dtype=tf.bool)
    return tf.reduce_all(tf.reduce_any(hot & admitted, -1), -1)


def with_use(
    lost: tf.Tensor, energy: tf.Tensor, old: tf.Tensor, seen: tf.Tensor, used: tf.Tensor, weight: float
) -> tf.Tensor:
    """Takes in what a candidate in use lost of the whole model, in place of what was tried on a tensor of it.

    Args:
        lost: [B, C], running averages of the energies that candidates lose, what was tried in this step taken in.
        energy: [B], of the energies of what was tried, likewise.
        old: [B, C], the shares before this step; any number where there was none yet.
        seen: [2], the energies of the residuals and of gradients + residuals; zeros if they were not measured.
        used: int32, which candidate was in use.
        weight: Of the newest share in the running average.

    Returns:
        The new `lost`.
    """
    share = tf.math.divide_no_nan(seen[0], seen[1])
    new = tf.where(old > 0.0, old + weight * (share - old), share) * energy[:, None]
    column = tf.one_hot(used, lost.shape[1], True, False, dtype=tf.bool)
    return tf.where(column & (seen[1] > 0.0), new, lost)
