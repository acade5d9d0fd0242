"""Sparse selection with quantized values."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import tensorflow as tf

from ..kernels import select
from .base import BuiltinCompressor, Seeds, Shape, check_ratio, check_whole, kept, size_of
from .quantize import Quantize
from .sparse import row_dtype, strided_selection


@dataclasses.dataclass(frozen=True)
class Hybrid(BuiltinCompressor):
    """Keeps the largest element of each strided block, as `block_topk` does, in `bits` bits, as `quantize` does.

    Wire size, with k = max(1, ceil(ratio * n)), B = ceil(n / k) and b = min(128, k rounded up to 8):
    i * k bytes of indices (i = 1 for B <= 256, 2 for B <= 65536, else 4) plus ceil(k / b) * (b * bits / 8 + 8)
    of values: about 1.5 bytes per kept element at 4 bits.

    Error: no element's error exceeds its magnitude, and the largest one's is at most half a step, so it is
    a contraction; one residual covers both losses (as in Basu et al. 2019, Qsparse-local-SGD, Lemma 3).

    Attributes:
        ratio: The share that is kept, above 0 and at most 1.
        bits: 1 to 8.
    """

    name: ClassVar[str] = "hybrid"
    sparse = True
    ratio: float
    bits: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "ratio", check_ratio(self.ratio, self.name))
        object.__setattr__(self, "bits", check_whole(self.bits, "bits", self.name, 8))

    def layout(self, shape: Shape) -> list[tf.TensorSpec]:
        """Each block's row, then the parts of the quantized values."""
        n = size_of(shape)
        k = kept(self.ratio, n)
        return [tf.TensorSpec([k], row_dtype(n, k)), *Quantize(self.bits).layout((k,))]

    def encode(self, x: tf.Tensor, seeds: Seeds) -> tuple[list[tf.Tensor], Shape]:
        """Selects, then quantizes."""
        flat = tf.reshape(x, [-1])
        values, rows = strided_selection(flat, kept(self.ratio, flat.shape[0]))
        parts, _ = Quantize(self.bits).encode(values, seeds)
        return [rows, *parts], tuple(x.shape.as_list())

    def decode(self, parts: Sequence[tf.Tensor], ctx: Shape) -> tf.Tensor:
        """Dequantizes the values and puts them into zeros."""
        return self.decode_sum([part[None] for part in parts], ctx, tf.constant(1.0))

    def decode_sum(self, parts: Sequence[tf.Tensor], ctx: Shape, scale: tf.Tensor) -> tf.Tensor:
        """Dequantizes each rank's values, then puts and sums them in one pass."""
        n = size_of(ctx)
        rows, *quantized = parts
        quantizer = Quantize(self.bits)
        kept_shape = (kept(self.ratio, n),)
        values = [
            quantizer.decode([part[rank] for part in quantized], kept_shape) for rank in range(rows.shape[0])
        ]
        return tf.reshape(select.spread(tf.stack(values), tf.cast(rows, tf.int32), n, scale), ctx)
