"""Error feedback: what a step did not send is added to the next step's gradient.

With gradient g, residual r and C the compressor: x = g + decay * r, send C(x), keep r' = x - C(x). Nothing
is lost while decay is 1: over all steps, what was sent plus the residual is the sum of the gradients
(Karimireddy et al. 2019, Algorithm 2; Stich et al. 2018).
"""

from __future__ import annotations

import tensorflow as tf

from ..kernels import native
from ..kernels.compile import compiled, fed_back


def add(gradient: tf.Tensor, residual: tf.Tensor | None, decay: float) -> tf.Tensor:
    """Gradient + decay * residual, float32 of any shape; the gradient itself where there is no residual."""
    if residual is None:
        return gradient
    return (fed_back if native.kind() == "native" else _add)(gradient, residual, decay)


def all_finite(x: tf.Tensor) -> tf.Tensor:
    """Whether no element of `x` is infinite or NaN; a bool scalar."""
    return (_all_finite if native.kind() == "native" else _compiled_all_finite)(x)


def _all_finite(x: tf.Tensor) -> tf.Tensor:
    return tf.reduce_all(tf.math.is_finite(x))


# Where native operations are in use, XLA compiles nothing before the first step.
_add, _compiled_all_finite = compiled(fed_back), compiled(_all_finite)
