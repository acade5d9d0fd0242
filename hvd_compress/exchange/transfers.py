"""Horovod's collectives, as the exchange calls them. A single rank gets what it sends, without Horovod."""

from __future__ import annotations

from collections.abc import Sequence

import horovod.tensorflow as hvd
import tensorflow as tf

from ..kernels import native
from ..kernels.compile import compiled
from .group import Group
from .send_order import send_first


def allreduce(tensor: tf.Tensor, group: Group, phase: str) -> tf.Tensor:
    """The sum of the tensors of all ranks."""
    if group.size == 1:
        return tensor
    return hvd.allreduce(send_first(tensor), op=hvd.Sum, **group.keywords(phase))


def allgather(payload: tf.Tensor, group: Group, phase: str = "_gather") -> list[tf.Tensor]:
    """The payloads, uint8 [nbytes] on each rank, of all ranks in their order.

    Between two ranks it is an allreduce, see `summed`: the other rank's payload is the sum minus the own payload.
    """
    if group.size == 1:
        return [payload]
    if group.size == 2:
        subtract = native.subtract if native.kind() == "native" else _difference
        theirs = subtract(summed(payload, group, phase), payload)
        return [payload, theirs] if group.rank == 0 else [theirs, payload]
    return split(allgather_joined(payload, group, phase), group.size, payload.shape[0])


def summed(payload: tf.Tensor, group: Group, phase: str = "_gather") -> tf.Tensor:
    """The sum of the payloads of two ranks, byte by byte modulo 256, in place of an allgather.

    An allreduce sends as many bytes as an allgather, but in small, pipelined chunks: 26 MB at 1 Gbit/s take 241 ms
    instead of 463, because Gloo's allgather mostly fills one direction of the link after the other.
    """
    return allreduce(payload, group, phase)


def allgather_joined(payload: tf.Tensor, group: Group, phase: str = "_gather") -> tf.Tensor:
    """The payloads of all ranks end to end, uint8 [ranks * nbytes], in one block of memory."""
    if group.size == 2:
        return tf.reshape(_in_order(summed(payload, group, phase), payload, group.rank), [-1])
    gathered = hvd.allgather(send_first(payload), **group.keywords(phase))
    return tf.ensure_shape(gathered, [group.size * payload.shape[0]])


@compiled  # TensorFlow's own subtraction of bytes is not vectorized: 12 ms for 26 MB instead of 1
def _difference(total: tf.Tensor, own: tf.Tensor) -> tf.Tensor:
    return total - own


@compiled  # without a concatenation, which would be another pass over memory
def _in_order(total: tf.Tensor, own: tf.Tensor, rank: int) -> tf.Tensor:
    is_own = tf.range(2)[:, None] == rank
    return tf.where(is_own, own, total - own)


def alltoall(parts: tf.Tensor, group: Group, phase: str) -> list[tf.Tensor]:
    """Sends one part to each other rank, and returns the parts that they send, [length] each in the order of the ranks.

    `parts` are those for the other ranks in their order, end to end: any dtype, [(ranks - 1) * length].
    """
    length = parts.shape[0] // (group.size - 1)
    with tf.device("CPU"):  # where Horovod reads them
        splits = tf.constant([0 if rank == group.rank else length for rank in range(group.size)], tf.int32)
    received, _ = hvd.alltoall(send_first(parts), splits=splits, **group.keywords(phase))
    return split(received, group.size - 1, length)


def concat(parts: Sequence[tf.Tensor]) -> tf.Tensor:
    """Vectors end to end; a single one is not copied."""
    return parts[0] if len(parts) == 1 else tf.concat(list(parts), 0)


def split(tensor: tf.Tensor, count: int, length: int) -> list[tf.Tensor]:
    """So many parts, [length] each, of a tensor, [count * length]."""
    tensor = tf.ensure_shape(tensor, [count * length])
    return [tf.strided_slice(tensor, [i * length], [(i + 1) * length], [1]) for i in range(count)]
