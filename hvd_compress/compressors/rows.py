"""Rows of a table (the gradient of an embedding), each compressed for itself.

Such a gradient is sparse by rows already: of a compressor only what it does to the values that it sends is left.
A row brings its own number and its own scale, so that payloads of ranks can be laid end to end, whatever
their lengths, and rare words are not measured by frequent ones.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from ..formats.quantize import BLOCK, SIGN_BLOCK
from ..formats.rows import blocks_of, index_bytes, row_bytes
from ..kernels import bitpack, blocks, noise
from ..kernels.compile import compiled
from .base import Seeds
from .cast import NoCompression
from .onebit import OneBit
from .quantize import Quantize, clip_to_percentile, decode_matrix, encode_matrix

# Compiled kernels see so many rows or twice, four times, ... as many: each number of rows is compiled anew.
_FEWEST = 64
_STEPS = [_FEWEST * 2**i for i in range(40)]


@dataclasses.dataclass(frozen=True)
class Rows:
    """The code of a table's rows.

    Wire size: as `formats.rows.row_bytes`: the row's number, a step and a base (a magnitude for `onebit`) for each 256
    (1024) columns at most, and the codes.

    Error: that of the compressor, with a row's blocks as its blocks.

    Attributes:
        compressor: One that `Compressor.for_rows` returns.
        table: How many rows the table has.
        columns: Elements of a row.
        dtype: Of values that are sent as they are.
    """

    compressor: Any
    table: int
    columns: int
    dtype: tf.DType = tf.float32

    @property
    def nbytes(self) -> int:
        """Bytes of a row."""
        return row_bytes(self.compressor, self.table, self.columns, self.dtype.size)

    def encode(self, rows: tf.Tensor, values: tf.Tensor, seeds: Seeds) -> tuple[tf.Tensor, tf.Tensor]:
        """Rows as bytes.

        Args:
            rows: Their numbers, int64 [n], from 0 to `table`.
            values: [n, columns]; float32, or `dtype` where they are sent as they are.
            seeds: For stochastic rounding.

        Returns:
            uint8 [n, nbytes], and what they leave out, as `values`. What is not finite decodes to a
            row that is not finite.
        """
        number = tf.bitcast(rows, tf.uint8)[:, : index_bytes(self.table)]  # little-endian
        coded, left = self._encode(values, seeds)
        return tf.concat([number, coded], 1), left

    def decode(self, payload: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """The inverse of `encode`: numbers, int64 [n], and values, float32 (or `dtype`) [n, columns]."""
        size = index_bytes(self.table)
        rows = tf.bitcast(tf.pad(payload[:, :size], [[0, 0], [0, 8 - size]]), tf.int64)
        return rows, tf.ensure_shape(self._decode(payload[:, size:]), [None, self.columns])

    def _encode(self, x: tf.Tensor, seeds: Seeds) -> tuple[tf.Tensor, tf.Tensor]:
        compressor = self.compressor
        if not isinstance(compressor, (Quantize, OneBit)):
            sent = tf.cast(x, self._wire)
            return _bytes(sent), x - tf.cast(sent, x.dtype)
        count = tf.shape(x)[0]
        padded = _padded(x)
        zero = tf.zeros_like(padded[:, :1])
        if isinstance(compressor, OneBit):
            _, block = blocks_of(self.columns, SIGN_BLOCK)
            parts, left = _signs(self._filled(padded, block, zero), self._sizes(block))
        else:
            _, block = blocks_of(self.columns, BLOCK)
            clipped = padded if compressor.clip is None else clip_to_percentile(padded, compressor.clip)
            seed = None
            if compressor.rounding == "stochastic":
                seed = noise.fold(noise.fold(seeds.local, seeds.chunk), compressor.seed)
            # The last column again, which changes no extremes.
            filled = self._filled(clipped, block, clipped[:, -1:])
            (step, *others), left, _ = encode_matrix(filled, None, 1.0, compressor.bits, seed, True)
            finite = tf.reduce_all(tf.math.is_finite(self._filled(padded, block, zero)), 1, keepdims=True)
            parts = [tf.where(finite, step, float("nan")), *others]
            if clipped is not padded:
                left += self._filled(padded - clipped, block, zero)
        coded = [tf.reshape(_bytes(part), [tf.shape(padded)[0], -1]) for part in parts]
        left = tf.reshape(left, [tf.shape(padded)[0], -1])[:count, : self.columns]
        return tf.concat(coded, 1)[:count], left

    def _decode(self, coded: tf.Tensor) -> tf.Tensor:
        compressor = self.compressor
        if not isinstance(compressor, (Quantize, OneBit)):
            values = tf.bitcast(tf.reshape(coded, [-1, self.columns, self._wire.size]), self._wire)
            return values if isinstance(compressor, NoCompression) else tf.cast(values, tf.float32)
        count = tf.shape(coded)[0]
        coded = _padded(coded)
        signs = isinstance(compressor, OneBit)
        blocks_, block = blocks_of(self.columns, SIGN_BLOCK if signs else BLOCK)
        widths = [1] if signs else bitpack.fields(compressor.bits)
        sizes = [4] if signs else [4, 4]
        sizes += [block * width // 8 for width in widths]
        parts, start = [], 0
        for i, size in enumerate(sizes):
            part = tf.reshape(coded[:, start : start + blocks_ * size], [-1, size])
            parts.append(tf.bitcast(part, tf.float32)[:, None] if i < len(sizes) - len(widths) else part)
            start += blocks_ * size
        if signs:
            values = _unsigned(*parts)
        else:
            values = decode_matrix([parts], compressor.bits, tf.constant(1.0))
        return tf.reshape(values, [-1, blocks_ * block])[:count, : self.columns]

    @property
    def _wire(self) -> tf.DType:
        plain = isinstance(self.compressor, NoCompression)
        return self.dtype if plain else self.compressor.wire_dtype

    def _filled(self, x: tf.Tensor, block: int, column: tf.Tensor) -> tf.Tensor:
        """Rows of `columns` elements as whole blocks, [rows * blocks, block]; `column` is put behind the last."""
        missing = -self.columns % block
        if missing:
            x = tf.concat([x, *[column] * missing], 1)
        return tf.reshape(x, [-1, block])

    def _sizes(self, block: int) -> tf.Tensor:
        """How many elements of each of a row's blocks are its own, float32 [blocks, 1]."""
        count, _ = blocks_of(self.columns, SIGN_BLOCK)
        return tf.constant([[float(min(block, self.columns - i * block))] for i in range(count)])


def _padded(x: tf.Tensor) -> tf.Tensor:
    """`x` [n, m] with zeros behind it, up to the next of the numbers of rows that kernels are compiled for."""
    count = tf.cast(tf.shape(x)[0], tf.int64)
    steps = tf.constant(_STEPS, tf.int64)
    missing = steps[tf.searchsorted(steps, count[None])[0]] - count
    return tf.pad(x, [[0, missing], [0, 0]])


def _bytes(x: tf.Tensor) -> tf.Tensor:
    """The elements of `x` [n, m] as bytes, uint8 [n, m * size]."""
    if x.dtype == tf.uint8:
        return x
    return tf.reshape(tf.bitcast(x, tf.uint8), [-1, x.shape[1] * x.dtype.size])


@compiled
def _signs(x: tf.Tensor, sizes: tf.Tensor) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Magnitude and signs of blocks, [rows * blocks, block], zeros where they are longer than `sizes` [blocks, 1]."""
    width = x.shape[1]
    # Scaled by a power of two, as the sum itself may overflow.
    summed = blocks.halving(tf.abs(x) * (1.0 / SIGN_BLOCK), tf.add)
    mean = tf.reshape(tf.reshape(summed, [-1, *sizes.shape]) / sizes, [-1, 1]) * float(SIGN_BLOCK)
    negative = x < 0.0
    (packed,) = bitpack.pack(tf.cast(negative, tf.uint8), 1)
    return [mean, packed], tf.ensure_shape(x - tf.where(negative, -mean, mean), [None, width])


@compiled
def _unsigned(mean: tf.Tensor, packed: tf.Tensor) -> tf.Tensor:
    size = mean[:, None]
    return tf.where(bitpack.unpack([packed], 1) > 0, -size, size)
