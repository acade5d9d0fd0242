"""Blocks of rows: how each compressor divides rows into blocks and encodes these."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

import tensorflow as tf

from ..formats import hadamard as rotated
from ..formats import quantize
from ..formats.base import Part
from ..formats.sizes import fields
from ..kernels import bitpack, blocks
from ..kernels.compile import compiled
from .base import Compressor, Seeds
from .hadamard import Hadamard, decode_blocks, encode_blocks
from .onebit import OneBit, decode_signs
from .quantize import Quantize, clip_to_percentile, decode_matrix, encode_matrix

_C = TypeVar("_C", bound=Compressor)


@dataclasses.dataclass(frozen=True)
class RowBlocks(ABC, Generic[_C]):
    """Encodes the blocks of rows, each with a scale of its own.

    Attributes:
        compressor: Of the rows.
        columns: Elements of a row.
    """

    compressor: _C
    columns: int

    @property
    @abstractmethod
    def size(self) -> int:
        """Elements of a block, a multiple of 8; the last block of a row is padded."""

    @property
    def count(self) -> int:
        """Blocks of a row."""
        return math.ceil(self.columns / self.size)

    @abstractmethod
    def parts(self) -> list[Part]:
        """What is sent of a block: its scales, each of the shape [], then its codes."""

    @abstractmethod
    def encode(self, rows: tf.Tensor, seeds: Seeds) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Encodes rows, float32 [n, columns].

        Returns:
            The parts, [n * count, ...], and the new residuals, [n * count, size], padded.
        """

    @abstractmethod
    def decode(self, parts: list[tf.Tensor]) -> tf.Tensor:
        """The inverse of `encode`: float32 [n * count, size]. Scales are [n * count, 1]."""

    def _split(self, rows: tf.Tensor, padding: tf.Tensor) -> tf.Tensor:
        """Rows as blocks [n * count, size]; the last ones are padded with the column `padding` [n, 1]."""
        missing = self.count * self.size - self.columns
        return tf.reshape(tf.concat([rows, *[padding] * missing], 1) if missing else rows, [-1, self.size])


def blocks_of(compressor: Compressor, columns: int) -> RowBlocks | None:
    """The code of a compressor's blocks; None if the compressor does not divide rows into blocks."""
    for kind, code in _CODES.items():
        if isinstance(compressor, kind):
            return code(compressor, columns)
    return None


def _even_size(columns: int, largest: int) -> int:
    """The size, a multiple of 8, of the fewest blocks of equal size that hold a row."""
    return 8 * math.ceil(columns / max(1, math.ceil(columns / largest)) / 8)


class _Quantized(RowBlocks[Quantize]):
    """A step and a base for each block of up to 256 columns, and codes of `bits` bits."""

    @property
    def size(self) -> int:
        return _even_size(self.columns, quantize.BLOCK)

    def parts(self) -> list[Part]:
        codes = [Part((self.size * width // 8,), "uint8") for width in fields(self.compressor.bits)]
        return [Part((), "float32"), Part((), "float32"), *codes]

    def encode(self, rows: tf.Tensor, seeds: Seeds) -> tuple[list[tf.Tensor], tf.Tensor]:
        compressor, zero = self.compressor, tf.zeros_like(rows[:, :1])
        clipped = rows if compressor.clip is None else clip_to_percentile(rows, compressor.clip)
        # Padded with the last column, which does not change minimum and maximum.
        matrix = self._split(clipped, clipped[:, -1:])
        seed = compressor.noise_seed(seeds)
        (step, *others), new_residuals, _ = encode_matrix((matrix, None, 1.0), compressor.bits, seed, True)
        finite = tf.reduce_all(tf.math.is_finite(self._split(rows, zero)), 1, keepdims=True)
        if clipped is not rows:
            new_residuals += self._split(rows - clipped, zero)
        return [tf.where(finite, step, float("nan")), *others], new_residuals

    def decode(self, parts: list[tf.Tensor]) -> tf.Tensor:
        return decode_matrix([parts], self.compressor.bits, tf.constant(1.0))


class _Signs(RowBlocks[OneBit]):
    """A magnitude for each block of up to 1024 columns, and signs."""

    @property
    def size(self) -> int:
        return _even_size(self.columns, quantize.SIGN_BLOCK)

    def parts(self) -> list[Part]:
        return [Part((), "float32"), Part((self.size // 8,), "uint8")]

    def encode(self, rows: tf.Tensor, seeds: Seeds) -> tuple[list[tf.Tensor], tf.Tensor]:
        del seeds
        # Elements of each block of a row that are not padding.
        lengths = [[float(min(self.size, self.columns - i * self.size))] for i in range(self.count)]
        return _encode_signs(self._split(rows, tf.zeros_like(rows[:, :1])), tf.constant(lengths))

    def decode(self, parts: list[tf.Tensor]) -> tf.Tensor:
        return _decode_signs(*parts)


class _Rotated(RowBlocks[Hadamard]):
    """A scale of 16 bits for each block of 64 columns, and codes of 2 bits of the rotated block.

    Blocks have 16 columns where that is fewer bytes.
    """

    @property
    def size(self) -> int:
        """The block size with fewer bytes for a row, or 64."""
        large, small = rotated.BLOCK, rotated.SMALL_BLOCK
        return min((large, small), key=lambda size: math.ceil(self.columns / size) * (2 + size // 4))

    def parts(self) -> list[Part]:
        """The scale, then the codes."""
        return [Part((), "bfloat16"), Part((self.size // 4,), "uint8")]

    def encode(self, rows: tf.Tensor, seeds: Seeds) -> tuple[list[tf.Tensor], tf.Tensor]:
        """As `Hadamard` encodes a tensor."""
        del seeds
        parts, new_residuals, _ = encode_blocks(self._split(rows, tf.zeros_like(rows[:, :1])), True)
        return parts, tf.reshape(new_residuals, [-1, self.size])

    def decode(self, parts: list[tf.Tensor]) -> tf.Tensor:
        """As `Hadamard` decodes a tensor."""
        return tf.reshape(decode_blocks([parts], tf.constant(1.0)), [-1, self.size])


@compiled
def _encode_signs(x: tf.Tensor, lengths: tf.Tensor) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Magnitudes and signs of blocks [n * blocks, size], padded with zeros beyond `lengths` [blocks, 1]."""
    width = x.shape[1]
    # Scaled by a power of two, as the sum itself may overflow.
    scaled_sum = blocks.halving(tf.abs(x) * (1.0 / quantize.SIGN_BLOCK), tf.add)
    mean = tf.reshape(tf.reshape(scaled_sum, [-1, *lengths.shape]) / lengths, [-1, 1]) * float(quantize.SIGN_BLOCK)
    negative = x < 0.0
    (packed,) = bitpack.pack(tf.cast(negative, tf.uint8), 1)
    return [mean, packed], tf.ensure_shape(x - tf.where(negative, -mean, mean), [None, width])


_decode_signs = compiled(decode_signs)

_CODES: dict[type[Compressor], type[RowBlocks[Any]]] = {Quantize: _Quantized, OneBit: _Signs, Hadamard: _Rotated}
