"""`on_nonfinite`: what happens if a gradient of any rank is infinite or NaN.

Reduced gradients are equal on all ranks. They are not finite if any rank's gradient was not; for compressed gradients,
see `exchange/flags.py`. So all ranks come to the same result without another exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ..common.gradients import values_of, with_values

POLICIES = ("propagate", "skip", "raise")


def all_finite(gradients: Sequence[Any]) -> tf.Tensor:
    """Whether all elements of these tensors, IndexedSlices or Nones are finite; a bool scalar."""
    values = [values_of(g) for g in gradients if g is not None]
    flags = [tf.reduce_all(tf.math.is_finite(v)) for v in values if v.dtype.is_floating]
    return tf.reduce_all(tf.stack(flags)) if flags else tf.constant(True)


def zeros_unless(finite: tf.Tensor, gradients: Sequence[Any]) -> list[Any]:
    """Returns the gradients if `finite`, else zeros of the same shapes and dtypes."""
    return [with_values(g, lambda v: tf.where(finite, v, tf.zeros_like(v))) for g in gradients]


def raise_unless(finite: tf.Tensor, gradients: Sequence[Any], step: Any) -> list[Any]:
    """Returns the gradients if `finite`, else raises an error that names the step (None if it is not known).

    Raises:
        tf.errors.InvalidArgumentError: `finite` is False. In a graph, it is raised when the graph runs.
    """
    which = "this step" if step is None else tf.strings.format("step {}", tf.convert_to_tensor(step))
    text = tf.strings.join(
        ["gradients of ", which, " are not finite on at least one rank: lower the learning rate or look at the "
         "data, or pass on_nonfinite='skip' to leave such steps out"]
    )  # fmt: skip
    if tf.executing_eagerly():
        if not finite:
            raise tf.errors.InvalidArgumentError(None, None, text.numpy().decode())
        return list(gradients)
    with tf.control_dependencies([tf.raw_ops.Assert(condition=finite, data=[text], summarize=1)]):
        return [with_values(g, tf.identity) for g in gradients]
