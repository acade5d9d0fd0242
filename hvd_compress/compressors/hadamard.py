"""Rotation of blocks, and levels for what rotation makes of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from .. import formats
from ..formats.base import Shape
from ..formats.hadamard import BLOCK, HIGH, LOW, THRESHOLD
from ..kernels import bitpack, blocks, hadamard
from ..kernels.compile import compiled
from ..kernels.native import NativeFormat
from .base import ChunkInput, Compressor, Encoded
from .builtin import BuiltinCompressor
from .registry import register

# The standard deviation of normally distributed values is so many times their mean magnitude.
_DEVIATION = (np.pi / 2.0) ** 0.5


@register
@dataclasses.dataclass(frozen=True)
class Hadamard(formats.Hadamard, BuiltinCompressor):
    """Rotates each block of 64 values, and sends each rotated value as a code of 2 bits.

    A rotated block has no outliers: its values are nearly normally distributed, whatever the gradient's distribution.
    So the levels are those with the least error for a normal distribution, not evenly spaced ones.

    Update rule, for a block x with the rotation R of `kernels.hadamard`: y = R x; s = sqrt(pi / 2) * mean|y|, rounded
    to bfloat16; each y is replaced by s times the nearest level c of the Lloyd-Max quantizer (Max 1960); decoded as
    R (c s). This is EDEN (Vargaftik et al. 2022, arXiv 2108.08842) with a fixed rotation of small blocks, and with a
    scale for a small error instead of none on average. R is linear, so the receiver sums the ranks' values before it
    rotates them back (as in THC, Li et al. 2024, arXiv 2302.08545).

    Rows of embeddings that are short have blocks of 16, if these are fewer bytes.

    Wire size: ceil(n / 64) * 18 bytes.

    Error: per block ||error||^2 <= ||x||_2^2 - 0.81 ||R x||_1^2 / 64, up to the rounding of s. For no choice of levels
    is better than the nearest ones, so in particular not +-0.4528 for all values. So it is a contraction: with error
    feedback. Where rotated values are normally distributed, the error is 0.1175 ||x||^2 (Max 1960, Table I). A block of
    zeros is exact; a zero beside other values is not.
    """

    @property
    def native_format(self) -> NativeFormat | None:
        """Native operations encode it."""
        return NativeFormat("hadamard")

    def for_rows(self) -> Compressor:
        """The same: each row has its own blocks."""
        return self

    def _encode_chunk(self, chunk: ChunkInput) -> Encoded:
        parts, new_residual, finite = encode_blocks(blocks.to_full_blocks(chunk.sum(), BLOCK), chunk.keep)
        if new_residual is not None:
            new_residual = blocks.from_blocks(new_residual, chunk.shape)
        return Encoded(parts, chunk.shape, new_residual, finite)

    def decode_sum(self, ranks: Sequence[Sequence[tf.Tensor]], ctx: Shape, scale: tf.Tensor) -> tf.Tensor:
        """Sums the ranks' rotated values, and rotates the sum back."""
        return blocks.from_blocks(decode_blocks(ranks, scale), ctx)


def encode_blocks(matrix: tf.Tensor, keep: bool) -> tuple[list[tf.Tensor], tf.Tensor | None, tf.Tensor]:
    """Encodes blocks of 64 or 16 elements.

    Args:
        matrix: float32 [blocks, 64] or [blocks, 16].
        keep: Whether new residuals are wanted.

    Returns:
        The scales, bfloat16 [blocks, 1], and the packed codes, uint8 [blocks, 16 or 4]; the new residuals, float32
        [blocks, 4, 16 or 4]; whether all values are finite, bool scalar.
    """
    # Divided by 16 here, and with blocks of 64 by 4 in `across`: means, which cannot overflow.
    half_rotated = hadamard.within(matrix, 1.0 / 16.0)
    scale, finite = _scales(half_rotated)
    codes = _codes(half_rotated, scale)
    return [scale, codes], hadamard.within(_lost(half_rotated, scale, codes)) if keep else None, finite


def decode_blocks(ranks: Sequence[Sequence[tf.Tensor]], scale: tf.Tensor) -> tf.Tensor:
    """The scaled sum of the ranks' blocks, float32 [blocks, 4, 16 or 4], from scales and codes."""
    return hadamard.within(_across(_decode_sum([list(parts) for parts in ranks], scale)))


@compiled
def _scales(half_rotated: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """The scale of each block, bfloat16 [blocks, 1], and whether all values are finite."""
    elements = half_rotated.shape[1] * half_rotated.shape[2]
    magnitude = tf.abs(hadamard.across(half_rotated, 0.25)) * (1.0 / elements)
    a, b, c, d = (magnitude[:, i] for i in range(4))
    mean = blocks.halving((a + b) + (c + d), tf.add)
    return tf.cast(mean * _DEVIATION, tf.bfloat16), tf.reduce_all(tf.math.is_finite(mean))


@compiled
def _codes(half_rotated: tf.Tensor, scale: tf.Tensor) -> tf.Tensor:
    """Packed codes: the lower bit says which of the levels, the upper one that it is negative."""
    y = hadamard.across(half_rotated, 0.25)
    high = tf.abs(y) > THRESHOLD * tf.cast(scale, tf.float32)[:, None]
    code = tf.cast(high, tf.uint8) + 2 * tf.cast(y < 0.0, tf.uint8)
    byte = code[:, 0]
    for i in range(1, 4):  # as in `bitpack.pack`
        byte = tf.bitwise.bitwise_or(byte, tf.bitwise.left_shift(code[:, i], tf.constant(2 * i, tf.uint8)))
    return byte


@compiled
def _lost(half_rotated: tf.Tensor, scale: tf.Tensor, codes: tf.Tensor) -> tf.Tensor:
    """What decoding lacks, half rotated, divided by 4; with blocks of 16, rotated."""
    return half_rotated - hadamard.across(_decode(scale, codes))


@compiled
def _decode_sum(ranks: Sequence[list[tf.Tensor]], factor: tf.Tensor) -> tf.Tensor:
    """The scaled sum of the ranks' rotated values, float32 [blocks, 4, 16 or 4]."""
    total = None
    for scale, codes in ranks:
        values = _decode(scale, codes)
        total = values if total is None else total + values
    return total * factor


def _decode(scale: tf.Tensor, codes: tf.Tensor) -> tf.Tensor:
    """One rank's rotated values, divided by 8 (with blocks of 16, by 4); float32 [blocks, 4, 16 or 4]."""
    code = bitpack.unpack([codes], 2)
    magnitude = tf.where(tf.bitwise.bitwise_and(code, 1) > 0, HIGH, LOW)
    return tf.where(code >= 2, -magnitude, magnitude) * tf.cast(scale, tf.float32)[:, None]


# A kernel of its own: fused with the sum, XLA would decode each value five times.
_across = compiled(hadamard.across)
