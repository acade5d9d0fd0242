"""Payloads that must not be summed: every rank gets every rank's, and sums what they decode to.

All ranks decode the same payloads in the same order, so their results are the same to the bit.
"""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf


def allgather(
    payload: tf.Tensor, process_set: Any, name: str | None, ignore_name_scope: bool = False
) -> tf.Tensor:
    """The payloads, uint8 [nbytes] on each rank, of all ranks in their order: [ranks, nbytes]."""
    gathered = hvd.allgather(
        payload[None, :], process_set=process_set, name=name, ignore_name_scope=ignore_name_scope
    )
    return tf.ensure_shape(gathered, [process_set.size(), payload.shape[0]])


def bytes_sent(nbytes: int, ranks: int) -> int:
    """What each rank of a ring sends to allgather payloads of `nbytes`: n - 1 of them."""
    return (ranks - 1) * nbytes
