"""Between the workers of one host, over whose memory bytes pass: nothing is compressed for it.

By Gloo's alltoall, which reaches the largest part of a loopback's rate. It moves what a reduce-scatter and an allgather
must move, where Gloo's own do so in steps, one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from . import common
from .common import Group


def reduce_scatter(pieces: Sequence[tf.Tensor], group: Group) -> tuple[list[tf.Tensor], tf.Tensor]:
    """The sums of the workers' pieces of this worker's share.

    Args:
        pieces: float32 [size] each, as many for each worker: the first ones are the first worker's share.
        group: The workers of a host.

    Returns:
        The sums, and what has arrived for them from another worker.
    """
    each, size = len(pieces) // group.size, pieces[0].shape[0]
    first = group.rank * each
    others = [*pieces[:first], *pieces[first + each :]]
    received = common.scatter(others[0] if len(others) == 1 else tf.concat(others, 0), group, "_reduce")
    sums = []
    for j, own in enumerate(pieces[first : first + each]):
        begin, end = j * size, (j + 1) * size
        theirs = [tf.strided_slice(part, [begin], [end], [1]) for part in received]
        sums.append(tf.add_n([own, *theirs]))
    return sums, received[-1]


def allgather(payload: tf.Tensor, group: Group) -> list[tf.Tensor]:
    """The payloads, uint8 [nbytes] on each worker, of all workers in their order."""
    found = common.alltoall([payload] * (group.size - 1), group, "_share")
    found.insert(group.rank, payload)
    return found
