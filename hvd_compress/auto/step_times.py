"""What takes the time of a step, from the timestamps of its B buckets. Seconds, float32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from ..common import tracing
from ..engine import clock
from .policy import running_max

# The times of the first steps are ignored: kernels are compiled, connections are made.
UNTIMED = 2


class StepTimes(NamedTuple):
    """The exchange of one step on this rank."""

    waits: tf.Tensor  # [B], for each bucket's gradients, after the bucket before was encoded
    coding: tf.Tensor  # [B], encoding and decoding
    wire: tf.Tensor  # [B]
    span: tf.Tensor  # from the first bucket's gradients to the last bucket's result


def of_buckets(buckets: Sequence[clock.Timestamps]) -> StepTimes:
    """The times of a step, from its buckets in the order in which they cross."""
    ready, encoded, received, decoded = clock.since_first(buckets)
    before = tf.concat([ready[:1], encoded[:-1]], 0)  # when the bucket before was encoded
    # Horovod may fuse buckets, which then arrive together.
    free = tf.concat([encoded[:1], running_max(received)[:-1]], 0)  # when the wire is free
    return StepTimes(
        tf.nn.relu(ready - before),
        tf.nn.relu(encoded - ready) + tf.nn.relu(decoded - received),
        tf.nn.relu(received - tf.maximum(encoded, free)),
        tf.reduce_max(decoded),
    )


class RestClock:
    """Measures what a step takes besides its exchange.

    Args:
        name: The name of its variable.
    """

    def __init__(self, name: str) -> None:
        with tf.device("CPU"):
            # When the first bucket of the step before was ready, and the span of that step.
            self._before = tracing.variable(tf.zeros([2], tf.float64), name)

    def measure(self, buckets: Sequence[clock.Timestamps], span: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Called once in each step, with its timestamps and its span.

        Returns:
            The seconds of the step before besides its exchange, 0 in the first call; whether this is the first call.
        """
        first, before = buckets[0].ready, self._before.read_value()
        rest, is_first = tf.cast(first - before[0] - before[1], tf.float32), before[0] == 0.0
        with tf.control_dependencies([rest]):
            self._before.assign(tf.stack([first, tf.cast(span, tf.float64)]))
        return tf.where(is_first, 0.0, tf.nn.relu(rest)), is_first
