"""The base class of the compressors of `hvdc.Compression`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ..formats.base import Format, Shape
from ..kernels import native
from . import error_feedback as feedback
from .base import Compressor, Encoded, Seeds, as_float32, no_seeds
from .payload import Payload, join, split, take

_NOISE = 2**16  # elements of noise for an estimate


class BuiltinCompressor(Format, Compressor):
    """A compressor whose format states its arguments and sizes.

    A subclass defines `_encode_chunk`, which `encode` calls, and `decode_sum`. The context of what it encodes is the
    tensor's shape, or a tuple that begins with it.
    """

    pure = True

    def layout(self, shape: Shape) -> list[tf.TensorSpec]:
        """The static shapes and dtypes of the parts that `encode` returns for a tensor of this shape."""
        return [tf.TensorSpec(part.shape, part.dtype) for part in self.parts(shape)]

    def noise_loss(self, shapes: Sequence[Shape]) -> float:
        """The share of the energy of white noise that is lost, as the format estimates it: no kernel is compiled."""
        return self.estimated_noise_loss(np.random.default_rng(0).standard_normal(_NOISE))

    def encode(
        self,
        gradient: tf.Tensor,
        seeds: Seeds,
        residual: tf.Tensor | None = None,
        decay: float = 1.0,
        keep: bool = False,
    ) -> Encoded:
        """Encodes gradient + decay * residual, see `Compressor.encode`."""
        native_format = native.in_use(self.native_format)
        if native_format is None:
            return super().encode(gradient, seeds, residual, decay, keep)
        shape = tuple(gradient.shape.as_list())
        payload, residuals, finite = native.encode(
            native_format, self.wire_bytes(shape), [[gradient]], [residual], decay, keep, seeds.local, seeds.chunk
        )
        return Encoded(take(payload, [self.layout(shape)])[0], shape, residuals[0] if keep else None, finite)

    def decode(self, parts: Sequence[tf.Tensor], ctx: Any) -> tf.Tensor:
        """Decodes one rank's parts to float32."""
        native_format = native.in_use(self.native_format)
        if native_format is None:
            return self.decode_sum([parts], ctx, tf.constant(1.0))
        return native.decode(native_format, self.wire_bytes(ctx), [join(parts)], [ctx], tf.constant(1.0))[0]

    def compress(self, tensor: tf.Tensor) -> tuple[Any, Any]:
        """Compresses a float tensor of static shape.

        Args:
            tensor: float16, bfloat16, float32 or float64, of any shape.

        Returns:
            The payload and the context for `decompress`.

        Raises:
            TypeError: The tensor does not hold real floating point numbers.
            ValueError: Its shape is not static.
        """
        x, shape, dtype = as_float32(tensor, self.spec)
        if math.prod(shape):
            parts, ctx, _, _ = self.encode(x, no_seeds())
        else:
            parts, ctx = [tf.zeros([0], tf.float32 if self.summable else tf.uint8)], None
        payload = parts[0] if self.summable else Payload(join(parts), self.spec)
        return payload, (ctx, shape, dtype)

    def decompress(self, payload: Any, ctx: Any) -> tf.Tensor:
        """Returns the lossy tensor, in the shape and dtype of the original.

        Raises:
            TypeError: It is not a payload.
            ValueError: The payload's length does not match the context; or, in eager mode, its indices lie outside
                the tensor. (In a graph, the whole result is NaN then.)
        """
        inner, shape, dtype = ctx
        if math.prod(shape) == 0:
            return tf.zeros(shape, dtype)
        if self.summable:
            parts = [tf.convert_to_tensor(payload)]
        else:
            parts = split(getattr(payload, "tensor", payload), self.layout(shape))
        decoded = self.decode(parts, inner)
        if tf.executing_eagerly() and _is_damaged(parts, decoded):
            raise ValueError(
                f"a payload of {self.spec} cannot be decoded: its indices are not those of a tensor of shape {shape}; "
                "it is damaged, or was made by another compressor, for another shape or of what was not finite"
            )
        return tf.cast(tf.reshape(decoded, shape), dtype)


def _is_damaged(parts: Sequence[tf.Tensor], decoded: tf.Tensor) -> bool:
    """Whether finite values decode to NaN, as they do if an index is invalid."""
    floats = [part for part in parts if part.dtype.is_floating]
    if len(floats) == len(parts) or not tf.math.is_nan(tf.reshape(decoded, [-1])[0]):
        return False
    return all(bool(feedback.all_finite(part)) for part in floats)
