"""Transfers between the workers of one host, uncompressed: they only pass through the host's memory.

They use Gloo's alltoall, which comes closest to the rate of a loopback. It moves the same bytes as Gloo's own
reduce-scatter and allgather, which do so in steps, one after the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import tensorflow as tf

from ..kernels.compile import compiled, fed_back
from . import transfers
from .group import Group
from .local_input import LocalInput


def pack_shares(others: LocalInput) -> tuple[tf.Tensor, list[tf.Tensor | None]]:
    """Packs the chunks that other workers sum, with their residuals if these may be other than zero.

    Returns the chunks end to end, and the residuals that remain here.
    """
    chunks, residuals = transfers.concat([*itertools.chain(*others.pieces)]), list(others.residuals)
    if residuals[0] is None:
        return chunks, residuals

    def with_residuals() -> tuple[tf.Tensor, list[tf.Tensor | None]]:
        zeros = tf.zeros_like(residuals[0])  # a single one, to save memory
        return fed_back(chunks, transfers.concat(residuals), others.decay), [zeros] * len(residuals)

    return tf.cond(others.has_foreign_residual, with_residuals, lambda: (chunks, residuals))


def reduce_scatter(
    own: Sequence[tf.Tensor], residuals: Sequence[tf.Tensor | None], decay: float, others: tf.Tensor, group: Group
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Sums this worker's share of the chunks over the workers, and adds its residuals.

    `own` is this worker's share of its own chunks, float32 [size] each. `others` are the shares of the other workers
    end to end, in the order of the workers, of equal size. Returns the sums, and a tensor that has arrived from another
    worker.
    """
    received = transfers.alltoall(others, group, "_reduce")
    of_workers = zip(*(transfers.split(share, len(own), own[0].shape[0]) for share in received))
    sums = [_sum([chunk, *chunks], left, decay) for chunk, left, chunks in zip(own, residuals, of_workers)]
    return sums, received[-1]


@compiled
def _sum(parts: Sequence[tf.Tensor], residual: tf.Tensor | None, decay: float) -> tf.Tensor:
    total = parts[0]
    for part in parts[1:]:
        total += part
    return fed_back(total, residual, decay)


def allgather(payload: tf.Tensor, group: Group) -> list[tf.Tensor]:
    """The payloads, uint8 [nbytes] on each worker, of all workers in their order."""
    payloads = transfers.alltoall(transfers.concat([payload] * (group.size - 1)), group, "_share")
    payloads.insert(group.rank, payload)
    return payloads
