"""Taking the time inside the graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf


class Stamps(NamedTuple):
    """When what happened to a bucket, by this rank's clock; float64 scalars."""

    begun: tf.Tensor  # its gradients are there, and the bucket before it is encoded
    sent: tf.Tensor  # it is encoded
    arrived: tf.Tensor  # the others' payloads are there
    done: tf.Tensor  # the sum is decoded


def stamp(tensors: Sequence[tf.Tensor], after: tf.Tensor | None = None) -> tf.Tensor:
    """Seconds since the epoch when all of `tensors` are there, a float64 scalar on the host.

    Not before the stamp `after` was taken: TensorFlow may look at the clock later than it could. Something else must
    use `tensors`, too: what only a stamp waits for is never computed.
    """
    # tf.timestamp has a side effect, and TensorFlow runs what has one in the order in which it was traced: one bucket
    # after the other, nothing of them at once. A call that claims to have none only waits for what it is told to.
    if tf.config.list_logical_devices("GPU"):
        return _when_on_host(tensors, after)
    # Identities, since of a tensor that a function returns TensorFlow takes nothing but the call to be waited for, once
    # it has dissolved the function in the graph. This one it dissolves to a single operation; a call takes 20 us.
    with tf.device("CPU"):
        seen = [tf.identity(tensor) for tensor in (*tensors, *([] if after is None else [after]))]
        with tf.control_dependencies(seen):
            (now,) = tf.raw_ops.PartitionedCall(
                args=[], Tout=[tf.float64], f=_timestamp.get_concrete_function()
            )
    return now


def _when_on_host(tensors: Sequence[tf.Tensor], after: tf.Tensor | None) -> tf.Tensor:
    """On a GPU a tensor is there once an element of it can be read on the host: kernels are only enqueued before."""
    firsts = [tf.strided_slice(tf.reshape(tensor, [-1]), [0], [1], [1]) for tensor in tensors]
    with tf.device("CPU"):
        firsts += [] if after is None else [tf.reshape(after, [1])]
        seen = tf.concat([tf.cast(first, tf.float32) for first in firsts], 0)
        (now,) = tf.raw_ops.PartitionedCall(
            args=[seen], Tout=[tf.float64], f=_timestamp_after.get_concrete_function()
        )
        return now


@tf.function(input_signature=[], autograph=False)
def _timestamp() -> tf.Tensor:
    return tf.timestamp()


# Were it dissolved in the graph around it, it would wait for nothing.
@tf.function(
    input_signature=[tf.TensorSpec([None], tf.float32)],
    autograph=False,
    experimental_attributes={"_noinline": True},
)
def _timestamp_after(seen: tf.Tensor) -> tf.Tensor:
    del seen  # waited for by the call
    return tf.timestamp()


def since_first(stamps: Sequence[Stamps]) -> list[tf.Tensor]:
    """The stamps of some buckets, field by field, float32 [B] each: seconds since the first one's `begun`."""
    times = tf.stack([tf.stack(list(stamp)) for stamp in stamps], 1)
    return tf.unstack(tf.cast(times - times[0, 0], tf.float32))
