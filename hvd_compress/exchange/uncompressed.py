"""Gradients that are not compressed: Horovod's own allreduce."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import horovod.tensorflow as hvd
import tensorflow as tf

from .. import residual
from .allreduce import ring_bytes

# Tensors with fewer elements are joined: each of Horovod's own entries costs time on the host, whatever its size.
_SMALL = 2**14


class Dense(NamedTuple):
    """What came of it."""

    tensors: list[tf.Tensor]
    finite: tf.Tensor  # bool scalar: whether no element of the result is infinite or NaN
    outgoing: list[tf.Tensor]  # what this rank sends


def reduce(
    tensors: Sequence[tf.Tensor], op: Any, predivide: float, process_set: Any, name: str | None
) -> Dense:
    """Reduces tensors of static shapes and any dtypes; one negotiation per dtype.

    `predivide` splits the averaging, as Horovod's `gradient_predivide_factor`: 1 / predivide before
    the sum and predivide / size after it.
    """
    reduced: list[tf.Tensor] = list(tensors)
    checks: list[tf.Tensor] = []
    outgoing: list[tf.Tensor] = []
    for dtype in sorted({tensor.dtype.name for tensor in tensors}):
        members = [i for i, tensor in enumerate(tensors) if tensor.dtype.name == dtype]
        small = [i for i in members if tensors[i].shape.num_elements() < _SMALL]
        sent = [tensors[i] for i in members if i not in small]
        if small:
            sent.append(tf.concat([tf.reshape(tensors[i], [-1]) for i in small], 0))
        results = hvd.grouped_allreduce(
            sent,
            op=op,
            prescale_factor=1.0 / predivide if op == hvd.Average else 1.0,
            postscale_factor=predivide if op == hvd.Average else 1.0,
            process_set=process_set,
            name=f"{name}_{dtype}" if name else None,
        )
        results = [tf.ensure_shape(result, tensor.shape) for result, tensor in zip(results, sent)]
        checks += [residual.all_finite(result) for result in results if result.dtype.is_floating]
        outgoing += sent
        if small:
            sizes = [tensors[i].shape.num_elements() for i in small]
            parts = tf.split(results.pop(), sizes)
            for i, part in zip(small, parts):
                reduced[i] = tf.reshape(part, tensors[i].shape)
        for i, result in zip((i for i in members if i not in small), results):
            reduced[i] = result
    finite = tf.reduce_all(tf.stack(checks)) if checks else tf.constant(True)
    return Dense(reduced, finite, outgoing)


def bytes_sent(nbytes: int, ranks: int) -> int:
    """What each rank of a ring sends to reduce `nbytes`."""
    return ring_bytes(nbytes, ranks)
