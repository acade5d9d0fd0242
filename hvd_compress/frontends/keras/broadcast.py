"""Copies variables from one rank to all others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from . import optimizer_state


def unique(variables: Sequence[Any]) -> list[tf.Variable]:
    """The `tf.Variable`s in these variables of TensorFlow or Keras, without duplicates, in their order."""
    by_reference = {v.ref(): v for v in map(optimizer_state.tf_variable, variables)}
    return list(by_reference.values())


def broadcast(variables: Sequence[tf.Variable], root_rank: int, name: str) -> None:
    """Assigns the values of rank `root_rank` to the variables of all ranks.

    Args:
        variables: On all ranks in the same order, with the same shapes and dtypes.
        root_rank: The rank whose values the others take.
        name: Prefix of the names of the collectives.
    """

    @tf.function(autograph=False)
    def broadcast_all() -> None:
        # Numbered, because names may differ: `dense` on one rank may be `dense_1` on another.
        for number, variable in enumerate(variables):
            value = tf.convert_to_tensor(variable)
            as_uint16 = value.dtype == tf.bfloat16  # Horovod reduces bfloat16, but does not broadcast it
            value = tf.bitcast(value, tf.uint16) if as_uint16 else value
            value = hvd.broadcast(value, root_rank, name=f"{name}.{number}")
            variable.assign(tf.bitcast(value, tf.bfloat16) if as_uint16 else value)

    broadcast_all()
