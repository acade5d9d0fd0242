"""Scatter-reduce: each rank reduces its share of the bucket, and sends the result to all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..formats.base import Shape
from . import volume
from .allgather import GatheringCollective
from .collective import Phases

if TYPE_CHECKING:
    import tensorflow as tf

    from ..compressors import Compressor
    from .coding import EncodedShard
    from .group import Group
    from .local_input import LocalInput


class ScatterReduce(GatheringCollective):
    """An alltoall, and an allgather of what each owner has summed.

    The bytes that a rank sends do not grow with the number of ranks: 2 (n - 1) / n payloads, where an allgather takes
    n - 1. Rabenseifner's allreduce does the same with sums, and ZeRO++ (Wang et al. 2023, section 3.3) with quantized
    codes. Sparse payloads are routed to the owner of their range, who sums and selects again, as in Ok-Topk (Li and
    Hoefler 2022).

    1. Each rank encodes all chunks but its own, and sends each to its owner (alltoall).
    2. The owner decodes them, adds its own gradients, which are not compressed for this, and encodes the sum.
    3. Allgather of these sums.
    4. Each rank decodes them.

    The second encoding loses something, too. The owner keeps this loss in its residual of these chunks. Its own
    gradients have no other loss, so one residual serves for both, and nothing is lost over all ranks.
    """

    name = "scatter_reduce"
    splits_bucket = True

    def fits(self, compressor: Any, shapes: Sequence[Shape], ranks: int) -> bool:
        """Whether more than two ranks can share the chunks evenly."""
        if ranks <= 2 or len(shapes) % ranks or not volume.are_alike(shapes):
            return False
        return super().fits(compressor, shapes, ranks)

    def bytes_sent(self, compressor: Any, shapes: Sequence[Shape], ranks: int) -> int:
        """Twice n - 1 payloads of 1 / n of the bucket."""
        return 2 * (ranks - 1) * self._share_bytes(compressor, shapes, ranks)

    def leaving_host(self, compressor: Any, shapes: Sequence[Shape], hosts: int, workers: int) -> int:
        """Each worker sends to all ranks of other hosts, and then one of them in a ring."""
        ranks = hosts * workers
        return (workers * (ranks - workers) + ranks - 1) * self._share_bytes(compressor, shapes, ranks)

    def _share_bytes(self, compressor: Any, shapes: Sequence[Shape], ranks: int) -> int:
        """The payload of one rank's share of the chunks."""
        per_chunk = volume.payload_bytes(compressor, shapes[:1])
        return volume.flagged_bytes(len(shapes) // ranks * per_chunk)

    def phases(self, nbytes: float, payload: float, ranks: int) -> Phases:
        """The chunks of the others and then the own sums are encoded; those of the others are decoded for the sums."""
        return Phases(
            encoded=[nbytes * (ranks - 1) / ranks, nbytes / ranks],
            transfers=[("alltoall", payload), ("allgather", payload / ranks)],
            decoded=[(nbytes / ranks, ranks - 1), (nbytes, 1)],
        )

    def encode(self, compressor: Compressor, local_input: LocalInput, group: Group) -> EncodedShard:
        """The first half of step 1. The own residuals are part of `sums`; new ones follow in step 2."""
        from ..compressors import error_feedback
        from . import coding, flags, transfers

        per_owner = local_input.num_chunks // group.size
        shares = [local_input.part(first, first + per_owner) for first in range(0, local_input.num_chunks, per_owner)]
        own = shares[group.rank]

        # 1. Encode the chunks of the others. The own chunks are encoded, too, for the contexts; as nothing reads the
        # payload, TensorFlow prunes it.
        encoded = [coding.encode(compressor, share) for share in shares]
        others = [share for owner, share in enumerate(encoded) if owner != group.rank]
        sent = transfers.concat([share.payload for share in others])
        sums = [error_feedback.add(c, r, own.decay) for c, r in zip(own.chunks, own.residuals)]

        def finite() -> tf.Tensor:
            return flags.all_of([*(share.finite() for share in others), *map(error_feedback.all_finite, sums)])

        contexts = [ctx for share in encoded for ctx in share.contexts]
        residuals = [residual for share in encoded for residual in share.residuals]
        return coding.EncodedShard(sent, contexts, residuals, sent, finite, sums)

    def reduce_shard(
        self, compressor: Compressor, encoded: EncodedShard, local_input: LocalInput, group: Group
    ) -> EncodedShard:
        """The alltoall, and step 2; the flag is down if it is for any of the payloads received."""
        import tensorflow as tf

        from . import coding, flags, transfers

        received = transfers.alltoall(encoded.payload, group, "_scatter")

        # 2. Decode, sum and encode again.
        per_owner, count = len(encoded.sums), len(local_input.shapes)
        own = slice(group.rank * per_owner, (group.rank + 1) * per_owner)
        shapes, contexts = local_input.shapes[own], encoded.contexts[own]
        others = coding.decode(compressor, shapes, received, contexts, tf.constant(1.0))
        summed = local_input.with_chunks(others, encoded.sums)._replace(
            decay=1.0,
            first_chunk=count + local_input.first_chunk + own.start,  # not the noise of the first encoding
        )
        again = coding.encode(compressor, summed, [flags.flag_of(payload) for payload in received])
        residuals = list(encoded.residuals)
        residuals[own] = again.residuals
        return encoded._replace(payload=again.payload, residuals=residuals)
