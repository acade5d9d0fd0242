"""Whose residuals a rank goes on with: copies for the neighbour, and what is done with them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from ...checkpoint import plan_state
from ...checkpoint.plan_state import PlanState

_WORD = 4  # bytes: counted in bytes, a large model's residuals would be too many for Horovod


class Shares(NamedTuple):
    """What becomes of the residuals of ranks that are gone."""

    heirs: dict[
        int, int
    ]  # the rank that goes on with them, by the rank that is gone; both as they were numbered
    lost: list[int]  # ranks whose residuals nobody has


def shares(ranks: int, present: Collection[int], copied: bool) -> Shares:
    """Of `ranks` ranks only those `present` are left; each one's copy, if there are any, is with the next one."""
    gone = [rank for rank in range(ranks) if rank not in present]
    heirs = {rank: (rank + 1) % ranks for rank in gone if copied and (rank + 1) % ranks in present}
    return Shares(heirs, [rank for rank in gone if rank not in heirs])


def exchange(states: Sequence[PlanState]) -> list[PlanState]:
    """Hands a copy of one's states to the next rank, and returns those of the rank before; a collective call.

    On the wire: all residuals once, uncompressed. Padding is left out: no gradient gets it.

    Raises:
        RuntimeError: The rank before has other states.
    """
    ranks = hvd.size()
    words = _joined(states)
    splits = np.zeros(ranks, np.int32)
    splits[(hvd.rank() + 1) % ranks] = len(words)
    with tf.device("CPU"):
        received, _ = hvd.alltoall(tf.constant(words), tf.constant(splits), name="hvdc_elastic_copies")
    return _taken_apart(received.numpy(), states)


def merged(states: Sequence[Sequence[PlanState]]) -> list[PlanState]:
    """The states of a rank that takes over from several, each a list of one for each plan; their sum."""
    return list(states[0]) if len(states) == 1 else [plan_state.merged(same) for same in zip(*states)]


def outline(states: Sequence[PlanState]) -> list[PlanState]:
    """The states without what differs from rank to rank: as small as the list of variables."""
    return [
        PlanState(
            state.members,
            {
                field: {i: np.empty(0, tensor.dtype) for i, tensor in held.items()}
                for field, held in state.tensors.items()
            },
            {field: [np.zeros(0, np.float32) for _ in state.pieces] for field in state.tensors},
            [None for _ in state.pieces],
            state.named,
        )
        for state in states
    ]


def zeros(outlines: Sequence[PlanState]) -> list[PlanState]:
    """The states of a rank that joins: nothing is owed, and what is alike on all ranks is as on the others."""
    found = []
    for state in outlines:
        tensors = {
            field: {i: np.zeros(state.members[i].shape, empty.dtype) for i, empty in held.items()}
            for field, held in state.tensors.items()
        }
        found.append(PlanState(state.members, tensors, state.padding, state.pieces, state.named))
    return found


def _joined(states: Sequence[PlanState]) -> np.ndarray:
    """All residuals end to end, as int32 [any number]."""
    raw = b"".join(
        np.ascontiguousarray(tensor).tobytes()
        for state in states
        for held in state.tensors.values()
        for tensor in held.values()
    )
    return np.frombuffer(raw + b"\0" * (-len(raw) % _WORD), np.int32)


def _taken_apart(words: np.ndarray, like: Sequence[PlanState]) -> list[PlanState]:
    """The inverse of `_joined`, for states of these shapes."""
    if len(words) != -(-_nbytes(like) // _WORD):
        raise RuntimeError(
            "elastic: the rank before has other residuals: commit on all ranks, after the same step"
        )
    raw, start, found = words.tobytes(), 0, []
    for state, outer in zip(like, outline(like)):
        tensors: dict[str, dict[int, Any]] = {}
        for field, held in state.tensors.items():
            tensors[field] = {}
            for i, own in held.items():
                tensors[field][i] = np.frombuffer(raw, own.dtype, own.size, start).reshape(own.shape)
                start += own.nbytes
        found.append(PlanState(state.members, tensors, outer.padding, outer.pieces, state.named))
    return found


def _nbytes(states: Sequence[PlanState]) -> int:
    return sum(t.nbytes for state in states for held in state.tensors.values() for t in held.values())
