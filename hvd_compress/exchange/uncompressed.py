"""Gradients that are not compressed: Horovod's own allreduce."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import horovod.tensorflow as hvd
import tensorflow as tf

from ..traffic import ring_bytes as bytes_sent  # noqa: F401  (what each rank sends)
from .common import Group

# Tensors with fewer elements are joined: each of Horovod's own entries costs time on the host, whatever its size.
_SMALL = 2**14


class Dense(NamedTuple):
    """What came of it."""

    tensors: list[tf.Tensor]
    outgoing: list[tf.Tensor]  # what this rank sends
    incoming: list[tf.Tensor]  # the result of that, before it is taken apart


def reduce(tensors: Sequence[tf.Tensor], op: Any, predivide: float, group: Group) -> Dense:
    """Reduces tensors of static shapes and any dtypes; one negotiation per dtype.

    `predivide` splits the averaging, as Horovod's `gradient_predivide_factor`: 1 / predivide before
    the sum and predivide / size after it.
    """
    reduced: list[tf.Tensor] = list(tensors)
    outgoing: list[tf.Tensor] = []
    incoming: list[tf.Tensor] = []
    for dtype in sorted({tensor.dtype.name for tensor in tensors}):
        members = [i for i, tensor in enumerate(tensors) if tensor.dtype.name == dtype]
        small = [i for i in members if tensors[i].shape.num_elements() < _SMALL]
        large = [i for i in members if i not in small]
        sent = [tensors[i] for i in large]
        if small:
            sent.append(tf.concat([tf.reshape(tensors[i], [-1]) for i in small], 0))
        results = hvd.grouped_allreduce(
            sent,
            op=op,
            prescale_factor=1.0 / predivide if op == hvd.Average else 1.0,
            postscale_factor=predivide if op == hvd.Average else 1.0,
            **group.keywords(f"_{dtype}"),
        )
        results = [tf.ensure_shape(result, tensor.shape) for result, tensor in zip(results, sent)]
        outgoing += sent
        incoming += results
        if small:
            sizes = [tensors[i].shape.num_elements() for i in small]
            parts = tf.split(results.pop(), sizes)
            for i, part in zip(small, parts):
                reduced[i] = tf.reshape(part, tensors[i].shape)
        for i, result in zip(large, results):
            reduced[i] = result
    return Dense(reduced, outgoing, incoming)
