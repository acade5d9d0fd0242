"""Between the workers of one host, over whose memory bytes pass: nothing is compressed for it.

By Gloo's alltoall, which reaches the largest part of a loopback's rate. It moves what a reduce-scatter and an allgather
must move, where Gloo's own do so in steps, one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from ..kernels.compile import compiled, fed_back
from . import common
from .common import Group


def reduce_scatter(
    own: Sequence[tf.Tensor],
    residuals: Sequence[tf.Tensor | None],
    decay: float,
    others: tf.Tensor,
    group: Group,
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """The sums of the workers' chunks of this worker's share, with its residuals.

    Args:
        own: float32 [size] each, this worker's.
        residuals: In the same shapes, or None.
        decay: Of the residuals.
        others: The chunks of the other workers' shares end to end, in the order of the workers; as many for each.
        group: The workers of a host.

    Returns:
        The sums, and what has arrived for them from another worker.
    """
    received = common.scatter(others, group, "_reduce")
    theirs = zip(*(common.in_parts(part, len(own), own[0].shape[0]) for part in received))
    sums = [_sum([chunk, *parts], left, decay) for chunk, left, parts in zip(own, residuals, theirs)]
    return sums, received[-1]


@compiled
def _sum(parts: Sequence[tf.Tensor], residual: tf.Tensor | None, decay: float) -> tf.Tensor:
    total = parts[0]
    for part in parts[1:]:
        total += part
    return fed_back(total, residual, decay)


def allgather(payload: tf.Tensor, group: Group) -> list[tf.Tensor]:
    """The payloads, uint8 [nbytes] on each worker, of all workers in their order."""
    found = common.alltoall([payload] * (group.size - 1), group, "_share")
    found.insert(group.rank, payload)
    return found
