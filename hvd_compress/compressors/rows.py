"""Rows of a table (the gradient of an embedding), each compressed separately.

Such a gradient is already sparse by rows, so compressors only quantize or cast the values of its rows. Each row is
sent with its own number and its own scale. Payloads of ranks can therefore be concatenated, whatever their lengths,
and the rows of rare words do not share a scale with those of frequent ones.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import tensorflow as tf

from ..formats.cast import Cast
from ..kernels import native
from .base import Seeds
from .row_blocks import RowBlocks, blocks_of

# XLA compiles kernels for each number of rows, so rows are padded to one of these numbers.
_PADDED_COUNTS = [64 * 2**i for i in range(40)]


@dataclasses.dataclass(frozen=True)
class Rows:
    """Encodes rows of a table.

    Wire size: the row's number; the scales of each block (`quantize`: a step and a base for up to 256 columns;
    `onebit`: a magnitude for up to 1024; `hadamard`: a scale of 2 bytes for 64 or 16); and the codes.

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
        return self._index_bytes + self._value_bytes

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
        if self._blocks is None:
            sent = tf.cast(x, self._wire)
            return _to_bytes(sent), x - tf.cast(sent, x.dtype)
        count, padded = tf.shape(x)[0], _pad_rows(x)
        parts, new_residuals = self._blocks.encode(padded, seeds)
        encoded = [tf.reshape(_to_bytes(part), [tf.shape(padded)[0], -1]) for part in parts]
        new_residuals = tf.reshape(new_residuals, [tf.shape(padded)[0], -1])[:count, : self.columns]
        return tf.concat(encoded, 1)[:count], new_residuals

    def _decode(self, encoded: tf.Tensor) -> tf.Tensor:
        if self._blocks is None:
            values = tf.bitcast(tf.reshape(encoded, [-1, self.columns, self._wire.size]), self._wire)
            return values if self.compressor.uncompressed else tf.cast(values, tf.float32)
        count, padded = tf.shape(encoded)[0], _pad_rows(encoded)
        parts, start = [], 0
        for part in self._blocks.parts():
            size = self._blocks.count * part.nbytes
            of_blocks = tf.reshape(padded[:, start : start + size], [-1, part.nbytes])
            parts.append(of_blocks if part.shape else tf.bitcast(of_blocks, part.dtype)[:, None])
            start += size
        values = self._blocks.decode(parts)
        return tf.reshape(values, [-1, self._blocks.count * self._blocks.size])[:count, : self.columns]

    @property
    def needs_xla(self) -> bool:
        """Whether XLA compiles kernels for it, which takes a second or two."""
        return self._blocks is not None and self._native_format is None

    @functools.cached_property
    def _blocks(self) -> RowBlocks[Any] | None:
        """How rows are divided into blocks, each with a scale of its own; None if values are cast."""
        return blocks_of(self.compressor, self.columns)

    @property
    def _native_format(self) -> native.NativeFormat | None:
        """What native operations need to know of the compressor; None if TensorFlow's or XLA's are used."""
        return native.in_use(self.compressor.native_format) if self._blocks is not None else None

    @property
    def _native_form(self) -> native.RowForm:
        assert self._blocks is not None, "ask `_native_format` before"
        return native.RowForm(self.columns, self._blocks.count, self._blocks.size, self._index_bytes)

    @property
    def _wire(self) -> tf.DType:
        return self.dtype if self.compressor.uncompressed else tf.as_dtype(self.compressor.wire_type)

    @property
    def _index_bytes(self) -> int:
        """Bytes of a row's number. The number `table` itself fits, too: it means no row."""
        return math.ceil(self.table.bit_length() / 8)

    @property
    def _value_bytes(self) -> int:
        """Bytes of a row's values.

        Raises:
            TypeError: Rows are not sent in this form.
        """
        if self._blocks is not None:
            return self._blocks.count * sum(part.nbytes for part in self._blocks.parts())
        if isinstance(self.compressor, Cast):
            return self.columns * self._wire.size
        raise TypeError(f"{self.compressor} is no form for rows")


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
