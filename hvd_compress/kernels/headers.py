"""The step and the base of a block of `int2`, in 16 bits.

A step is not negative, so it needs 14 bits for 7 significant ones: 8 of the exponent and 6 of the mantissa. A base is 0
to -3.
"""

from __future__ import annotations

import tensorflow as tf

from . import linear

_DROPPED = 17  # bits of a float32's mantissa
_NAN = 0x7FC00000


def of_extremes(low: tf.Tensor, high: tf.Tensor) -> tf.Tensor:
    """The headers, int32 [rows, 1], of blocks with these minima and maxima, float32 [rows, 1] each."""
    finite = tf.math.is_finite(low) & tf.math.is_finite(high)
    low, high = tf.minimum(low, 0.0), tf.maximum(high, 0.0)
    step, _ = linear.grid(low, high, 2, False)
    bits = tf.where(finite, tf.bitcast(step, tf.int32) + (1 << (_DROPPED - 1)), _NAN)
    kept = tf.bitwise.right_shift(bits, _DROPPED)
    # The number of levels below zero: -low / step, rounded, but without a division.
    below = sum(tf.cast(-low > (i + 0.5) * _step(kept), tf.int32) for i in range(3))
    return tf.bitwise.bitwise_or(tf.bitwise.left_shift(kept, 2), below)


def step_and_base(headers: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Steps and bases, float32 [rows, 1] each, of headers of any integer dtype."""
    headers = tf.cast(headers, tf.int32)
    base = -tf.cast(tf.bitwise.bitwise_and(headers, 3), tf.float32)
    return _step(tf.bitwise.right_shift(headers, 2)), base


def _step(kept: tf.Tensor) -> tf.Tensor:
    return tf.bitcast(tf.bitwise.left_shift(kept, _DROPPED), tf.float32)
