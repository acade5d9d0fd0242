"""The one tensor that is sent: the parts of an encoding, joined into a vector of bytes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ..common.error_text import error_text

# TensorFlow shares memory between a tensor and parts of it that begin at multiples of so many bytes.
_ALIGNED = 64
# Up to this many bytes, a copy takes less time than the operations that would avoid it.
_SMALL = 2**20
_WORD = tf.float32


class Payload:
    """What a compressor's `compress` returns when its codes must not be summed.

    Stock Horovod sums the results of `compress`. Summed codes are garbage, so a payload refuses to
    become a tensor. `hvdc.allreduce` and `hvdc.DistributedOptimizer` decode it before they sum.

    Attributes:
        tensor: The encoded bytes, uint8 [nbytes].
        compressor: The compressor's spec string.
    """

    name = "hvd_compress_payload"  # stock Horovod names its op after the tensor

    def __init__(self, tensor: tf.Tensor, compressor: str) -> None:
        self.tensor = tensor
        self.compressor = compressor

    @property
    def nbytes(self) -> int:
        """The number of bytes on the wire."""
        return int(self.tensor.shape[0])

    def __len__(self) -> int:
        return self.nbytes

    def __repr__(self) -> str:
        return f"<Payload of {self.compressor}, {self.nbytes} bytes>"

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        raise TypeError(
            f"a payload of {self.compressor} holds packed codes, which stock Horovod would sum to "
            "garbage: use hvdc.allreduce(tensor, compression=...) or hvdc.DistributedOptimizer instead"
        )


class WideSum:
    """A bfloat16 tensor that becomes float32 in stock Horovod, whose operations do not take bfloat16."""

    def __init__(self, tensor: tf.Tensor) -> None:
        self.tensor = tensor

    @property
    def dtype(self) -> tf.DType:
        """bfloat16."""
        return self.tensor.dtype

    @property
    def shape(self) -> tf.TensorShape:
        """The tensor's shape."""
        return self.tensor.shape

    @property
    def nbytes(self) -> int:
        """The number of bytes on the wire when this package sends it."""
        return math.prod(self.shape.as_list()) * self.dtype.size

    @property
    def name(self) -> str:
        """The name that stock Horovod derives its operation's name from."""
        return str(self.tensor.name)

    def numpy(self) -> Any:
        """The values, as a NumPy array of bfloat16."""
        return self.tensor.numpy()

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        wide = tf.cast(self.tensor, tf.float32)
        return wide if dtype in (None, tf.float32) else tf.cast(self.tensor, dtype)


def nbytes(specs: Sequence[tf.TensorSpec]) -> int:
    """The size in bytes of tensors of these static shapes and dtypes, joined."""
    return sum(math.prod(spec.shape.as_list()) * spec.dtype.size for spec in specs)


def join(parts: Sequence[tf.Tensor]) -> tf.Tensor:
    """Joins tensors of any dtypes into one flat uint8 tensor."""
    flat = [_to_bytes(part) for part in parts]
    return flat[0] if len(flat) == 1 else tf.concat(flat, 0)


def split(payload: tf.Tensor, specs: Sequence[tf.TensorSpec]) -> list[tf.Tensor]:
    """The inverse of `join`: splits uint8 `payload` [nbytes] into tensors as `specs` describe them.

    Raises:
        TypeError: `payload` is not a uint8 vector.
        ValueError: Its length does not match `specs` (tf.errors.InvalidArgumentError if the length is known only when
            a graph runs).
    """
    expected = nbytes(specs)
    if (
        not isinstance(payload, (tf.Tensor, tf.Variable))
        or payload.dtype != tf.uint8
        or payload.shape.rank not in (1, None)
    ):
        raise TypeError(f"a payload must hold a vector of bytes (uint8), got {error_text(payload)}")
    if not payload.shape.is_fully_defined():
        payload = tf.ensure_shape(payload, [expected])
    if payload.shape[0] != expected:
        raise ValueError(
            f"a payload of {payload.shape[0]} bytes cannot be decoded: {expected} are expected; it is "
            "damaged, or was made by another compressor or for another shape"
        )
    return take(payload, [specs])[0]


def take(payload: tf.Tensor, layouts: Sequence[Sequence[tf.TensorSpec]]) -> list[list[tf.Tensor]]:
    """The parts of each chunk in uint8 `payload` [nbytes], which holds those of the first chunk, the second, and so on.

    Parts that begin and end at multiples of 64 bytes are not copied, unless the payload is small.
    """
    specs = [spec for layout in layouts for spec in layout]
    sizes = [nbytes([spec]) for spec in specs]
    begins = [0, *itertools.accumulate(sizes)]
    unit = _WORD.size if payload.shape[0] <= _SMALL else _ALIGNED
    if all(size % unit == 0 for size in (*sizes, payload.shape[0])):
        # One operation, because each operation costs time even in a branch that is not executed. Words, because
        # TensorFlow cannot split bytes on a GPU.
        words = tf.bitcast(tf.reshape(payload, [-1, _WORD.size]), _WORD)
        rest = payload.shape[0] - begins[-1]
        vectors = tf.split(words, [size // _WORD.size for size in (*sizes, rest)])
    else:
        vectors = [tf.strided_slice(payload, [a], [b], [1]) for a, b in zip(begins, begins[1:])]
    parts = iter([_as_spec(vector, spec) for vector, spec in zip(vectors, specs)])
    return [[next(parts) for _ in layout] for layout in layouts]


def _to_bytes(part: tf.Tensor) -> tf.Tensor:
    if part.dtype == tf.bool:
        part = tf.cast(part, tf.uint8)
    if part.dtype != tf.uint8:
        part = tf.bitcast(part, tf.uint8)
    return tf.reshape(part, [-1])


def _as_spec(vector: tf.Tensor, spec: tf.TensorSpec) -> tf.Tensor:
    """A vector's memory as a tensor of this shape and dtype."""
    shape, dtype = spec.shape.as_list(), tf.uint8 if spec.dtype == tf.bool else spec.dtype
    if vector.dtype.size < dtype.size:
        vector = tf.reshape(vector, [*shape, dtype.size // vector.dtype.size])
    if vector.dtype != dtype:
        vector = tf.bitcast(vector, dtype)
    if vector.shape != spec.shape:
        vector = tf.reshape(vector, shape)
    return vector if dtype == spec.dtype else tf.cast(vector, spec.dtype)
