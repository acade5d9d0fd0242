"""Candidates that need gradients in their own shapes, and so are for all buckets at once or for none (`powersgd`).

What they cost stands with the last bucket, and zeros with the others: they cross when the last gradients are there,
as the last bucket does. What they lose is the same share of all buckets. B buckets, C candidates; float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import tensorflow as tf

from ..compressors import PowerSGD
from ..engine.grouping import Shape
from ..kernels import subspace as low_rank


def lost_of_noise(compressor: PowerSGD, shapes: Sequence[Shape]) -> float:
    """The expected share of the energy of white noise that tensors of these shapes lose, from a random start.

    With a Gaussian matrix M of m x n and a start Q of r columns, all of M's part in the span of Q gets through, r m of
    m n; the rest of M is independent of M Q, whose span lets r of its m dimensions through: r (n - r).
    """
    through = 0
    for shape in shapes:
        matrix = compressor.matrix(shape)
        if matrix is None:
            through += math.prod(shape)
        else:
            through += compressor.rank * (matrix.rows + matrix.columns - compressor.rank)
    return 1.0 - through / sum(map(math.prod, shapes))


def lost_alone(compressor: PowerSGD, x: tf.Tensor) -> tf.Tensor:
    """The share of its energy that a tensor by itself would lose from the random start, a float32 scalar."""
    shape = tuple(x.shape.as_list())
    matrix = compressor.matrix(shape)
    if matrix is None:
        return tf.constant(0.0)
    x = tf.reshape(x, matrix)
    n = compressor.rank * matrix.columns
    # A number depends on its position only: compiled for each power of two, not for each shape.
    start = low_rank.start(tf.constant(0), 2 ** math.ceil(math.log2(n)))[:n]
    return 1.0 - low_rank.through(x, tf.reshape(start, [compressor.rank, matrix.columns]))


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
