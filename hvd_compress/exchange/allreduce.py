"""Allreduce, for payloads that may be summed as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..formats.base import Shape
from . import volume
from .collective import Collective, Phases, Reduction

if TYPE_CHECKING:
    from ..compressors import Compressor
    from .coding import EncodedShard
    from .group import Group
    from .local_input import LocalInput


class Allreduce(Collective):
    """One allreduce of all payloads (ring: Thakur, Rabenseifner and Gropp 2005).

    1. Each rank encodes its chunks, each to one float32 part, and joins them; the last element counts ranks whose
       gradients are not finite.
    2. Allreduce.
    3. Each rank decodes the sum.
    """

    name = "allreduce"

    def fits(self, compressor: Any, shapes: Sequence[Shape], ranks: int) -> bool:
        """Whether payloads are summed as they are."""
        return volume.are_summed(compressor, shapes)

    def bytes_sent(self, compressor: Any, shapes: Sequence[Shape], ranks: int) -> int:
        """The bytes of a ring, the flag included."""
        return volume.ring_bytes(volume.payload_bytes(compressor, shapes) + 4, ranks)

    def phases(self, nbytes: float, payload: float, ranks: int) -> Phases:
        """One allreduce; the sum is decoded once."""
        return Phases([nbytes], [("allreduce", payload)], [(nbytes, 1)])

    def encode(self, compressor: Compressor, local_input: LocalInput, group: Group) -> EncodedShard:
        """Step 1."""
        import tensorflow as tf

        from . import coding, flags

        encoded = [local_input.encode(compressor, i) for i in range(local_input.num_chunks)]
        finite = flags.all_of([e.finite for e in encoded])
        values = [tf.reshape(e.parts[0], [-1]) for e in encoded]
        payload = tf.concat([*values, tf.cast(~finite, tf.float32)[None]], 0)
        contexts, residuals = [e.ctx for e in encoded], [e.residual for e in encoded]
        return coding.EncodedShard(payload, contexts, residuals, payload, lambda: finite)

    def exchange(
        self, compressor: Compressor, encoded: EncodedShard, local_input: LocalInput, scale: float, group: Group
    ) -> Reduction:
        """Steps 2 and 3."""
        import tensorflow as tf

        from . import flags, transfers

        # 2. Allreduce.
        total = transfers.allreduce(encoded.payload, group, "")

        # 3. Decode.
        ok = total[-1] == 0.0
        factor = flags.scale_or_nan(scale, ok)
        chunks, start = [], 0
        for shape, ctx in zip(local_input.shapes, encoded.contexts):
            (part,) = compressor.layout(shape)
            end = start + part.shape.num_elements()
            chunks.append(compressor.decode_sum([[tf.reshape(total[start:end], part.shape)]], ctx, factor))
            start = end
        return Reduction(chunks, encoded.residuals, ok, encoded.outgoing, total)
