"""Rows of a table (the gradient of an embedding), each compressed separately.

Such a gradient is already sparse by rows, so compressors only quantize or cast the values of its rows. Each row is
sent with its own number and its own scale. Payloads of ranks can therefore be concatenated, whatever their lengths,
and the rows of rare words do not share a scale with those of frequent ones.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import tensorflow as tf

from ..formats.cast import Cast
from ..formats.quantize import BLOCK, SIGN_BLOCK
from ..formats.sizes import fields
from ..kernels import bitpack, blocks, native
from ..kernels.compile import compiled
from .base import Seeds
from .onebit import OneBit, decode_signs
from .quantize import Quantize, clip_to_percentile, decode_matrix, encode_matrix

# XLA compiles kernels for each number of rows, so rows are padded to one of these numbers.
_PADDED_COUNTS = [64 * 2**i for i in range(40)]


@dataclasses.dataclass(frozen=True)
class Rows:
    """Encodes rows of a table.

    Wire size: the row's number; a step and a base for each block of up to 256 columns (for `onebit` a magnitude for
    each block of up to 1024); and the codes.

    Error: that of the compressor, applied to the blocks of a row.

    Attributes:
        compressor: A result of `Compressor.for_rows`.
        table: How many rows the table has.
        columns: Elements of a row.
        dtype: The dtype of values that are sent uncompressed.
    """

    compressor: Any
    table: int
    columns: int
    dtype: tf.DType = tf.float32

    @property
    def nbytes(self) -> int:
        """Bytes of an encoded row."""
        return self._index_bytes + sum(self._part_sizes)

    def encode(self, rows: tf.Tensor, values: tf.Tensor, seeds: Seeds) -> tuple[tf.Tensor, tf.Tensor]:
        """Encodes rows as bytes.

        Args:
            rows: The numbers of the rows, int64 [n], from 0 to `table`.
            values: [n, columns]; float32, or `dtype` if they are sent uncompressed.
            seeds: For stochastic rounding.

        Returns:
            The payload, uint8 [n, nbytes], and the new residuals in the shape and dtype of `values`. A row that is not
            finite decodes to a row that is not finite.
        """
        native_format = self._native_format
        if native_format is not None:
            payload, new_residuals = native.encode_rows(
                native_format, self._native_form, rows, values, seeds.local, seeds.chunk
            )
            return tf.ensure_shape(payload, [None, self.nbytes]), new_residuals
        numbers = tf.bitcast(rows, tf.uint8)[:, : self._index_bytes]  # little-endian
        encoded, new_residuals = self._encode(values, seeds)
        return tf.concat([numbers, encoded], 1), new_residuals

    def decode(self, payload: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """The inverse of `encode`: the rows' numbers, int64 [n], and values, float32 (or `dtype`) [n, columns]."""
        native_format = self._native_format
        if native_format is not None:
            return native.decode_rows(native_format, self._native_form, payload)
        size = self._index_bytes
        rows = tf.bitcast(tf.pad(payload[:, :size], [[0, 0], [0, 8 - size]]), tf.int64)
        return rows, tf.ensure_shape(self._decode(payload[:, size:]), [None, self.columns])

    def _encode(self, x: tf.Tensor, seeds: Seeds) -> tuple[tf.Tensor, tf.Tensor]:
        compressor = self.compressor
        if not isinstance(compressor, (Quantize, OneBit)):
            sent = tf.cast(x, self._wire)
            return _to_bytes(sent), x - tf.cast(sent, x.dtype)
        count = tf.shape(x)[0]
        padded = _pad_rows(x)
        zero = tf.zeros_like(padded[:, :1])
        if isinstance(compressor, OneBit):
            num_blocks, block = self._blocks
            # Elements of each block of a row that are not padding.
            sizes = tf.constant([[float(min(block, self.columns - i * block))] for i in range(num_blocks)])
            parts, new_residuals = _encode_signs(self._to_blocks(padded, zero), sizes)
        else:
            clipped = padded if compressor.clip is None else clip_to_percentile(padded, compressor.clip)
            # Padded with the last column, which does not change minimum and maximum.
            matrix = self._to_blocks(clipped, clipped[:, -1:])
            seed = compressor.noise_seed(seeds)
            (step, *others), new_residuals, _ = encode_matrix((matrix, None, 1.0), compressor.bits, seed, True)
            finite = tf.reduce_all(tf.math.is_finite(self._to_blocks(padded, zero)), 1, keepdims=True)
            parts = [tf.where(finite, step, float("nan")), *others]
            if clipped is not padded:
                new_residuals += self._to_blocks(padded - clipped, zero)
        encoded = [tf.reshape(_to_bytes(part), [tf.shape(padded)[0], -1]) for part in parts]
        new_residuals = tf.reshape(new_residuals, [tf.shape(padded)[0], -1])[:count, : self.columns]
        return tf.concat(encoded, 1)[:count], new_residuals

    def _decode(self, encoded: tf.Tensor) -> tf.Tensor:
        compressor = self.compressor
        if not isinstance(compressor, (Quantize, OneBit)):
            values = tf.bitcast(tf.reshape(encoded, [-1, self.columns, self._wire.size]), self._wire)
            return values if compressor.uncompressed else tf.cast(values, tf.float32)
        count = tf.shape(encoded)[0]
        encoded = _pad_rows(encoded)
        signs = isinstance(compressor, OneBit)
        num_blocks, block = self._blocks
        scales = 1 if signs else 2  # of a block: the magnitude, or step and base
        parts, start = [], 0
        for i, size in enumerate(self._part_sizes):
            part = tf.reshape(encoded[:, start : start + size], [-1, size // num_blocks])
            parts.append(tf.bitcast(part, tf.float32)[:, None] if i < scales else part)
            start += size
        if signs:
            values = _decode_signs(*parts)
        else:
            values = decode_matrix([parts], compressor.bits, tf.constant(1.0))
        return tf.reshape(values, [-1, num_blocks * block])[:count, : self.columns]

    @property
    def needs_xla(self) -> bool:
        """Whether XLA compiles kernels for it, which takes a second or two."""
        return self._in_blocks and self._native_format is None

    @property
    def _in_blocks(self) -> bool:
        """Whether rows are divided into blocks, each with a scale of its own; otherwise values are cast."""
        return isinstance(self.compressor, (Quantize, OneBit))

    @property
    def _native_format(self) -> native.NativeFormat | None:
        """What native operations need to know of the compressor; None if TensorFlow's or XLA's are used."""
        return native.in_use(self.compressor.native_format) if self._in_blocks else None

    @property
    def _native_form(self) -> native.RowForm:
        return native.RowForm(self.columns, *self._blocks, self._index_bytes)

    @property
    def _wire(self) -> tf.DType:
        return self.dtype if self.compressor.uncompressed else tf.as_dtype(self.compressor.wire_type)

    @property
    def _index_bytes(self) -> int:
        """Bytes of a row's number. The number `table` itself fits, too: it means no row."""
        return math.ceil(self.table.bit_length() / 8)

    @property
    def _blocks(self) -> tuple[int, int]:
        """How many blocks of equal size a row is divided into, and this size: a multiple of 8."""
        count = max(1, math.ceil(self.columns / (SIGN_BLOCK if isinstance(self.compressor, OneBit) else BLOCK)))
        return count, 8 * math.ceil(self.columns / count / 8)

    @property
    def _part_sizes(self) -> list[int]:
        """Bytes of each part of a row, after its number.

        Raises:
            TypeError: Rows are not sent in this form.
        """
        if isinstance(self.compressor, Cast):
            return [self.columns * self._wire.size]
        count, block = self._blocks
        if isinstance(self.compressor, OneBit):
            return [4 * count, count * block // 8]
        if isinstance(self.compressor, Quantize):
            return [4 * count, 4 * count, *(count * block * width // 8 for width in fields(self.compressor.bits))]
        raise TypeError(f"{self.compressor} is no form for rows")

    def _to_blocks(self, x: tf.Tensor, column: tf.Tensor) -> tf.Tensor:
        """Rows of `columns` elements as [rows * blocks, block]; their last blocks are padded with `column`."""
        _, block = self._blocks
        missing = -self.columns % block
        if missing:
            x = tf.concat([x, *[column] * missing], 1)
        return tf.reshape(x, [-1, block])


def _pad_rows(x: tf.Tensor) -> tf.Tensor:
    """`x` [n, m] padded with rows of zeros to the next of `_PADDED_COUNTS`."""
    count = tf.cast(tf.shape(x)[0], tf.int64)
    padded_counts = tf.constant(_PADDED_COUNTS, tf.int64)
    missing = padded_counts[tf.searchsorted(padded_counts, count[None])[0]] - count
    return tf.pad(x, [[0, missing], [0, 0]])


def _to_bytes(x: tf.Tensor) -> tf.Tensor:
    """The elements of `x` [n, m] as bytes, uint8 [n, m * size]."""
    if x.dtype == tf.uint8:
        return x
    return tf.reshape(tf.bitcast(x, tf.uint8), [-1, x.shape[1] * x.dtype.size])


@compiled
def _encode_signs(x: tf.Tensor, sizes: tf.Tensor) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Magnitudes and signs of blocks [rows * blocks, block], padded with zeros beyond `sizes` [blocks, 1]."""
    width = x.shape[1]
    # Scaled by a power of two, as the sum itself may overflow.
    scaled_sum = blocks.halving(tf.abs(x) * (1.0 / SIGN_BLOCK), tf.add)
    mean = tf.reshape(tf.reshape(scaled_sum, [-1, *sizes.shape]) / sizes, [-1, 1]) * float(SIGN_BLOCK)
    negative = x < 0.0
    (packed,) = bitpack.pack(tf.cast(negative, tf.uint8), 1)
    return [mean, packed], tf.ensure_shape(x - tf.where(negative, -mean, mean), [None, width])


_decode_signs = compiled(decode_signs)
