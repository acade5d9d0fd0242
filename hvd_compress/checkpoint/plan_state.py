"""What of a plan is saved: per variable and in its shape, so that it fits plans with other pieces and buckets."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from ..common.names import without_counters
from ..engine.grouping import TensorGroup
from ..engine.layout import Layout, PerTensorLayout
from ..engine.packing import pack, unpack
from ..engine.plan import Plan
from ..engine.reducer import Reducer
from ..engine.state import GroupState


class Member(NamedTuple):
    """One gradient of a plan; its position in the plan's list is what identifies it."""

    path: str  # of its variable, the counters that Keras puts into names included
    shape: tuple[int, ...]  # () for None
    kind: str  # "dense", "sparse" (IndexedSlices) or "none"

    @property
    def key(self) -> tuple[str, tuple[int, ...], str]:
        """What must be equal to be the same: `dense_1` here may be `dense` where fewer models were built."""
        return without_counters(self.path), self.shape, self.kind


@dataclasses.dataclass
class PlanState:
    """A rank's state of one plan.

    Attributes:
        members: The plan's gradients.
        tensors: For each field of `GroupState` (residuals, velocities) that is kept: arrays by the position
            of their gradient, in the variable's shape, float32 or bfloat16.
        padding: For the same fields: what lies between and after the gradients in each layout's pieces, 1-D.
            Never reaches a weight, but compressors see it; used only where the pieces are the same again.
        pieces: For each layout: positions of its gradients, number of pieces, shape of the first.
        named: `Plan.named`: state that is alike on all ranks.
    """

    members: list[Member]
    tensors: dict[str, dict[int, np.ndarray]]
    padding: dict[str, list[np.ndarray]]
    pieces: list[Any]
    named: dict[str, np.ndarray]

    def packed(self, prefix: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """As metadata, which JSON can hold, and arrays, whose names begin with `prefix`."""
        arrays = {f"{prefix}.named.{name}": array for name, array in self.named.items()}
        for field, tensors in self.tensors.items():
            arrays |= {f"{prefix}.{field}.{i}": tensor for i, tensor in tensors.items()}
            arrays |= {f"{prefix}.padding.{field}.{i}": p for i, p in enumerate(self.padding[field])}
        metadata = {
            "members": [list(member) for member in self.members],
            "tensors": {field: list(tensors) for field, tensors in self.tensors.items()},
            "pieces": self.pieces,
            "named": list(self.named),
        }
        return metadata, arrays

    @staticmethod
    def unpacked(prefix: str, metadata: dict[str, Any], arrays: dict[str, np.ndarray]) -> PlanState:
        """The inverse of `packed`."""
        fields = metadata["tensors"]
        layouts = range(len(metadata["pieces"]))
        return PlanState(
            [Member(path, tuple(shape), kind) for path, shape, kind in metadata["members"]],
            {f: {i: arrays[f"{prefix}.{f}.{i}"] for i in positions} for f, positions in fields.items()},
            {f: [arrays[f"{prefix}.padding.{f}.{i}"] for i in layouts] for f in fields},
            metadata["pieces"],
            {name: arrays[f"{prefix}.named.{name}"] for name in metadata["named"]},
        )


def state_of(plan: Plan) -> PlanState:
    """A copy of the plan's state on this rank, on the host."""
    tensors: dict[str, dict[int, np.ndarray]] = {}
    padding: dict[str, list[np.ndarray]] = {}
    with tf.init_scope(), tf.device("CPU"):
        for layout, state in _stateful_groups(plan):
            members = layout.tensors.members
            for field, variables in vars(state).items():
                outside = [np.zeros(0, np.float32)]
                if variables:
                    chunks = [variable.numpy() for variable in variables]
                    dtype = variables[0].dtype
                    constants = [tf.constant(chunk, dtype) for chunk in chunks]
                    of_members = unpack(layout, constants, [dtype] * len(members))
                    tensors.setdefault(field, {}).update((i, t.numpy()) for i, t in zip(members, of_members))
                    outside = [chunk[free] for chunk, free in zip(chunks, _free(layout))]
                padding.setdefault(field, []).append(np.concatenate(outside))
        named = {name: np.asarray(variable.numpy()) for name, variable in plan.replicated_state.items()}
    padding = {field: padding[field] for field in tensors}
    return PlanState(_members(plan), tensors, padding, _pieces(plan), named)


def restore(plan: Plan, state: PlanState) -> None:
    """Puts a state, of the same members, into a plan.

    Raises:
        ValueError: The plan keeps something else than what the state holds.
    """
    groups, replicated = _stateful_groups(plan), plan.replicated_state
    own = {
        (field, i)
        for layout, of_group in groups
        for field, variables in vars(of_group).items()
        if variables
        for i in layout.tensors.members
    }
    saved = {(field, i) for field, tensors in state.tensors.items() for i in tensors}
    for field, i in sorted(own ^ saved):
        where = "the checkpoint" if (field, i) in saved else "this run"
        raise ValueError(f"only {where} has {field} of {state.members[i].path}: use the settings of the save")
    if set(replicated) != set(state.named):
        raise ValueError(
            f"the checkpoint holds the state {sorted(state.named)}, and this run needs "
            f"{sorted(replicated)}: use the settings of the save"
        )
    same_chunks = state.pieces == _pieces(plan)
    with tf.init_scope(), tf.device("CPU"):
        for number, (layout, of_group) in enumerate(groups):
            for field, variables in vars(of_group).items():
                if not variables:
                    continue
                tensors = [tf.constant(state.tensors[field][i]) for i in layout.tensors.members]
                # Copies: the result of `pack` may be memory that is only read.
                chunks = [np.array(chunk) for chunk in pack(layout, tensors, range(len(variables)))]
                if same_chunks:
                    _fill_padding(chunks, _free(layout), state.padding[field][number])
                for variable, chunk in zip(variables, chunks):
                    variable.assign(tf.cast(chunk, variable.dtype))
        for variable in plan.state.has_foreign_residual.values():
            variable.assign(True)
        # What `auto` has learnt about other buckets, of another number of ranks, is learnt anew.
        anew = {name for name, variable in replicated.items() if variable.shape != state.named[name].shape}
        anew |= {"auto_known"} if "auto_choice" in anew else set()
        for name in set(replicated) - anew:
            replicated[name].assign(state.named[name])


def merged(states: Sequence[PlanState]) -> PlanState:
    """The state of a rank that takes over from several, or from none (`zeroed`) of an older set of ranks.

    Residuals and velocities are summed, in float32: over all ranks their sum stays the same. Padding is
    dropped; what is alike on all ranks is the first one's.
    """

    def total(arrays: Sequence[np.ndarray]) -> np.ndarray:
        return np.sum([a.astype(np.float32) for a in arrays], axis=0, dtype=np.float32).astype(
            arrays[0].dtype
        )

    first = states[0]
    tensors = {
        field: {i: total([state.tensors[field][i] for state in states]) for i in tensors}
        for field, tensors in first.tensors.items()
    }
    padding = {field: [np.zeros(0, np.float32) for _ in first.pieces] for field in tensors}
    return PlanState(first.members, tensors, padding, [None for _ in first.pieces], first.named)


def zeroed(state: PlanState) -> PlanState:
    """The state with zeros for residuals and velocities."""
    tensors = {f: {i: np.zeros_like(t) for i, t in held.items()} for f, held in state.tensors.items()}
    return dataclasses.replace(state, tensors=tensors)


def put(reducer: Reducer, states: Sequence[PlanState]) -> None:
    """Gives a reducer its state: to the plans it has, and the rest when it makes theirs."""
    plans = list(reducer.plans.values())
    reducer.pending = []
    for state in states:
        plan = next((plan for plan in plans if _fits(state, plan)), None)
        if plan is None:
            reducer.pending.append(state)
        else:
            plans.remove(plan)
            restore(plan, state)


def take_pending(reducer: Reducer, plan: Plan) -> None:
    """Puts into a new plan what was loaded for it.

    Raises:
        ValueError: Something was loaded, but for other gradients.
    """
    if not reducer.pending:
        return
    state = next((state for state in reducer.pending if _fits(state, plan)), None)
    if state is None:
        old, new = reducer.pending[0].members, _members(plan)
        pairs = zip(old, new)
        differing = next(
            (f": {a.path} {a.shape}, {b.path} {b.shape}" for a, b in pairs if a.key != b.key), ""
        )
        raise ValueError(
            f"the residuals that were loaded belong to other gradients ({len(old)}) than those of this step "
            f"({len(new)}){differing}: train the variables that were trained, or start without residuals"
        )
    restore(plan, state)
    reducer.pending.remove(state)


def _stateful_groups(plan: Plan) -> list[tuple[Layout, GroupState]]:
    """What has state to be saved: all parameter groups, and embeddings with a residual."""
    layout, state = plan.layout, plan.state
    groups: list[tuple[Layout, GroupState]] = [
        (group.layout, of_group) for group, of_group in zip(layout.param_groups, state.groups)
    ]
    for i, table, of_table in zip(layout.sparse, layout.embeddings, state.embeddings):
        if of_table.residuals:
            groups.append((PerTensorLayout(TensorGroup((i,), (table.shape,))), of_table))
    return groups


def _members(plan: Plan) -> list[Member]:
    layout = plan.layout
    kinds = [
        "sparse" if i in layout.sparse else "none" if dtype is None else "dense"
        for i, dtype in enumerate(layout.dtypes)
    ]
    return [Member(*member) for member in zip(layout.paths, layout.shapes, kinds)]


def _fits(state: PlanState, plan: Plan) -> bool:
    return [member.key for member in state.members] == [member.key for member in _members(plan)]


def _pieces(plan: Plan) -> list[Any]:
    layouts = [layout for layout, _ in _stateful_groups(plan)]
    return [[list(layout.tensors.members), len(layout.shapes), list(layout.shapes[0])] for layout in layouts]


def _free(layout: Layout) -> list[np.ndarray]:
    """For each chunk, which of its elements belong to no gradient; bool, in the chunk's shape."""
    ones = [tf.ones(shape) for shape in layout.tensors.shapes]
    return [chunk.numpy() == 0.0 for chunk in pack(layout, ones, range(len(layout.shapes)))]


def _fill_padding(pieces: Sequence[np.ndarray], free: Sequence[np.ndarray], padding: np.ndarray) -> None:
    """Puts `padding` (1-D) where no gradient lies, chunk after chunk, in place."""
    start = 0
    for chunk, where in zip(pieces, free):
        end = start + int(where.sum())
        chunk[where] = padding[start:end]
        start = end
