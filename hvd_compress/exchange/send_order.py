"""A bucket is sent before the next one is encoded, also where TensorFlow has but one thread for all operations.

A thread of TensorFlow's executor goes on with what an operation has made ready; what else that has made ready it puts
on top of a pile, to be taken up once there is nothing to go on with (`ExecutorState::ScheduleReady`, and Eigen's
pool, whose threads take up first what they put down last). Left to itself it encodes all buckets, and then sends
them, the last one first: 170 instead of 144 ms for ResNet-50 in int4 at 1 Gbit/s with one core per host.

So the next bucket waits for a call that goes onto the pile, `next_turn`, and what is sent takes some steps
that the thread goes on with meanwhile, `at_once`: then sending lies on top of that call, or is done already.
"""

from __future__ import annotations

import tensorflow as tf

# More than there are from what is sent to the call that the next bucket waits for, the time stamp between included.
_STEPS = 6


def at_once(outgoing: tf.Tensor) -> tf.Tensor:
    """The same tensor, to be sent before the next turn of one who waits for `outgoing`."""
    for _ in range(_STEPS):
        # An operation that TensorFlow neither takes for expensive, as that would be put down, nor removes.
        outgoing = tf.raw_ops.EnsureShape(input=outgoing, shape=outgoing.shape)
    return outgoing


def next_turn(tensor: tf.Tensor) -> tf.Tensor:
    """Something to wait for, a scalar: there once `tensor` is, and what waits to be sent `at_once` has been."""
    seen = tf.identity(tensor)
    if tf.config.list_logical_devices("GPU"):
        # There, operations are only enqueued: nothing waits on the host.
        with tf.control_dependencies([seen]):
            return tf.constant(0.0)
    with tf.device("CPU"), tf.control_dependencies([seen]):
        (now,) = tf.raw_ops.PartitionedCall(args=[], Tout=[tf.float32], f=_now.get_concrete_function())
    return now


# What takes little time is no longer put down after some steps; a call that is not dissolved in the graph always is.
@tf.function(input_signature=[], autograph=False, experimental_attributes={"_noinline": True})
def _now() -> tf.Tensor:
    return tf.constant(0.0)
