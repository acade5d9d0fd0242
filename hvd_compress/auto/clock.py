"""Taking the time inside the graph."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from .. import tracing


def stamp(tensors: Sequence[tf.Tensor], after: tf.Tensor | None = None) -> tf.Tensor:
    """Seconds since the epoch when all of `tensors` are there, a float64 scalar on the host.

    Not before the stamp `after` was taken: TensorFlow may look at the clock later than it could.
    """
    # On a GPU a tensor is there once an element of it can be read on the host: kernels are only enqueued before.
    firsts = [tf.strided_slice(tf.reshape(tensor, [-1]), [0], [1], [1]) for tensor in tensors]
    with tf.device("CPU"):
        seen = [tf.identity(first) for first in firsts]
        seen += [] if after is None else [after]
        with tf.control_dependencies(seen):
            now, _ = _now()
            return now(tf.constant(0.0, tf.float64))


@functools.cache
def _now() -> tuple[Any, tf.Variable]:
    """A function that returns the time plus its argument (0) and may run at any point of a step; and its variable.

    TensorFlow lets operations with side effects (reading a clock is one) wait for each other in the order in which they
    were traced, and with them the exchanges of all buckets. But not those that only read a variable.
    """
    with tf.init_scope(), tf.device("CPU"):
        zero = tracing.variable(tf.constant(0.0, tf.float64), "hvdc_clock")

        def now(begin: tf.Tensor) -> tf.Tensor:
            with tf.control_dependencies([begin]):
                return tf.timestamp() + zero.read_value() + begin

        function = tf.function(now, autograph=False)
        return function.get_concrete_function(tf.TensorSpec([], tf.float64)), zero


def between(start: tf.Tensor, end: tf.Tensor) -> tf.Tensor:
    """Seconds from `start` to `end`, not below zero; float32."""
    return tf.maximum(tf.cast(end - start, tf.float32), 0.0)
