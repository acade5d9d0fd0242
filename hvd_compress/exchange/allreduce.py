"""Payloads that may be summed: one allreduce (ring: Thakur, Rabenseifner and Gropp 2005)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf


def allreduce_sum(
    part: tf.Tensor, process_set: Any, name: str | None, ignore_name_scope: bool = False
) -> tf.Tensor:
    """The sum of `part` over the ranks of `process_set`."""
    return hvd.allreduce(
        part, op=hvd.Sum, process_set=process_set, name=name, ignore_name_scope=ignore_name_scope
    )


def grouped_allreduce(
    tensors: Sequence[tf.Tensor], op: Any, predivide: float, process_set: Any, name: str | None
) -> list[tf.Tensor]:
    """Reduces uncompressed tensors of any dtypes; one negotiation per dtype.

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
    """What each rank of a ring sends to allreduce `nbytes`: 2 (n - 1) / n of them."""
    return round(2 * (ranks - 1) / ranks * nbytes)
