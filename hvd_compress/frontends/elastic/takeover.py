"""Which rank takes over which residuals after a reset, and the copies that make this possible."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from ...checkpoint import plan_state
from ...checkpoint.plan_state import PlanState

_WORD = 4  # bytes of an int32; Horovod cannot count all residuals of a large model in bytes


class Succession(NamedTuple):
    """What happens to the residuals of ranks that are gone. Ranks have their old numbers.

    Attributes:
        heirs: By rank that is gone, the rank that takes over its residuals.
        lost: Ranks whose residuals no rank has.
    """

    heirs: dict[int, int]
    lost: list[int]


def succession(ranks: int, present: Collection[int], copied: bool) -> Succession:
    """Decides which rank takes over from which.

    Args:
        ranks: The number of ranks before.
        present: Those that are left.
        copied: Whether each rank has sent a copy of its residuals to the next rank.
    """
    gone = [rank for rank in range(ranks) if rank not in present]
    heirs = {rank: (rank + 1) % ranks for rank in gone if copied and (rank + 1) % ranks in present}
    return Succession(heirs, [rank for rank in gone if rank not in heirs])


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


def merged(states: Sequence[Sequence[PlanState]]) -> list[PlanState]:
    """The sum of several ranks' states. Each rank has a list of states, one for each plan."""
    return list(states[0]) if len(states) == 1 else [plan_state.merged(of_plan) for of_plan in zip(*states)]


def outline(states: Sequence[PlanState]) -> list[PlanState]:
    """The states without their tensors, which differ from rank to rank: as small as the list of variables."""
    return [
        PlanState(
            state.members,
            {
                field: {i: np.empty(0, tensor.dtype) for i, tensor in by_index.items()}
                for field, by_index in state.tensors.items()
            },
            {field: [np.zeros(0, np.float32) for _ in state.chunk_layouts] for field in state.tensors},
            [None for _ in state.chunk_layouts],
            state.replicated_state,
        )
        for state in states
    ]


def zeros(outlines: Sequence[PlanState]) -> list[PlanState]:
    """The states of a rank that joins: residuals are zero, everything else is as in the outlines of another rank."""
    states = []
    for state in outlines:
        tensors = {
            field: {i: np.zeros(state.members[i].shape, empty.dtype) for i, empty in by_index.items()}
            for field, by_index in state.tensors.items()
        }
        states.append(PlanState(state.members, tensors, state.padding, state.chunk_layouts, state.replicated_state))
    return states


def _serialized(states: Sequence[PlanState]) -> np.ndarray:
    """The bytes of all residuals one after the other, as an int32 vector."""
    raw = b"".join(
        np.ascontiguousarray(tensor).tobytes()
        for state in states
        for by_index in state.tensors.values()
        for tensor in by_index.values()
    )
    return np.frombuffer(raw + b"\0" * (-len(raw) % _WORD), np.int32)


def _deserialized(words: np.ndarray, like: Sequence[PlanState]) -> list[PlanState]:
    """The inverse of `_serialized`: states with the shapes and dtypes of `like`."""
    if len(words) != -(-_nbytes(like) // _WORD):
        raise RuntimeError("elastic: the rank before has other residuals: commit on all ranks, after the same step")
    raw, start, states = words.tobytes(), 0, []
    for state, outer in zip(like, outline(like)):
        tensors: dict[str, dict[int, Any]] = {}
        for field, by_index in state.tensors.items():
            tensors[field] = {}
            for i, template in by_index.items():
                tensors[field][i] = np.frombuffer(raw, template.dtype, template.size, start).reshape(template.shape)
                start += template.nbytes
        states.append(PlanState(state.members, tensors, outer.padding, outer.chunk_layouts, state.replicated_state))
    return states


def _nbytes(states: Sequence[PlanState]) -> int:
    return sum(t.nbytes for state in states for by_index in state.tensors.values() for t in by_index.values())
