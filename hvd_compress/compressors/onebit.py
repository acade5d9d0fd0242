"""Signs with one magnitude per block."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from .. import formats
from ..formats.base import Shape, size_of
from ..formats.quantize import SIGN_BLOCK as BLOCK
from ..kernels import bitpack, blocks
from ..kernels.compile import Terms, compiled, fed_back
from ..kernels.native import NativeFormat
from .base import ChunkInput, Compressor, Encoded
from .builtin import BuiltinCompressor
from .cast import NoCompression
from .registry import register


@register
@dataclasses.dataclass(frozen=True)
class OneBit(formats.OneBit, BuiltinCompressor):
    """Sends the sign of each value, and the mean |x| of each block.

    Update rule: x is decoded as sign(x) * mean|block|, with sign(0) = +1 (Seide et al. 2014; scaled as
    in EF-SignSGD, Karimireddy et al. 2019, Algorithm 1).

    Wire size, with b = min(1024, n rounded up to 8): ceil(n / b) * (b / 8 + 4) bytes.

    Error: ||error||^2 = ||x||_2^2 - ||x||_1^2 / b per block, so it is a contraction with factor
    1 - ||x||_1^2 / (b ||x||_2^2) (Karimireddy et al. 2019, Lemma 8): with error feedback. A block whose
    values have one magnitude is exact (a last block that is not full: up to float32 rounding); so is a zero block.
    """

    @property
    def native_format(self) -> NativeFormat | None:
        """Native operations encode it."""
        return NativeFormat("onebit")

    def for_rows(self) -> Compressor:
        """The same: each row has its own blocks."""
        return self

    def _encode_chunk(self, chunk: ChunkInput) -> Encoded:
        terms = chunk.terms(lambda x: blocks.to_blocks(x, BLOCK))
        mean, finite = _means(terms, size_of(chunk.shape))
        signs, new_residual = _signs(terms, mean, chunk.keep)
        if new_residual is not None:
            new_residual = blocks.from_blocks(new_residual, chunk.shape)
        return Encoded([mean, signs], chunk.shape, new_residual, finite)

    def decode_sum(self, ranks: Sequence[Sequence[tf.Tensor]], ctx: Shape, scale: tf.Tensor) -> tf.Tensor:
        """Multiplies means and signs, and sums, in one pass."""
        return blocks.from_blocks(_decode_sum([list(parts) for parts in ranks], scale), ctx)


class OneBitLater(OneBit):
    """The compressor of `hvdc.optimizers.OneBitAdam`: none in the first steps, then `onebit`."""

    counts = "given"

    @property
    def stages(self) -> tuple[Compressor, ...]:
        """Uncompressed, then `onebit`."""
        return (NoCompression(), OneBit())

    def stage_at(self, progress: tf.Tensor) -> tf.Tensor:
        """The second stage once `progress` is 1; int32 scalar."""
        return tf.cast(progress, tf.int32)


@compiled
def _means(terms: Terms, n: int) -> tuple[tf.Tensor, tf.Tensor]:
    magnitude = tf.abs(fed_back(*terms))
    rows, block = magnitude.shape
    sizes = tf.constant(float(block))
    padding = rows * block - n
    if padding:
        sizes = float(block) - padding * tf.cast(tf.range(rows)[:, None] == rows - 1, tf.float32)
        magnitude = tf.where(tf.range(block, dtype=tf.float32) < sizes, magnitude, 0.0)
    # Scaled by a power of two, 1 / BLOCK, as the sum itself may overflow.
    mean = blocks.halving(magnitude * (1.0 / BLOCK), tf.add) / sizes * float(BLOCK)
    return mean, tf.reduce_all(tf.math.is_finite(mean))


@compiled
def _signs(terms: Terms, mean: tf.Tensor, keep: bool) -> tuple[tf.Tensor, tf.Tensor | None]:
    values = fed_back(*terms)
    negative = values < 0.0
    new_residual = values - tf.where(negative, -mean, mean) if keep else None
    return bitpack.pack(tf.cast(negative, tf.uint8), 1)[0], new_residual


def decode_signs(mean: tf.Tensor, signs: tf.Tensor) -> tf.Tensor:
    """The values that one rank's parts stand for; float32 [blocks, a, b], blocks of a * b elements."""
    magnitude = mean[:, None]
    return tf.where(bitpack.unpack([signs], 1) > 0, -magnitude, magnitude)


@compiled
def _decode_sum(ranks: Sequence[Sequence[tf.Tensor]], scale: tf.Tensor) -> tf.Tensor:
    total = None
    for parts in ranks:
        values = decode_signs(*parts)
        total = values if total is None else total + values
    return total * scale
