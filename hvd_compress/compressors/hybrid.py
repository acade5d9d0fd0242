"""Sparse selection with quantized values."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from .. import formats
from ..formats.base import Shape, num_kept, size_of
from ..kernels import select
from ..kernels.native import NativeFormat
from .base import ChunkInput, Compressor
from .quantize import Quantize, decode_blocks, encode_blocks
from .registry import register
from .sparse import BlockTopK


@register
@dataclasses.dataclass(frozen=True)
class Hybrid(formats.Hybrid, BlockTopK):
    """Keeps the largest element of each strided block, as `block_topk` does, in `bits` bits, as `quantize` does.

    Wire size, with k = max(1, ceil(ratio * n)), B = ceil(n / k) and b = min(256, k rounded up to 8):
    i * k bytes of indices (i = 1 for B <= 256, 2 for B <= 65536, else 4) plus ceil(k / b) * (b * bits / 8 + 8)
    of values: about 1.5 bytes per kept element at 4 bits.

    Error: the error of each element is at most its magnitude, and that of the largest element is at most half
    a step: a contraction, with error feedback. One residual holds the errors of both selection and rounding
    (as in Basu et al. 2019, Qsparse-local-SGD, Lemma 3).

    Attributes:
        ratio: The share that is kept, above 0 and at most 1.
        bits: 1 to 8.
    """

    @property
    def native_format(self) -> NativeFormat | None:
        """Native operations encode it."""
        return NativeFormat("hybrid", self.bits, self.ratio)

    def for_rows(self) -> Compressor:
        """`quantize` with as many bits: the gradient of an embedding is already sparse, by rows."""
        return Quantize(self.bits)

    def _encode_selected(
        self, values: tf.Tensor, rows: tf.Tensor, chunk: ChunkInput
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        encoded = encode_blocks(chunk._replace(gradient=values, residual=None), self.bits)
        return [rows, *encoded.parts], values - encoded.residual if chunk.keep else None

    def decode_sum(self, ranks: Sequence[Sequence[tf.Tensor]], ctx: Shape, scale: tf.Tensor) -> tf.Tensor:
        """Dequantizes each rank's values, then places and sums them in one pass."""
        shape = (num_kept(self.ratio, size_of(ctx)),)
        pairs = [(decode_blocks([parts], self.bits, shape, tf.constant(1.0)), rows) for rows, *parts in ranks]
        return select.spread(pairs, ctx, scale)
