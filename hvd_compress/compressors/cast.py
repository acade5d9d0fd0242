"""Casts to 16-bit floats, and no compression."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from .. import formats
from ..formats.base import Shape
from ..kernels.compile import Terms, compiled, fed_back
from ..kernels.native import NativeFormat
from .base import ChunkInput, Compressor, Encoded
from .builtin import BuiltinCompressor
from .payload import WideSum
from .registry import register


class _Cast(formats.cast.Cast, BuiltinCompressor):
    """Sends each value as `wire_type`, without error feedback."""

    error_feedback = False

    @property
    def native_format(self) -> NativeFormat | None:
        """Native operations cast to 16 bits."""
        return None if self.uncompressed else NativeFormat(self.name)

    def for_rows(self) -> Compressor:
        """The same: rows are cast like dense gradients."""
        return self

    def compress(self, tensor: tf.Tensor) -> tuple[Any, Any]:
        """Casts a floating point tensor of any shape, as Horovod's do; others pass unchanged."""
        tensor = tf.convert_to_tensor(tensor)
        return (tf.cast(tensor, self.wire_type) if tensor.dtype.is_floating else tensor), tensor.dtype

    def decompress(self, payload: Any, ctx: Any) -> tf.Tensor:
        """Casts back to the original dtype."""
        return tf.cast(payload, ctx)

    def _encode_chunk(self, chunk: ChunkInput) -> Encoded:
        part, new_residual, finite = _cast(chunk.terms(), self.wire_type, chunk.keep)
        return Encoded([part], chunk.shape, new_residual, finite)

    def decode_sum(self, ranks: Sequence[Sequence[tf.Tensor]], ctx: Shape, scale: tf.Tensor) -> tf.Tensor:
        """Casts back and sums in one pass."""
        return _decode_sum([list(parts) for parts in ranks], ctx, scale)


@compiled
def _cast(terms: Terms, dtype: str, keep: bool) -> tuple[tf.Tensor, tf.Tensor | None, tf.Tensor]:
    x = fed_back(*terms)
    part = tf.cast(x, dtype)
    new_residual = x - tf.cast(part, tf.float32) if keep else None
    return tf.reshape(part, [-1]), new_residual, tf.reduce_all(tf.math.is_finite(x))


@compiled
def _decode_sum(ranks: Sequence[Sequence[tf.Tensor]], shape: Shape, scale: tf.Tensor) -> tf.Tensor:
    total = tf.cast(ranks[0][0], tf.float32)
    for (part,) in ranks[1:]:
        total += tf.cast(part, tf.float32)
    return tf.reshape(total * scale, shape)


@register
@dataclasses.dataclass(frozen=True)
class NoCompression(formats.NoCompression, _Cast):
    """Sends gradients uncompressed.

    Wire size: n times the size of the dtype (4 bytes for float32). Error: none.
    """

    def compress(self, tensor: tf.Tensor) -> tuple[Any, Any]:
        """Returns the tensor unmodified."""
        return tensor, None

    def decompress(self, payload: Any, ctx: Any) -> tf.Tensor:
        """Returns the payload unmodified."""
        return payload


def compressed_rows(compressors: Sequence[Compressor]) -> list[Compressor]:
    """The compressors' compressors for rows, without those that do not compress."""
    of_rows = [compressor.for_rows() for compressor in compressors]
    return [compressor for compressor in of_rows if not compressor.uncompressed]


def most_precise_rows(compressors: Sequence[Compressor]) -> Compressor:
    """Of the compressors for rows, the one with the most bits per value below 32; no compression if there is none."""
    return max(compressed_rows(compressors), key=lambda compressor: compressor.value_bits, default=NoCompression())


@register
@dataclasses.dataclass(frozen=True)
class Float16(formats.Float16, _Cast):
    """Casts to IEEE 754 half precision.

    Wire size: 2 n bytes. Error: |error| <= 2**-11 |x| for 2**-14 <= |x| <= 65504 (IEEE 754-2019,
    table 3.5: 11 bits of precision); larger values overflow to infinity, as in Horovod's fp16.
    """


@register
@dataclasses.dataclass(frozen=True)
class BFloat16(formats.BFloat16, _Cast):
    """Casts to bfloat16: float32's range, 8 bits of precision.

    Wire size: 2 n bytes (in stock Horovod, which has no bfloat16 op, 4 n). Error:
    |error| <= 2**-8 |x| (Kalamkar et al. 2019, arXiv 1905.12322).
    """

    def compress(self, tensor: tf.Tensor) -> tuple[Any, Any]:
        """Casts. Stock Horovod, which has no bfloat16 operation, sums the payload as float32."""
        payload, ctx = super().compress(tensor)
        return (WideSum(payload) if payload.dtype == tf.bfloat16 else payload), ctx

    def decompress(self, payload: Any, ctx: Any) -> tf.Tensor:
        """Casts back to the original dtype."""
        return super().decompress(getattr(payload, "tensor", payload), ctx)
