"""Timestamps inside the graph."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from ..common import determinism, devices
from ..exchange.collective import Reduction


class Timestamps(NamedTuple):
    """The times of a bucket's phases, by this rank's clock; float64 scalars, seconds since the epoch."""

    ready: tf.Tensor  # its gradients are ready, and the bucket before it is encoded
    encoded: tf.Tensor
    received: tf.Tensor  # the other ranks' payloads have arrived
    decoded: tf.Tensor


def all_at(time: tf.Tensor) -> Timestamps:
    """The same time for all phases, of a bucket that is exchanged as a part of another one."""
    return Timestamps(time, time, time, time)


def stamp(tensors: Sequence[tf.Tensor], after: tf.Tensor | None = None) -> tf.Tensor:
    """The time when all of `tensors` are ready: seconds since the epoch, a float64 scalar on the host.

    It is never earlier than the timestamp `after`, which TensorFlow may have taken late. Something else must use
    `tensors`, too: TensorFlow does not compute tensors that only a timestamp waits for.
    """
    # tf.timestamp has a side effect, and TensorFlow runs operations with side effects in the order in which they were
    # traced, so that buckets would no longer overlap. A call without side effects waits for its control inputs only.
    if devices.has_gpu():
        return _stamp_on_gpu(tensors, after)
    # When TensorFlow inlines a function, a control input on one of the function's results becomes one on the whole
    # call; an identity keeps it on the result. TensorFlow inlines this call to a single operation; otherwise it would
    # take 20 us.
    with tf.device("CPU"):
        inputs = [tf.identity(tensor) for tensor in (*tensors, *([] if after is None else [after]))]
        function = _timestamp.get_concrete_function(determinism.is_enabled())
        with tf.control_dependencies(inputs):
            (now,) = tf.raw_ops.PartitionedCall(args=[], Tout=[tf.float64], f=function)
    return now


def waited_for(timestamps: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The timestamps that operations of the step may wait for.

    On a CPU, all: otherwise TensorFlow may read the clock when it has already begun with what follows. On a GPU, none:
    the kernels of a bucket would be started only when the host knows that its gradients are ready, behind those of the
    rest of the backward pass.
    """
    return [] if devices.has_gpu() else list(timestamps)


def timestamps_of(reduction: Reduction, ready: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """The times when a bucket was encoded, received and decoded.

    Encoding between two exchanges counts as if it had happened before the first one.
    """
    last = encoded = stamp([reduction.outgoing], ready)
    if reduction.second_exchange is not None:
        first_received = stamp([reduction.second_exchange[0]], encoded)
        last = stamp([reduction.second_exchange[1]], first_received)
        with tf.device("CPU"):
            encoded += last - first_received
    received = stamp([reduction.incoming], last)
    return encoded, received, stamp(reduction.chunks, received)


def _stamp_on_gpu(tensors: Sequence[tf.Tensor], after: tf.Tensor | None) -> tf.Tensor:
    """On a GPU, kernels are only enqueued: a tensor is ready once the host can read an element of it."""
    elements = [tf.strided_slice(tf.reshape(tensor, [-1]), [0], [1], [1]) for tensor in tensors]
    with tf.device("CPU"):
        elements += [] if after is None else [tf.reshape(after, [1])]
        inputs = tf.concat([tf.cast(element, tf.float32) for element in elements], 0)
        function = _timestamp_after.get_concrete_function(tf.TensorSpec([None], tf.float32), determinism.is_enabled())
        (now,) = tf.raw_ops.PartitionedCall(args=[inputs], Tout=[tf.float64], f=function)
        return now


@tf.function(autograph=False)
def _timestamp(deterministic: bool) -> tf.Tensor:
    return _now(deterministic)


# Inlined, it would wait for nothing.
@tf.function(autograph=False, experimental_attributes={"_noinline": True})
def _timestamp_after(inputs: tf.Tensor, deterministic: bool) -> tf.Tensor:
    del inputs  # the call waits for them
    return _now(deterministic)


def _now(deterministic: bool) -> tf.Tensor:
    # tf.timestamp raises an error if operations must be deterministic. The results of training do not depend on it.
    return tf.ensure_shape(tf.numpy_function(time.time, [], tf.float64), []) if deterministic else tf.timestamp()


def stacked(timestamps: Sequence[Timestamps]) -> tf.Tensor:
    """The timestamps of B buckets, float64 [4, B]: a row for each field of `Timestamps`."""
    return tf.reshape(tf.stack([time for field in zip(*timestamps) for time in field]), [4, -1])
