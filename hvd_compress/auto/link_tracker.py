"""What the link is like now, followed from step to step: numbers in, numbers out; float32."""

from __future__ import annotations

import tensorflow as tf

# What a step's measurements weigh one step later.
FORGET = 0.45
# How strongly the factors hold on to what they were, in observations: latency changes less often than bandwidth.
_STIFF = (1.0, 0.05)
_PER_STEP = 4.0
_LIMIT = 1e4


def fit(
    moments: tf.Tensor,
    factors: tf.Tensor,
    messages: tf.Tensor,
    transfer: tf.Tensor,
    seconds: tf.Tensor,
    coding: tf.Tensor,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Follows the link: by which factors latency and time per byte differ from the calibrated ones.

    Least squares of (latency * messages + byte * transfer - seconds) / (seconds + coding) over all steps so far, each
    one's weighing 0.45 of the next one's. Relative to what was measured, a step that something held up
    weighs little, while one that was faster than the link could be is not possible; and one that was spent on
    encoding and decoding tells little about the link.

    Args:
        moments: [5], sums over past steps; zeros at first.
        factors: [2], of latency and of time per byte, so far; ones at first.
        messages: Scalar, predicted seconds of latency of what was exchanged in a step.
        transfer: Scalar, predicted seconds of the bytes.
        seconds: Scalar, measured on the wire.
        coding: Scalar, seconds of encoding and decoding; all of these are 0 if nothing was measured.

    Returns:
        The new moments and factors.
    """
    whole = seconds + coding
    x, y, z = (tf.math.divide_no_nan(part, whole) for part in (messages, transfer, seconds))
    moments = FORGET * moments + tf.stack([x * x, x * y, y * y, x * z, y * z])
    xx, xy, yy, sx, sy = tf.unstack(moments)
    a, b = tf.unstack(factors)
    # In units of the factors so far, to which the stiffness refers.
    m00, m01, m11 = xx * a * a + _STIFF[0], xy * a * b, yy * b * b + _STIFF[1]
    r0, r1 = sx * a + _STIFF[0], sy * b + _STIFF[1]
    change = tf.stack([r0 * m11 - r1 * m01, r1 * m00 - r0 * m01]) / (m00 * m11 - m01 * m01)
    return moments, _moved(factors, change)


def _moved(factor: tf.Tensor, change: tf.Tensor) -> tf.Tensor:
    change = tf.clip_by_value(change, 1.0 / _PER_STEP, _PER_STEP)
    return tf.clip_by_value(factor * change, 1.0 / _LIMIT, _LIMIT)
