"""When and how `OneBitAdam` freezes its variance."""

from __future__ import annotations

import tensorflow as tf

from ...formats.quantize import SIGN_BLOCK

# The variance is stable if, of its norms now and 1 / (1 - beta_2) steps ago, the smaller is at least this share of
# the larger. Tang et al. 2021 (section 3.3, figure 2: BERT-Large) observed that the norm settles; the share and
# the number of steps, which is the memory of v, are a choice of this package.
STABLE = 0.96
# An element is small if the root of its variance is below this share of the mean root in its block of 1024. One bit's
# magnitude, which is the block's, would make its steps too large. (37% of the elements of the digits' network are
# small; if they are not left out, training diverges.)
SMALL = 0.1


def is_stable(norm: tf.Tensor, previous: tf.Tensor) -> tf.Tensor:
    """Whether two successive norms of the variance, float32 scalars, are nearly the same; a bool scalar."""
    return tf.minimum(norm, previous) >= STABLE * tf.maximum(norm, previous)


def without_small(v: tf.Tensor) -> tf.Tensor:
    """A variance, of any shape, with 0 in place of the small elements. Blocks of 1024 follow the order in memory."""
    size = v.shape.num_elements()
    blocks = -(-size // SIGN_BLOCK)
    padding = blocks * SIGN_BLOCK - size
    roots = tf.reshape(tf.pad(tf.sqrt(tf.reshape(v, [-1])), [[0, padding]]), [blocks, SIGN_BLOCK])
    starts = SIGN_BLOCK * tf.range(blocks, dtype=tf.float32)[:, None]
    elements = tf.minimum(float(SIGN_BLOCK), float(size) - starts)  # the last block may be shorter
    mean = tf.reduce_sum(roots, 1, keepdims=True) / tf.cast(elements, v.dtype)
    small = tf.reshape(roots < SMALL * mean, [-1])[:size]
    return tf.where(tf.reshape(small, v.shape), tf.zeros_like(v), v)
