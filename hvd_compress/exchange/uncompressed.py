"""Gradients that are not compressed: Horovod's own allreduce."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from .allreduce import ring_bytes


def reduce(
    tensors: Sequence[tf.Tensor], op: Any, predivide: float, process_set: Any, name: str | None
) -> list[tf.Tensor]:
    """Reduces tensors of any dtypes; one negotiation per dtype.

    `predivide` splits the averaging, as Horovod's `gradient_predivide_factor`: 1 / predivide before
    the sum and predivide / size after it.
    """
    reduced: list[tf.Tensor] = list(tensors)
    for dtype in sorted({tensor.dtype.name for tensor in tensors}):
        members = [i for i, tensor in enumerate(tensors) if tensor.dtype.name == dtype]
        results = hvd.grouped_allreduce(
            [tensors[i] for i in members],
            op=op,
            prescale_factor=1.0 / predivide if op == hvd.Average else 1.0,
            postscale_factor=predivide if op == hvd.Average else 1.0,
            process_set=process_set,
            name=f"{name}_{dtype}" if name else None,
        )
        for i, result in zip(members, results):
            reduced[i] = result
    return reduced


def bytes_sent(nbytes: int, ranks: int) -> int:
    """What each rank of a ring sends to reduce `nbytes`."""
    return ring_bytes(nbytes, ranks)
