"""Hierarchical exchange: sums within each host first, so that less is sent between hosts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..formats.base import Shape
from . import volume
from .allgather import GatheringCollective
from .collective import Collective, Phases, Reduction

if TYPE_CHECKING:
    from ..compressors import Compressor
    from .group import Group
    from .hosts import Hosts
    from .local_input import LocalInput


@dataclasses.dataclass(frozen=True)
class HostCounts:
    """The number of hosts, and of workers on each: enough for bytes and phases, where `reduce` needs `Hosts`."""

    count: int
    workers: int


@dataclasses.dataclass(frozen=True)
class Hierarchical(Collective):
    """Sums within hosts, and another collective between hosts.

    As the hierarchical allreduce of NCCL and Horovod (Jia et al. 2018, section 3.3), with compression between hosts
    only (as ZeRO++, Wang et al. 2023, section 3.3). Each worker owns a share of the chunks; all workers of a host send
    their shares to other hosts at once.

    1. The workers of a host send each other their shares of gradient + residual, uncompressed, and sum them.
    2. Each worker and the workers in its place on the other hosts exchange these sums, compressed.
    3. The workers of a host send each other the payloads of step 2, which are smaller than the chunks they decode to.
    4. Each worker decodes all payloads.

    Only the owner of a share keeps its residual: that of the sum of its host. Other workers may have residuals of these
    chunks, from an exchange with another collective or from a checkpoint. They are sent with the gradients in step 1,
    so nothing is lost over all ranks. `LocalInput.has_foreign_residual` says whether there may be any; residuals of
    zero are not added.
    """

    hosts: Hosts | HostCounts
    between: GatheringCollective  # between the hosts

    name = "two_level"
    hierarchical = True

    def fits(self, compressor: Any, shapes: Sequence[Shape], ranks: int) -> bool:
        """Whether the workers of a host can share the chunks evenly.

        Payloads that are summed in an allreduce gain nothing: a ring leaves each host only once in any case.
        """
        if compressor.per_tensor or len(shapes) % self.hosts.workers or not volume.are_alike(shapes):
            return False
        return self.between.fits(compressor, self._share(shapes), self.hosts.count)

    def bytes_sent(self, compressor: Any, shapes: Sequence[Shape], ranks: int) -> int:
        """Bytes that each rank sends to other hosts."""
        return self.between.bytes_sent(compressor, self._share(shapes), self.hosts.count)

    def leaving_host(self, compressor: Any, shapes: Sequence[Shape], hosts: int, workers: int) -> int:
        """All workers of a host send to other hosts."""
        return workers * self.bytes_sent(compressor, shapes, hosts * workers)

    def _share(self, shapes: Sequence[Shape]) -> Sequence[Shape]:
        """The chunks that one worker sends between hosts."""
        return shapes[: len(shapes) // self.hosts.workers]

    def phases(self, nbytes: float, payload: float, ranks: int) -> Phases:
        """The phases between hosts for one share; the other shares are received and decoded, too."""
        count, workers = self.hosts.count, self.hosts.workers
        share, share_payload = nbytes / workers, payload / workers
        phases = self.between.phases(share, share_payload, count)
        payloads = 1 if self.between.splits_bucket else count  # of the sum over hosts, or of each host
        return phases._replace(
            decoded=[*phases.decoded, (nbytes - share, payloads)],
            inside=[("reduce_scatter", nbytes), ("allgather", payloads * share_payload)],
        )

    def reduce(self, compressor: Compressor, local_input: LocalInput, scale: float, group: Group) -> Reduction:
        """Sums the chunks over the ranks, times `scale`."""
        from . import flags, transfers, within_host

        assert not isinstance(self.hosts, HostCounts), "counts are for predictions only"
        local = group.among(self.hosts.local, "_local")
        across = group.among(self.hosts.across, "_across")
        per_worker = local_input.num_chunks // local.size
        first, last = local.rank * per_worker, (local.rank + 1) * per_worker

        # 1. Sum this worker's share within the host.
        others = local_input._replace(
            pieces=[*local_input.pieces[:first], *local_input.pieces[last:]],
            residuals=[*local_input.residuals[:first], *local_input.residuals[last:]],
        )
        outgoing, residuals = within_host.pack_shares(others)
        own = local_input.part(first, last)
        sums, received = within_host.reduce_scatter(own.chunks, own.residuals, local_input.decay, outgoing, local)

        # 2. Exchange the sums, which contain the residuals, between hosts.
        share = local_input.with_chunks(sums, [None] * per_worker)._replace(decay=1.0)
        shard = self.between.encode_shard(compressor, share, across)
        gathered = transfers.allgather_joined(shard.payload, across)

        # 3. Send the payloads to the other workers of the host.
        length = shard.payload.shape[0]
        payloads_of_shares = [transfers.split(p, across.size, length) for p in within_host.allgather(gathered, local)]

        # 4. Decode. The contexts are those of this worker's share: they depend on the place in a share only.
        payloads = [payload for of_share in payloads_of_shares for payload in of_share]
        ok = flags.all_of([flags.flag_of(payload) for payload in payloads])
        factor = flags.scale_or_nan(scale, ok)
        shapes, contexts = share.shapes * local.size, [*shard.contexts] * local.size
        chunks = self.between.decode(compressor, shapes, payloads, contexts, factor, local_input.joined, local.size)
        residuals[first:first] = shard.residuals
        incoming = payloads_of_shares[local.rank][across.rank - 1]
        return Reduction(
            chunks, residuals, ok, shard.outgoing, incoming, next_can_start=received, has_foreign_residual=False
        )
