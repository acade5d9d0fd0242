"""Gradients that are not compressed: Horovod's own allreduce."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import horovod.tensorflow as hvd
import tensorflow as tf

from ..common.gradients import with_values
from .group import Group
from .volume import ring_bytes as bytes_sent  # noqa: F401  (what each rank sends)

# Tensors with fewer elements are joined, because each tensor costs Horovod time on the host, whatever its size.
_SMALL = 2**14


class Dense(NamedTuple):
    """The result of an uncompressed reduction."""

    tensors: list[tf.Tensor]  # reduced
    outgoing: list[tf.Tensor]  # what this rank sends
    incoming: list[tf.Tensor]  # the sums of these, before they are taken apart


def reduce(tensors: Sequence[tf.Tensor], op: Any, predivide: float, group: Group) -> Dense:
    """Reduces tensors of static shapes and of the dtypes in `checks.REDUCIBLE`, with one collective for each dtype.

    `predivide` splits the averaging, as Horovod's `gradient_predivide_factor` does: 1 / predivide before the sum and
    predivide / size after it. It is 1 with other operations.
    """
    dtypes = [tensor.dtype for tensor in tensors]
    tensors = [wide(tensor) for tensor in tensors]
    reduced: list[tf.Tensor] = list(tensors)
    outgoing: list[tf.Tensor] = []
    incoming: list[tf.Tensor] = []
    for dtype in sorted({tensor.dtype.name for tensor in tensors}):
        members = [i for i, tensor in enumerate(tensors) if tensor.dtype.name == dtype]
        small = [i for i in members if tensors[i].shape.num_elements() < _SMALL]
        large = [i for i in members if tensors[i].shape.num_elements() >= _SMALL]
        sent = [tensors[i] for i in large]
        same_shape: dict[tuple[int, ...], list[int]] = {}
        for i in small:
            same_shape.setdefault(tuple(tensors[i].shape), []).append(i)
        if small:
            # One operation for each shape, not for each tensor: TensorFlow takes minutes to prepare a graph of 10,000.
            stacks = [tf.reshape(tf.stack([tensors[i] for i in indices]), [-1]) for indices in same_shape.values()]
            sent.append(tf.concat(stacks, 0))
        results = hvd.grouped_allreduce(
            sent,
            op=op,
            prescale_factor=1.0 / predivide,
            postscale_factor=predivide,
            **group.keywords(f"_{dtype}"),
        )
        results = [tf.ensure_shape(result, tensor.shape) for result, tensor in zip(results, sent)]
        outgoing += sent
        incoming += results
        if small:
            parts = tf.split(results.pop(), [len(indices) * math.prod(shape) for shape, indices in same_shape.items()])
            for part, (shape, indices) in zip(parts, same_shape.items()):
                for i, tensor in zip(indices, tf.unstack(tf.reshape(part, [len(indices), *shape]))):
                    reduced[i] = tensor
        for i, result in zip(large, results):
            reduced[i] = result
    reduced = [of_dtype(tensor, dtype) for tensor, dtype in zip(reduced, dtypes)]
    return Dense(reduced, outgoing, incoming)


def wide(tensor: Any) -> Any:
    """A tensor or IndexedSlices; as float32 if it is bfloat16, which Horovod cannot reduce."""
    return of_dtype(tensor, tf.float32) if tensor.dtype == tf.bfloat16 else tensor


def size_sent(dtype: tf.DType) -> int:
    """The bytes of an element when it is sent, see `wide`."""
    return tf.float32.size if dtype == tf.bfloat16 else dtype.size


def of_dtype(tensor: Any, dtype: tf.DType) -> Any:
    """A tensor or IndexedSlices in this dtype."""
    return tensor if tensor.dtype == dtype else with_values(tensor, lambda values: tf.cast(values, dtype))
