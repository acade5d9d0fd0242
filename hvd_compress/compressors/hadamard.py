"""Rotation of blocks, and levels for what rotation makes of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from .. import formats
from ..formats.base import Shape
from ..formats.hadamard import BLOCK, LEVELS
from ..kernels import bitpack, blocks, hadamard
from ..kernels.compile import compiled
from .base import ChunkInput, Compressor, Encoded
from .builtin import BuiltinCompressor
from .quantize import Quantize
from .registry import register

# The standard deviation of normally distributed values is so many times their mean magnitude.
_DEVIATION = (np.pi / 2.0) ** 0.5


@register
class Hadamard(formats.Hadamard, BuiltinCompressor):
    """Rotates each block of 64 values, and sends each rotated value as a code of `bits` bits.

    A rotated block has no outliers: its values are nearly normally distributed, whatever the gradient's distribution.
    So the levels are those with the least error for a normal distribution, not evenly spaced ones.

    Update rule, for a block x with the rotation R of `kernels.hadamard`: y = R x; s = sqrt(pi / 2) * mean|y|, rounded
    to bfloat16; each y is replaced by s times the nearest level c of the Lloyd-Max quantizer (Max 1960) for `bits`
    bits; decoded as R c s. This is EDEN (Vargaftik et al. 2022, arXiv 2108.08842) with a fixed rotation of small
    blocks, and with a scale for the least error instead of none on average. R is linear, so the receiver sums the
    ranks' values before it rotates them back (as THC, Li et al. 2024, arXiv 2302.08545).

    Wire size: ceil(n / 64) * (8 * bits + 2) bytes.

    Error: per block ||error||^2 <= ||x||_2^2 - d ||R x||_1^2 / 64, up to the rounding of s, with d = 1, 0.81, 0.99,
    0.96 for 1 to 4 bits: no choice of levels is better than the nearest, so in particular not one level c for the whole
    block, with which ||error||^2 = ||x||_2^2 - (1 - (1 - c s / mean|y|)^2) ||y||_1^2 / 64. So it is a contraction:
    with error feedback. Where rotated values are normally distributed, the error is that of the quantizer: 0.36, 0.12,
    0.035, 0.0095 times ||x||^2 (Max 1960, Table I). A zero block is exact, but a zero beside other values is not.

    Attributes:
        bits: 1 to 4.
    """

    def for_rows(self) -> Compressor:
        """`quantize` with as many bits: rows may be shorter than a block."""
        return Quantize(self.bits)

    def _encode_chunk(self, chunk: ChunkInput) -> Encoded:
        x = hadamard.to_blocks(chunk.sum())
        # Divided by 16 here and by 4 in `across`: means, which cannot overflow.
        half_rotated = hadamard.within(x, 1.0 / 16.0)
        scale, finite = _scales(half_rotated)
        codes, lost = _quantize(half_rotated, scale, self.bits, chunk.keep)
        new_residual = blocks.from_blocks(hadamard.within(lost), chunk.shape) if lost is not None else None
        return Encoded([scale, *codes], chunk.shape, new_residual, finite)

    def decode_sum(self, ranks: Sequence[Sequence[tf.Tensor]], ctx: Shape, scale: tf.Tensor) -> tf.Tensor:
        """Sums the ranks' rotated values, and rotates the sum back."""
        half_rotated = _decode_sum([list(parts) for parts in ranks], self.bits, scale)
        return blocks.from_blocks(hadamard.within(half_rotated), ctx)


@compiled
def _scales(half_rotated: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """The scale of each block, bfloat16 [blocks, 1], and whether all values are finite."""
    a, b, c, d = map(tf.abs, hadamard.across(hadamard.slices(half_rotated), 0.25))
    total = blocks.halving((a + b) * (1.0 / BLOCK) + (c + d) * (1.0 / BLOCK), tf.add)
    return tf.cast(total * _DEVIATION, tf.bfloat16), tf.reduce_all(tf.math.is_finite(total))


@compiled
def _quantize(
    half_rotated: tf.Tensor, scale: tf.Tensor, bits: int, keep: bool
) -> tuple[list[tf.Tensor], tf.Tensor | None]:
    """Packed codes, and if `keep` the error, half rotated back."""
    scale = tf.cast(scale, tf.float32)
    levels = LEVELS[bits]
    codes, errors = [], []
    for y in hadamard.across(hadamard.slices(half_rotated), 0.25):
        magnitude, negative = tf.abs(y), y < 0.0
        code = tf.where(negative, tf.constant(len(levels), tf.uint8), tf.constant(0, tf.uint8))
        decoded = levels[0] * scale
        for low, high in zip(levels, levels[1:]):
            above = magnitude > 0.5 * (low + high) * scale
            code += tf.cast(above, tf.uint8)
            decoded = tf.where(above, high * scale, decoded)
        codes.append(code)
        errors.append(y - tf.where(negative, -decoded, decoded))
    packed = bitpack.pack(tf.concat(codes, 1), bits)
    return packed, tf.concat(hadamard.across(errors), 1) if keep else None


@compiled
def _decode_sum(ranks: Sequence[list[tf.Tensor]], bits: int, factor: tf.Tensor) -> tf.Tensor:
    """The scaled sum of the ranks' values, half rotated back, float32 [blocks, 64]."""
    levels = LEVELS[bits]
    total = None
    for scale, *packed in ranks:
        code = tf.reshape(bitpack.unpack(packed, bits), [-1, BLOCK])
        index = tf.bitwise.bitwise_and(code, len(levels) - 1)
        decoded = tf.fill(tf.shape(code), levels[0])
        for i in range(1, len(levels)):
            decoded = tf.where(index >= i, levels[i], decoded)
        values = tf.where(code >= len(levels), -decoded, decoded) * (tf.cast(scale, tf.float32) * factor)
        total = values if total is None else total + values
    return tf.concat(hadamard.across(hadamard.slices(total)), 1)
