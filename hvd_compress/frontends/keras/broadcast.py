"""One rank's values for all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from . import optimizer_state


def unique(variables: Sequence[Any]) -> list[tf.Variable]:
    """The tf.Variables in these variables of TensorFlow or Keras, each once, in their order."""
    found = {optimizer_state.tf_variable(v).ref(): optimizer_state.tf_variable(v) for v in variables}
    return list(found.values())


def broadcast(variables: Sequence[tf.Variable], root_rank: int, name: str) -> None:
    """Gives every rank the root's values; all ranks have variables of the same shapes and dtypes, in this order."""

    @tf.function(autograph=False)
    def all_at_once() -> None:
        # Numbered names: a layer may be `dense` here and `dense_1` on a rank that built a model before.
        for number, variable in enumerate(variables):
            value = tf.convert_to_tensor(variable)
            opaque = value.dtype == tf.bfloat16  # which Horovod reduces, but does not broadcast
            value = tf.bitcast(value, tf.uint16) if opaque else value
            value = hvd.broadcast(value, root_rank, name=f"{name}.{number}")
            variable.assign(tf.bitcast(value, tf.bfloat16) if opaque else value)

    all_at_once()
