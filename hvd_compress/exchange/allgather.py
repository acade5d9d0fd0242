"""Allgather: every rank gets the payload of every rank, and sums what they decode to."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..formats.base import Shape
from . import volume
from .collective import Collective, Phases, Reduction

if TYPE_CHECKING:
    import tensorflow as tf

    from ..compressors import Compressor
    from .coding import EncodedShard
    from .group import Group
    from .local_input import LocalInput


class GatheringCollective(Collective):
    """A collective that ends with an allgather, for payloads that must not be summed as they are.

    All ranks decode the same payloads in the same order, so their results are the same to the bit. A subclass defines
    `encode` and, if another exchange comes before the allgather, `reduce_shard`. `Hierarchical` puts steps of its own
    in between.
    """

    def fits(self, compressor: Any, shapes: Sequence[Shape], ranks: int) -> bool:
        """Whether payloads must not be summed."""
        return not (compressor.model_wide or volume.are_summed(compressor, shapes))

    @abc.abstractmethod
    def encode(self, compressor: Compressor, local_input: LocalInput, group: Group) -> EncodedShard:
        """Encodes what this rank sends first, without the other ranks."""

    def reduce_shard(
        self, compressor: Compressor, encoded: EncodedShard, local_input: LocalInput, group: Group
    ) -> EncodedShard:
        """What this rank contributes to the allgather, from what `encode` returned; may exchange payloads for it."""
        return encoded

    def encode_shard(self, compressor: Compressor, local_input: LocalInput, group: Group) -> EncodedShard:
        """Both of the above."""
        return self.reduce_shard(compressor, self.encode(compressor, local_input, group), local_input, group)

    def decode(
        self,
        compressor: Compressor,
        shapes: Sequence[Shape],
        payloads: Sequence[tf.Tensor],
        contexts: Sequence[Any],
        factor: tf.Tensor,
        joined: bool,
        workers: int = 1,
        summed: bool = False,
    ) -> list[tf.Tensor]:
        """Decodes the payloads of all ranks to the summed chunks, times `factor`.

        With several `workers`, the chunks are those of one worker after the other, and so are the payloads. For
        `joined` see `LocalInput`, for `summed` see `coding.decode`.
        """
        from . import coding

        # If the bucket is split, each payload holds the summed chunks of its owner.
        shares = len(payloads) if self.splits_bucket else workers
        return coding.decode(compressor, shapes, payloads, contexts, factor, shares, joined, summed)

    def exchange(
        self, compressor: Compressor, encoded: EncodedShard, local_input: LocalInput, scale: float, group: Group
    ) -> Reduction:
        """Sums the chunks over the ranks, times `scale`."""
        from ..kernels import native
        from . import flags, transfers

        shard = self.reduce_shard(compressor, encoded, local_input, group)
        summed = group.size == 2 and native.in_use(compressor.native_format) is not None
        if summed:  # native operations subtract the own payload while they decode
            incoming = transfers.summed(shard.payload, group)
            payloads = [shard.payload, incoming]
        else:
            payloads = transfers.allgather(shard.payload, group)
            incoming = payloads[group.rank - 1]
        # Of a sum, the flag is that of the other rank if the own one is up.
        ok = flags.all_of([flags.flag_of(payload) for payload in payloads])
        factor, joined = flags.scale_or_nan(scale, ok), local_input.joined
        chunks = self.decode(compressor, local_input.shapes, payloads, shard.contexts, factor, joined, summed=summed)
        return Reduction(chunks, shard.residuals, ok, shard.outgoing, incoming)


class Allgather(GatheringCollective):
    """One allgather of all payloads.

    1. Each rank encodes its chunks and joins them into one payload.
    2. Allgather (ring: Thakur, Rabenseifner and Gropp 2005; between two ranks an allreduce, see `transfers`).
    3. Each rank decodes all payloads and sums them.
    """

    name = "allgather"

    def bytes_sent(self, compressor: Any, shapes: Sequence[Shape], ranks: int) -> int:
        """The bytes of a ring: n - 1 payloads."""
        return (ranks - 1) * volume.flagged_bytes(volume.payload_bytes(compressor, shapes))

    def phases(self, nbytes: float, payload: float, ranks: int) -> Phases:
        """One allgather; the payloads of all ranks are decoded."""
        return Phases([nbytes], [("allgather", payload)], [(nbytes, ranks)])

    def encode(self, compressor: Compressor, local_input: LocalInput, group: Group) -> EncodedShard:
        """Step 1."""
        from . import coding

        return coding.encode(compressor, local_input)
