"""Norms of a bucket before and after compression, sampled in some steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ..compressors import Compressor
from ..exchange.local_input import LocalInput

# 2-norms over all chunks: of the gradient (the velocity, with momentum correction), of x = gradient + decay * residual,
# of x - C(x), and of the new residual.
NORMS = ("gradient_norm", "norm", "lost_norm", "residual_norm")


def not_sampled() -> tf.Tensor:
    """The norms of a bucket in steps without sampling: NaN, float32 [4]."""
    return tf.fill([len(NORMS)], tf.constant(math.nan))


def lossless(sample: tf.Tensor) -> tf.Tensor:
    """The norms of an uncompressed bucket: nothing is lost, and the gradients' norms are not taken."""
    with tf.device("CPU"):
        return tf.where(sample, tf.constant([math.nan, math.nan, 0.0, 0.0]), not_sampled())


def of_bucket(
    sample: tf.Tensor,
    compressor: Compressor,
    gradients: Sequence[tf.Tensor],
    local: LocalInput,
    residuals: Sequence[tf.Tensor] | None,
) -> tf.Tensor:
    """The norms of a bucket, float32 [4] as in `NORMS`; NaN where `sample` is False.

    With error feedback, x - C(x) is the new residual. Without (`residuals` is None), the bucket is encoded once more.
    The other arguments are those of `pipeline.Measure`.
    """

    def lost() -> tf.Tensor:
        if compressor.uncompressed:
            return tf.constant(0.0)
        if not compressor.pure:  # it may keep state from call to call
            return tf.constant(math.nan)
        again = local._replace(keep=True)
        return norm_of([again.encode(compressor, i).residual for i in range(local.num_chunks)])

    def take() -> tf.Tensor:
        summed = [local.sum(i) for i in range(local.num_chunks)]
        residual = tf.constant(0.0) if residuals is None else norm_of(residuals)
        return tf.stack([norm_of(gradients), norm_of(summed), lost() if residuals is None else residual, residual])

    return tf.cond(sample, take, not_sampled)


def norm_of(tensors: Sequence[Any]) -> tf.Tensor:
    """The 2-norm over all of these tensors, a float32 scalar; 0 if there are none."""
    return tf.sqrt(2.0 * tf.add_n([tf.constant(0.0), *(tf.nn.l2_loss(tf.cast(t, tf.float32)) for t in tensors)]))
