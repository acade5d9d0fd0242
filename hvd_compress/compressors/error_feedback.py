"""Error feedback: what a step did not send is added to the next step's gradient.

With gradient g, residual r and C the compressor: x = g + decay * r, send C(x), keep r' = x - C(x). Nothing
is lost while decay is 1: over all steps, what was sent plus the residual is the sum of the gradients
(Karimireddy et al. 2019, Algorithm 2; Stich et al. 2018).

Momentum correction (Lin et al. 2018, DGC, equation 4 and section 3.2): the local velocity u = m * u + g takes
the gradient's place, and where an element was sent its velocity is cleared (momentum factor masking).
Meant for plain SGD as the optimizer: its own momentum would count twice. Local gradients are clipped before (ibid.).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ..kernels.compile import compiled, fed_back


def add(gradient: tf.Tensor, residual: tf.Tensor | None, decay: float) -> tf.Tensor:
    """Gradient + decay * residual, float32 of any shape; the gradient itself where there is no residual."""
    return gradient if residual is None else _add(gradient, residual, decay)


_add = compiled(fed_back)


@compiled
def accelerate(gradient: tf.Tensor, velocity: tf.Tensor, momentum: float) -> tf.Tensor:
    """The new velocity, momentum * velocity + gradient."""
    return momentum * velocity + gradient


@compiled
def mask(velocity: tf.Tensor, sent: tf.Tensor) -> tf.Tensor:
    """`velocity` with zeros where `sent` (what was sent, decoded) is not zero."""
    return tf.where(sent == 0.0, velocity, tf.zeros_like(velocity))


def clipped(gradients: Sequence[Any], limit: float) -> list[Any]:
    """Gradients scaled down together so that the 2-norm of all of them is `limit` at most.

    Args:
        gradients: Tensors, IndexedSlices or None; what holds no floating point numbers stays as it is. Where a value is
            infinite or NaN, so is some value of the result.
        limit: Above 0.
    """
    values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients]
    floats = [tf.cast(v, tf.float32) for v in values if v is not None and v.dtype.is_floating]
    if not floats:
        return list(gradients)
    norm = tf.sqrt(2.0 * tf.add_n([tf.nn.l2_loss(v) for v in floats]))
    factor = tf.minimum(1.0, limit / norm)

    def scaled(gradient: Any) -> Any:
        if gradient is None or not gradient.dtype.is_floating:
            return gradient
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(scaled(gradient.values), gradient.indices, gradient.dense_shape)
        return gradient * tf.cast(factor, gradient.dtype)

    return [scaled(gradient) for gradient in gradients]


@compiled
def all_finite(x: tf.Tensor) -> tf.Tensor:
    """Whether no element of `x` is infinite or NaN; a bool scalar."""
    return tf.reduce_all(tf.math.is_finite(x))
