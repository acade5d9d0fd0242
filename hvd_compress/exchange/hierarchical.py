"""Hosts with several workers: sums inside of each host first, so that what crosses between hosts is less.

As the hierarchical allreduce of NCCL and Horovod (Jia et al. 2018, section 3.3), with compression between hosts only
(as ZeRO++, Wang et al. 2023, section 3.3). Each worker carries its share of the bucket's chunks between the hosts, all
of a host's at once.

1. The workers of a host send each other their shares of gradient + residual, uncompressed, and sum them.
2. Each worker and those of its place on the other hosts exchange these sums, compressed, in another pattern
   (allgather between two hosts).
3. The workers of a host hand each other the payloads of step 2, which are smaller than what they decode to.

Only the share's owner keeps a residual for it: of all its host's workers' sum. What another worker had left (of an
exchange in another pattern, in a checkpoint) goes with its gradient in step 1. So over all ranks nothing is lost.
Usually there is nothing of that kind, and `LocalInput.has_foreign_residual` says so: residuals of zero are not
added, and stay.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from ..compressors import Compressor
from ..kernels.compile import fed_back
from . import allgather, common, scatter_reduce
from . import volume as traffic
from . import within_host as inside
from .common import Group, LocalInput, Reduction, Shape
from .hosts import Hosts

_NESTED = {"allgather": allgather, "scatter_reduce": scatter_reduce}


@dataclasses.dataclass(frozen=True)
class TwoLevel:
    """The pattern between these hosts."""

    hosts: Hosts

    def bytes_sent(self, compressor: Compressor, shapes: Sequence[Shape], ranks: int) -> int:
        """What each rank sends to other hosts."""
        del ranks
        return traffic.two_level(compressor, shapes, self.hosts.count, self.hosts.workers)

    def reduce(self, compressor: Compressor, share: LocalInput, scale: float, group: Group) -> Reduction:
        """Sums the ranks' chunks, times `scale`; the chunks are of one shape, and a multiple of a host's workers."""
        local, across = group.among(self.hosts.local, "_local"), group.among(self.hosts.across, "_across")
        each = len(share.chunks) // local.size
        first, last = local.rank * each, (local.rank + 1) * each
        others = share._replace(
            chunks=[*share.chunks[:first], *share.chunks[last:]],
            residuals=[*share.residuals[:first], *share.residuals[last:]],
        )
        sent, residuals = _with_what_is_astray(others)
        own, kept = share.chunks[first:last], share.residuals[first:last]
        sums, arrived = inside.reduce_scatter(own, kept, share.decay, sent, local)
        part = share._replace(chunks=sums, residuals=[None] * each, decay=1.0)  # they are in the sums

        nested = _NESTED[traffic.choose(compressor, part.shapes, across.size)]
        found = nested.exchange(compressor, part, across)
        gathered = inside.allgather(common.allgather_joined(found.payload, across), local)
        length = found.payload.shape[0]
        payloads = [common.in_parts(payload, across.size, length) for payload in gathered]

        ok = common.all_of([common.flag_of(payload) for host in payloads for payload in host])
        factor = common.factor(scale, ok)
        reduced = [
            chunk
            for theirs in payloads
            # In which place of its share a chunk is decides how it is decoded, not whose share it is.
            for chunk in nested.decode(compressor, part.shapes, theirs, found.contexts, factor)
        ]
        residuals[first:first] = found.residuals
        incoming = payloads[local.rank][across.rank - 1]
        return Reduction(
            reduced, residuals, ok, found.outgoing, incoming, early=arrived, has_foreign_residual=False
        )


def _with_what_is_astray(others: LocalInput) -> tuple[tf.Tensor, list[tf.Tensor | None]]:
    """What is sent for other workers' shares, end to end, with their residuals; and what stays of the residuals."""
    sent, residuals = common.joined(others.chunks), list(others.residuals)
    if residuals[0] is None:
        return sent, residuals

    def added() -> tuple[tf.Tensor, list[tf.Tensor | None]]:
        zeros = tf.zeros_like(residuals[0])  # one for all: in memory, too
        return fed_back(sent, common.joined(residuals), others.decay), [zeros] * len(residuals)

    return tf.cond(others.has_foreign_residual, added, lambda: (sent, residuals))
