"""The state of a plan that is saved.

It is saved per variable, in the variable's shape, so that plans with other chunks and buckets can load it.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from ..common.error_text import error_text
from ..common.names import renumbered
from ..engine import agreement
from ..engine.grouping import TensorGroup
from ..engine.layout import Layout, PerTensorLayout
from ..engine.packing import pack, unpack
from ..engine.plan import Plan
from ..engine.reducer import Reducer
from ..engine.state import GroupState


class Member(NamedTuple):
    """One gradient of a plan. Its position in the plan's list identifies it."""

    path: str  # of its variable, including the counters that Keras puts into names
    shape: tuple[int, ...]  # () if the gradient is None
    kind: str  # "dense", "sparse" (IndexedSlices), "none", or "own" if it is a variable and not a gradient


@dataclasses.dataclass
class PlanState:
    """One rank's state of one plan.

    Attributes:
        members: The plan's gradients.
        tensors: For each saved field of `GroupState` (residuals, velocities): arrays by the position of their
            gradient, in the variable's shape, float32 or bfloat16. Local steps save variables instead: "weights", and
            "slots" of the inner optimizer.
        padding: For the same fields and each layout: the elements of its chunks that belong to no gradient, 1-D.
            Padding never reaches a weight, but compressors see it. It is restored only into the same chunks.
        chunk_layouts: For each layout: the positions of its gradients, the number of chunks, the first chunk's
            shape. None if padding should not be restored.
        replicated_state: The values of `Plan.replicated_state`, which are equal on all ranks.
        waiting: With a delay, what waits for the next step, by names that include the rank: payloads of buckets, and
            uncompressed gradients. It is restored only on the same rank of as many ranks, into the same buckets.
    """

    members: list[Member]
    tensors: dict[str, dict[int, np.ndarray]]
    padding: dict[str, list[np.ndarray]]
    chunk_layouts: list[Any]
    replicated_state: dict[str, np.ndarray]
    waiting: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)

    def packed(self, prefix: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Returns metadata for JSON, and arrays whose names begin with `prefix`. Checkpoints contain both."""
        arrays = {f"{prefix}.named.{name}": array for name, array in self.replicated_state.items()}
        for field, tensors in self.tensors.items():
            arrays |= {f"{prefix}.{field}.{i}": tensor for i, tensor in tensors.items()}
            arrays |= {f"{prefix}.padding.{field}.{i}": p for i, p in enumerate(self.padding[field])}
        arrays |= {f"{prefix}.waiting.{name}": array for name, array in self.waiting.items()}
        metadata = {
            "members": [list(member) for member in self.members],
            "tensors": {field: list(tensors) for field, tensors in self.tensors.items()},
            "pieces": self.chunk_layouts,
            "named": list(self.replicated_state),
            "waiting": list(self.waiting),
        }
        return metadata, arrays

    def arrays(self) -> list[np.ndarray]:
        """All tensors, in the order of fields and positions."""
        return [tensor for tensors in self.tensors.values() for tensor in tensors.values()]

    def mapped(self, change: Callable[[str, int, np.ndarray], np.ndarray]) -> PlanState:
        """The state without padding and what waits, with `change(field, position, tensor)` in place of each tensor."""
        tensors = {f: {i: change(f, i, tensor) for i, tensor in of_f.items()} for f, of_f in self.tensors.items()}
        padding = {field: [np.zeros(0, np.float32) for _ in self.chunk_layouts] for field in tensors}
        return PlanState(self.members, tensors, padding, [None for _ in self.chunk_layouts], self.replicated_state)

    @property
    def summary(self) -> Any:
        """What must be equal on all ranks, or they would exchange different things."""
        fields = {f: sorted((i, t.dtype.name) for i, t in tensors.items()) for f, tensors in self.tensors.items()}
        padding = {f: [(part.shape, part.dtype.name) for part in parts] for f, parts in self.padding.items()}
        values = {name: _summary(name, array) for name, array in self.replicated_state.items()}
        return _keys(self.members), fields, padding, self.chunk_layouts, values

    def check(self) -> None:
        """Raises ValueError if a tensor does not belong to its member, or a value cannot be of a training.

        What waits under a delay may hold values that are not finite: the next step then finds them.
        """
        for member in self.members:
            if not isinstance(member.path, str):
                raise ValueError(f"{error_text(member.path)} is not the path of a variable")
        for name, array in (self.replicated_state | self.waiting).items():
            _check_numeric(name, array)
        for field, parts in self.padding.items():
            for part in parts:
                if part.ndim != 1:
                    raise ValueError(f"the padding of {field} has the shape {part.shape}, and must have one dimension")
                _check_finite(f"the padding of {field}", part)
        for field, tensors in self.tensors.items():
            for i, tensor in tensors.items():
                if not 0 <= i < len(self.members) or tensor.shape != self.members[i].shape:
                    raise ValueError(f"{field} {i} has the shape {tensor.shape}, which is not its gradient's")
                check = _check_numeric if self.members[i].kind == "own" else _check_finite
                check(f"{field} of {self.members[i].path}", tensor)
        step = self.replicated_state.get("step", np.array(0))
        if step.shape != () or step.dtype.kind not in "iu" or step < 0:
            raise ValueError(f"the number of steps is {step.tolist()!r}")

    @staticmethod
    def names(plans: Sequence[dict[str, Any]]) -> list[str]:
        """The names of the arrays that `packed` returned with these metadata; the prefixes were 0, 1 and so on."""
        return [
            f"{prefix}.{name}"
            for prefix, plan in enumerate(plans)
            for name in (
                *(f"named.{name}" for name in plan["named"]),
                *(f"{field}.{i}" for field, positions in plan["tensors"].items() for i in positions),
                *(f"padding.{field}.{i}" for field in plan["tensors"] for i in range(len(plan["pieces"]))),
                *(f"waiting.{name}" for name in plan.get("waiting", [])),
            )
        ]

    @staticmethod
    def unpacked(prefix: str, metadata: dict[str, Any], arrays: dict[str, np.ndarray]) -> PlanState:
        """The inverse of `packed`."""
        fields = metadata["tensors"]
        layouts = range(len(metadata["pieces"]))
        replicated = {name: arrays[f"{prefix}.named.{name}"] for name in metadata["named"]}
        if "auto_choice" in replicated:  # before there was `auto_rows`, `auto` compressed all rows
            replicated.setdefault("auto_rows", np.array(True))
        return PlanState(
            [Member(path, tuple(shape), kind) for path, shape, kind in metadata["members"]],
            {f: {i: arrays[f"{prefix}.{f}.{i}"] for i in positions} for f, positions in fields.items()},
            {f: [arrays[f"{prefix}.padding.{f}.{i}"] for i in layouts] for f in fields},
            metadata["pieces"],
            replicated,
            {name: arrays[f"{prefix}.waiting.{name}"] for name in metadata.get("waiting", [])},
        )


def state_of(plan: Plan) -> PlanState:
    """Copies the plan's state on this rank to the host."""
    tensors: dict[str, dict[int, np.ndarray]] = {}
    padding: dict[str, list[np.ndarray]] = {}
    chunk_layouts = _chunk_layouts(plan)
    with tf.init_scope(), tf.device("CPU"):
        for number, layout, field, variables in _saved_variables(plan):
            members, dtype = layout.tensors.members, variables[0].dtype
            chunks = [variable.numpy() for variable in variables]
            unpacked = unpack(layout, [tf.constant(chunk, dtype) for chunk in chunks], [dtype] * len(members))
            tensors.setdefault(field, {}).update((i, t.numpy()) for i, t in zip(members, unpacked))
            paddings = [chunk[is_padding] for chunk, is_padding in zip(chunks, _is_padding(layout))]
            padding.setdefault(field, [np.zeros(0, np.float32)] * len(chunk_layouts))[number] = np.concatenate(paddings)
        named = {name: np.asarray(variable.numpy()) for name, variable in plan.replicated_state.items()}
        waiting = {name: np.asarray(variable.numpy()) for name, variable in _waiting(plan).items()}
    return PlanState(_members(plan), tensors, padding, chunk_layouts, named, waiting)


def restore(plan: Plan, state: PlanState) -> bool:
    """Restores a state into a plan with the same members.

    Returns:
        Whether what waits was restored, too, if anything may wait. All ranks must do the same, or weights would part.

    Raises:
        ValueError: The plan does not keep the same fields as the state.
    """
    own_variables, replicated = _saved_variables(plan), plan.replicated_state
    own = {(field, i) for _, layout, field, _ in own_variables for i in layout.tensors.members}
    saved = {(field, i) for field, tensors in state.tensors.items() for i in tensors}
    for field, i in sorted(own ^ saved):
        where = "the checkpoint" if (field, i) in saved else "this run"
        raise ValueError(f"only {where} has {field} of {state.members[i].path}: use the settings of the save")
    anew = _begins_anew(replicated, state.replicated_state)
    if set(replicated) - anew != set(state.replicated_state) - anew:
        raise ValueError(
            f"the checkpoint holds the state {sorted(state.replicated_state)}, and this run needs "
            f"{sorted(replicated)}: use the settings of the save"
        )
    same_chunks = state.chunk_layouts == _chunk_layouts(plan)
    with tf.init_scope(), tf.device("CPU"):
        for number, layout, field, variables in own_variables:
            tensors = [tf.constant(state.tensors[field][i]) for i in layout.tensors.members]
            # Copied: the results of `pack` may be read-only.
            chunks = [np.array(chunk) for chunk in pack(layout, tensors, range(len(variables)))]
            if same_chunks:
                _fill_padding(chunks, layout, state.padding[field][number])
            for variable, chunk in zip(variables, chunks):
                variable.assign(tf.cast(chunk, variable.dtype))
        for variable in plan.state.has_foreign_residual.values():
            variable.assign(True)
        waiting = _waiting(plan)
        kinds = [{name: (tuple(v.shape), v.dtype) for name, v in own.items()} for own in (waiting, state.waiting)]
        goes_on = not waiting or (same_chunks and kinds[0] == kinds[1])
        if goes_on:
            for name, variable in waiting.items():
                variable.assign(state.waiting[name])
        else:
            plan.let_nothing_wait()
        for name in set(replicated) - anew:
            replicated[name].assign(state.replicated_state[name])
    if plan.auto is not None:
        plan.auto.restored("auto_choice" not in anew)
    if plan.delay_selector is not None:
        plan.delay_selector.restored()
    return goes_on


def _begins_anew(replicated: Mapping[str, tf.Variable], saved: Mapping[str, np.ndarray]) -> set[str]:
    """Names of the replicated state that are not restored.

    With other candidates (other default ones, or in a policy), all of `auto` begins anew, except whether rows are
    compressed. With other buckets or another number of ranks, that is what has another shape now.
    """

    def differs(name: str) -> bool:
        return name in replicated and not np.array_equal(replicated[name].numpy(), saved.get(name, np.zeros(0)))

    anew = {"only_candidate"}  # a new plan has looked it up
    if differs("auto_candidates"):
        anew |= {name for name in {*replicated, *saved} if name.startswith("auto_") and name != "auto_rows"}
    if differs("auto_calibration"):  # the factors are relative to it
        anew |= {"auto_calibration", "auto_link", "auto_link_moments"}
    anew |= {name for name, v in replicated.items() if name in saved and v.shape != saved[name].shape}
    return anew | {"auto_known"} if "auto_choice" in anew else anew


def merged(states: Sequence[PlanState]) -> PlanState:
    """The state of a rank that takes over the states of several ranks.

    Residuals and velocities are summed in float32, so their sum over all ranks stays the same. Padding is dropped. The
    replicated state is that of the first state. Of local steps, the local weights are dropped, which discards the
    round, and the slots are those of the first state.
    """

    def total(field: str, i: int, tensor: np.ndarray) -> np.ndarray:
        summands = [state.tensors[field][i].astype(np.float32) for state in states]
        return np.sum(summands, axis=0, dtype=np.float32).astype(tensor.dtype)

    return states[0].mapped(total) if not _is_of_local_steps(states[0]) else without_weights(states[0])


def zeroed(state: PlanState) -> PlanState:
    """The state with zeros for residuals, velocities and padding; its tensors may be empty.

    Of local steps, only the local weights are dropped.
    """
    if _is_of_local_steps(state):
        return without_weights(state)
    return state.mapped(lambda _, i, tensor: np.zeros(state.members[i].shape, tensor.dtype))


def without_weights(state: PlanState) -> PlanState:
    """The state of local steps of a rank that begins a round with the synchronized weights."""
    tensors = {field: of_field for field, of_field in state.tensors.items() if field != "weights"}
    return dataclasses.replace(state, tensors=tensors, padding={field: [] for field in tensors})


def _is_of_local_steps(state: PlanState) -> bool:
    return any(member.kind == "own" for member in state.members)


# What ranks compute from measurements, with these prefixes of names: processors may round it differently.
_MEASURED = ("auto_", "delay_", "round_")
# What each rank would try next; only rank 0's proposal is followed.
_PROPOSED = "auto_trial"


def _summary(name: str, array: np.ndarray) -> Any:
    """Shape, dtype, and the values; of many values, a checksum. Of what is measured, whether the values are finite."""
    if name.startswith(_MEASURED) and (array.dtype.kind not in "iub" or name == _PROPOSED):
        values: Any = bool(np.isfinite(array).all())
    else:
        values = array.tolist() if array.size < 1000 else zlib.crc32(np.ascontiguousarray(array).tobytes())
    return array.shape, array.dtype.name, values


def _check_numeric(name: str, array: np.ndarray) -> None:
    dtype = tf.as_dtype(array.dtype)
    if not (dtype.is_floating or dtype.is_integer or dtype.is_bool or dtype.is_complex):
        raise ValueError(f"{name} is of type {array.dtype}")


def _check_finite(name: str, array: np.ndarray) -> None:
    if not tf.as_dtype(array.dtype).is_floating:
        raise ValueError(f"{name} is of type {array.dtype}")
    if not np.isfinite(array.astype(np.float32)).all():
        raise ValueError(f"{name} is not finite: resume from an earlier step")


def put(reducer: Reducer, states: Sequence[PlanState]) -> list[bool]:
    """Restores states into the plans of a reducer. The others are restored when the reducer makes their plans.

    Returns:
        For each state that is restored now, what `restore` returned.
    """
    plans = list(reducer.plans.values())
    go_on = []
    reducer.pending = []
    for state in states:
        plan = next((plan for plan in plans if _fits(state, plan)), None)
        if plan is None:
            reducer.pending.append(state)
        else:
            plans.remove(plan)
            go_on.append(restore(plan, state))
    return go_on


def take_pending(reducer: Reducer, plan: Plan) -> None:
    """Restores the pending state of a new plan, if any state is pending: then on all ranks, which all have one.

    Raises:
        ValueError: On all ranks: all pending states of a rank belong to other gradients, or do not fit the plan.
    """
    if not reducer.pending:
        return
    with tf.init_scope():
        if tf.executing_eagerly():
            restore_on_all(plan.settings.process_set, lambda: _take(reducer, plan))
        else:  # graphs of TensorFlow 1
            _take(reducer, plan)


def restore_on_all(group: Any, action: Callable[[], object]) -> None:
    """Runs on all ranks together what restores states, and returns what `restore` or `put` returned, if any.

    Raises:
        ValueError: On all ranks: it failed on a rank, or what waits was restored on some ranks only.
    """
    if len(set(map(repr, agreement.on_all(group, "hvdc_residuals", "residual checkpoint", action)))) > 1:
        raise ValueError(
            "residual checkpoint: what waits for the next step (delay=1) fits this run on some ranks only: the files "
            "of the ranks do not belong to the same training, start without residuals (resume=False)"
        )


def _take(reducer: Reducer, plan: Plan) -> bool:
    state = next((state for state in reducer.pending if _fits(state, plan)), None)
    if state is None:
        old, new = reducer.pending[0].members, _members(plan)
        pairs = (pair for pair, a, b in zip(zip(old, new), _keys(old), _keys(new)) if a != b)
        differing = next((f": {a.path} {a.shape}, {b.path} {b.shape}" for a, b in pairs), "")
        raise ValueError(
            f"the residuals that were loaded belong to other gradients ({len(old)}) than those of this step "
            f"({len(new)}){differing}: train the variables that were trained, or start without residuals"
        )
    goes_on = restore(plan, state)
    reducer.pending.remove(state)
    return goes_on


def _stateful_groups(plan: Plan) -> list[tuple[Layout, GroupState]]:
    """The layouts and states to be saved: of all parameter groups, and of embeddings with a residual."""
    layout, state = plan.layout, plan.state
    groups: list[tuple[Layout, GroupState]] = [(g.layout, s) for g, s in zip(layout.param_groups, state.groups)]
    for i, embedding, of_embedding in zip(layout.sparse, layout.embeddings, state.embeddings):
        if of_embedding.residuals:
            groups.append((PerTensorLayout(TensorGroup((i,), (embedding.shape,))), of_embedding))
    return groups


def _saved_variables(plan: Plan) -> list[tuple[int, Layout, str, list[tf.Variable]]]:
    """The non-empty fields of these groups: number and layout of the group, name of the field, one variable a chunk."""
    groups = enumerate(_stateful_groups(plan))
    return [(n, layout, f, of_f) for n, (layout, group) in groups for f, of_f in vars(group).items() if of_f]


def _waiting(plan: Plan) -> dict[str, tf.Variable]:
    """What waits, see `PlanState.waiting`. Shares of a scatter-reduce depend on the rank, so names include it."""
    group, state = plan.settings.process_set, plan.state
    buckets = {f"bucket-{b}-{k}": v for b, variables in state.waiting.items() for k, v in enumerate(variables)}
    gradients = {f"gradient-{i}": variable for i, variable in state.waiting_gradients.items()}
    return {f"{group.rank()}-of-{group.size()}-{name}": v for name, v in (buckets | gradients).items()}


def _members(plan: Plan) -> list[Member]:
    layout = plan.layout
    kinds = ["none" if dtype is None else "dense" for dtype in layout.dtypes]
    for i in layout.sparse:
        kinds[i] = "sparse"
    return [Member(*member) for member in zip(layout.paths, layout.shapes, kinds)]


def _fits(state: PlanState, plan: Plan) -> bool:
    return _keys(state.members) == _keys(_members(plan))


def _keys(members: Sequence[Member]) -> list[tuple[str, tuple[int, ...], str]]:
    """Equal for the same gradients in another run, which may number layers differently.

    Of a path, only the names of layer and variable count, see `without_counters`.
    """
    names = renumbered(["/".join(member.path.split("/")[-2:]) for member in members])
    return [(name, member.shape, member.kind) for name, member in zip(names, members)]


def _chunk_layouts(plan: Plan) -> list[Any]:
    layouts = [layout for layout, _ in _stateful_groups(plan)]
    return [[list(layout.tensors.members), len(layout.shapes), list(layout.shapes[0])] for layout in layouts]


def _is_padding(layout: Layout) -> list[np.ndarray]:
    """For each chunk, which of its elements belong to no gradient: bool, in the chunk's shape."""
    ones = [tf.ones(shape) for shape in layout.tensors.shapes]
    return [chunk.numpy() == 0.0 for chunk in pack(layout, ones, range(len(layout.shapes)))]


def _fill_padding(chunks: Sequence[np.ndarray], layout: Layout, padding: np.ndarray) -> None:
    """Writes `padding` (1-D) into the chunks' elements that belong to no gradient, in place."""
    positions = _is_padding(layout)
    ends = np.cumsum([is_padding.sum() for is_padding in positions])
    for chunk, is_padding, values in zip(chunks, positions, np.split(padding, ends[:-1])):
        chunk[is_padding] = values
