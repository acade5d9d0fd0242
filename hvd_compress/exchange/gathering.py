"""Collectives that end with an allgather of one payload per rank, and decoding."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..formats.base import Shape
from . import volume
from .collective import Collective, Reduction

if TYPE_CHECKING:
    import tensorflow as tf

    from ..compressors import Compressor
    from .group import Group
    from .local_input import LocalInput


class EncodedShard(NamedTuple):
    """What one rank contributes to the last allgather."""

    payload: tf.Tensor  # uint8, with its flag
    contexts: list[Any]  # of each chunk, for decoding
    residuals: list[tf.Tensor | None]  # the new ones, one for each chunk
    outgoing: tf.Tensor  # see `Reduction.outgoing`


class GatheringCollective(Collective):
    """A collective for payloads that must not be summed as they are.

    All ranks decode the same payloads in the same order, so their results are the same to the bit. A subclass defines
    what comes before the allgather, `encode_shard`, and what comes after it, `decode`. `Hierarchical` puts steps of
    its own in between.
    """

    def fits(self, compressor: Any, shapes: Sequence[Shape], ranks: int) -> bool:
        """Whether payloads must not be summed."""
        return not (compressor.model_wide or volume.are_summed(compressor, shapes))

    @abc.abstractmethod
    def encode_shard(self, compressor: Compressor, local_input: LocalInput, group: Group) -> EncodedShard:
        """Encodes what this rank contributes to the allgather; may exchange payloads for it."""

    @abc.abstractmethod
    def decode(
        self,
        compressor: Compressor,
        shapes: Sequence[Shape],
        payloads: Sequence[tf.Tensor],
        contexts: Sequence[Any],
        factor: tf.Tensor,
    ) -> list[tf.Tensor]:
        """Decodes the payloads of all ranks to the summed chunks, times `factor`."""

    def reduce(self, compressor: Compressor, local_input: LocalInput, scale: float, group: Group) -> Reduction:
        """Sums the chunks over the ranks, times `scale`."""
        from . import flags, transfers

        shard = self.encode_shard(compressor, local_input, group)
        payloads = transfers.allgather(shard.payload, group)
        ok = flags.all_of([flags.flag_of(payload) for payload in payloads])
        factor = flags.scale_or_nan(scale, ok)
        chunks = self.decode(compressor, local_input.shapes, payloads, shard.contexts, factor)
        return Reduction(chunks, shard.residuals, ok, shard.outgoing, payloads[group.rank - 1])
