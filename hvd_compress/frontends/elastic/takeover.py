"""Which rank takes over which residuals after a reset, and the copies that make this possible."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from ...checkpoint.plan_state import PlanState

_WORD = 4  # bytes of an int32; Horovod cannot count all residuals of a large model in bytes


def succession(ranks: int, present: Collection[int], copied: bool) -> tuple[dict[int, int], list[int]]:
    """Decides what happens to the residuals of ranks that are gone. All ranks have their old numbers.

    `ranks` is their old number, `present` are those that are left. If `copied`, each rank has sent a copy of its
    residuals to the next rank.

    Returns:
        By rank that is gone, the rank that takes over its residuals; and the ranks whose residuals are lost.
    """
    gone = [rank for rank in range(ranks) if rank not in present]
    heirs = {rank: (rank + 1) % ranks for rank in gone if copied and (rank + 1) % ranks in present}
    return heirs, [rank for rank in gone if rank not in heirs]


def exchange(states: Sequence[PlanState]) -> list[PlanState]:
    """Sends a copy of this rank's states to the next rank, and returns the states of the previous rank.

    A collective call. All residuals are sent once, uncompressed, without padding, which belongs to no gradient.

    Raises:
        RuntimeError: The previous rank's states have other sizes.
    """
    ranks = hvd.size()
    words = _serialized(states)
    splits = np.zeros(ranks, np.int32)
    splits[(hvd.rank() + 1) % ranks] = len(words)
    with tf.device("CPU"):
        received, _ = hvd.alltoall(tf.constant(words), tf.constant(splits), name="hvdc_elastic_copies")
    return _deserialized(received.numpy(), states)


def outline(states: Sequence[PlanState]) -> list[PlanState]:
    """The states with empty tensors, as small as the list of variables; `zeroed` makes those of a rank that joins."""
    return [state.mapped(lambda _, i, tensor: np.empty(0, tensor.dtype)) for state in states]


def _serialized(states: Sequence[PlanState]) -> np.ndarray:
    """The bytes of all residuals one after the other, as an int32 vector."""
    raw = b"".join(np.ascontiguousarray(tensor).tobytes() for state in states for tensor in state.arrays())
    return np.frombuffer(raw + b"\0" * (-len(raw) % _WORD), np.int32)


def _deserialized(words: np.ndarray, like: Sequence[PlanState]) -> list[PlanState]:
    """The inverse of `_serialized`: states with the shapes and dtypes of `like`."""
    sizes = [tensor.nbytes for state in like for tensor in state.arrays()]
    if len(words) != -(-sum(sizes) // _WORD):
        raise RuntimeError("elastic: the rank before has other residuals: commit on all ranks, after the same step")
    parts = iter(np.split(words.view(np.uint8), np.cumsum(sizes, dtype=np.int64)))
    return [state.mapped(lambda _, i, tensor: next(parts).view(tensor.dtype).reshape(tensor.shape)) for state in like]
