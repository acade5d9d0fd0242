"""What tests see of the engine's inside. When the inside changes, this file changes and the tests do not.

An owner is a distributed optimizer or a reducer. What has `variables` in its name returns tf.Variables, which a
test may assign to; everything else returns numbers, arrays or names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import hvd_compress as hvdc
from hvd_compress.auto import flat_or_hierarchical
from hvd_compress.checkpoint import plan_state
from hvd_compress.common import tracing
from hvd_compress.compressors import Compressor
from hvd_compress.engine import clock
from hvd_compress.engine import reducer as reducers
from hvd_compress.engine.packing import pack
from hvd_compress.engine.settings import Settings
from hvd_compress.exchange import choice, hosts
from hvd_compress.exchange.scatter_reduce import ScatterReduce
from hvd_compress.frontends import build, tape
from hvd_compress.frontends.residuals import states_of
from hvd_compress.monitor.recorder import COLUMNS, HEADER, Recorder, recorder_of
from hvd_compress.monitor.steps import Reader

# Reducers and plans


def new_reducer(compression: Any, watched: bool = False, **settings: Any) -> Any:
    """A reducer of gradients: what a distributed optimizer and a distributed tape call."""
    if isinstance(compression, str):
        compression = hvdc.Compression.parse(compression)
    reducer = build.new_reducer(Settings(compression, **settings))
    if watched:
        reducer.watch(Recorder)
    return reducer


def reducer_of(owner: Any) -> Any:
    """The reducer of a distributed optimizer; a reducer itself."""
    return owner._hvdc.reducer if hasattr(owner, "_hvdc") else owner


def plans_of(owner: Any) -> list[Any]:
    """What was laid out for each list of gradients, oldest first."""
    return list(reducer_of(owner).plans.values())


def plan_of(owner: Any) -> Any:
    """The only one of `plans_of`."""
    (plan,) = plans_of(owner)
    return plan


def reducers_made() -> int:
    """How many reducers this process has made."""
    return reducers.Reducer.made


def set_reducers_made(number: int) -> None:
    """As if this process had made so many reducers."""
    reducers.Reducer.made = number


# Starting over


def rewinder(function: Any, *inputs: Any) -> Callable[[], None]:
    """Traces a tf.function without a call; what is returned puts back all variables that a call may change.

    Tests can share what was traced, and each begins as if it had made it.
    """
    traced = function.get_concrete_function(*inputs)
    handles = [handle for handle in traced.graph.external_captures if handle.dtype == tf.resource]
    types = [handle._handle_data.shape_and_type[0].dtype for handle in handles]
    values = [tf.raw_ops.ReadVariableOp(resource=h, dtype=dtype) for h, dtype in zip(handles, types)]

    def rewind() -> None:
        for handle, value in zip(handles, values):
            tf.raw_ops.AssignVariableOp(resource=handle, value=value)

    return rewind


# Layout


@dataclasses.dataclass(frozen=True)
class Group:
    """Gradients that share a compressor: their positions, the shapes of the chunks they are cut into, the state."""

    compressor: Compressor
    members: tuple[int, ...]
    shapes: list[tuple[int, ...]]
    residual_variables: list[tf.Variable]
    factor_variables: list[tf.Variable]


@dataclasses.dataclass(frozen=True)
class Bucket:
    """What crosses at once: which chunks of its group, their shapes, and their residuals."""

    compressor: Compressor
    chunks: range
    shapes: list[tuple[int, ...]]
    residual_variables: list[tf.Variable]


def groups(plan: Any) -> list[Group]:
    """The compressed gradients, by compressor (and by the setting `groups`)."""
    parts = zip(plan.layout.param_groups, plan.state.groups, plan.state.factors)
    return [
        Group(
            g.compressor,
            tuple(g.layout.tensors.members),
            list(g.layout.shapes),
            state.residuals,
            factors,
        )
        for g, state, factors in parts
    ]


def buckets(plan: Any) -> list[Bucket]:
    """The compressed buckets, in the order in which they cross."""
    layout = plan.layout
    return [
        Bucket(
            layout.group_of(b).compressor,
            bucket.chunks,
            layout.shapes_of(b),
            plan.state.of_bucket(layout, b).residuals,
        )
        for b, bucket in enumerate(layout.buckets)
    ]


def in_pieces(plan: Any, gradients: Sequence[Any]) -> list[np.ndarray]:
    """The chunks into which the only group cuts gradients."""
    (group,) = plan.layout.param_groups
    tensors = [tf.constant(gradients[i]) for i in group.layout.tensors.members]
    return [chunk.numpy() for chunk in pack(group.layout, tensors, range(len(group.layout.shapes)))]


def uncompressed_buckets(plan: Any) -> list[tuple[int, ...]]:
    """The positions of the gradients in each uncompressed bucket."""
    return [tuple(tensors.members) for tensors in plan.layout.uncompressed]


def paths(plan: Any) -> list[str]:
    """The variables' paths."""
    return list(plan.layout.paths)


# What users are told


def report_of(owner: Any) -> Any:
    """The compression report of the newest plan."""
    return reducer_of(owner).report()


def bucket_reports(plan: Any) -> list[Any]:
    """What each bucket of a plan is compressed with, and why."""
    return plan.report()


def bytes_sent(plan: Any) -> tuple[int, int]:
    """Bytes that each rank sends per step: as configured, and if nothing were compressed."""
    return plan.bytes_sent()


# State


def residuals(plan: Any) -> list[np.ndarray]:
    """The residual of every gradient in its shape, float64; zeros where there is none."""
    saved = saved_state(plan).tensors.get("residuals", {})
    return [
        np.asarray(saved[i], np.float64) if i in saved else np.zeros(shape)
        for i, shape in enumerate(plan.layout.shapes)
    ]


def residual_variables(plan: Any) -> list[tf.Variable]:
    """The residuals of all dense gradients, as they are kept."""
    return [variable for group in plan.state.groups for variable in group.residuals]


def velocity_variables(plan: Any) -> list[tf.Variable]:
    """The velocities of momentum correction, those of uncompressed gradients last."""
    compressed = [variable for group in plan.state.groups for variable in group.velocities]
    return [*compressed, *plan.state.velocities.values()]


def waiting_variables(plan: Any) -> list[tf.Variable]:
    """What waits for the next step, with a delay: of each bucket, then uncompressed gradients."""
    of_buckets = [variable for variables in plan.state.waiting.values() for variable in variables]
    return [*of_buckets, *plan.state.waiting_gradients.values()]


def factor_variables(plan: Any) -> list[tf.Variable]:
    """The right factors of powersgd, also as a candidate of auto."""
    factors = [variable for of_group in plan.state.factors for variable in of_group]
    return [*factors, *plan.state.model_wide_factors.values()]


def state_variables(plan: Any) -> list[tf.Variable]:
    """All that a step changes but for what auto learns."""
    return [*residual_variables(plan), *velocity_variables(plan), *factor_variables(plan), plan.state.step]


def names_of_shared_state(plan: Any) -> list[str]:
    """What is saved of the state that is alike on all ranks."""
    return sorted(plan.replicated_state)


def steps_made(plan: Any) -> int:
    """How many steps were made."""
    return int(plan.state.step)


def progress(plan: Any) -> float:
    """How far training has come, for compressors that change with it."""
    (progress,) = plan.state.progress.values()
    return float(progress)


def stage(plan: Any, compressor: Compressor) -> int:
    """Which of the compressor's stages holds now."""
    return int(compressor.stage_at(plan.state.progress_of(compressor).read_value()))


def keeps_residuals(plan: Any, compressor: Compressor) -> bool:
    """Whether residuals are kept of what this compressor loses."""
    return bool(plan.settings.feeds_back(compressor))


def stages_of(owner: Any) -> Sequence[Compressor]:
    """The stages of the compressor that was asked for."""
    return reducer_of(owner).settings.compressor.stages


# Rows of embeddings


def row_paths(plan: Any) -> list[str]:
    """The paths of the variables whose gradients are IndexedSlices."""
    return [plan.layout.paths[i] for i in plan.layout.sparse]


def row_compressors(plan: Any) -> list[str]:
    """The spec strings of their compressors in steps that are traced now."""
    return [table.compressor.spec for table in plan.embeddings]


def row_residual_variables(plan: Any) -> list[tf.Variable]:
    """Their residuals; one each of those that have any."""
    return [variable for state in plan.state.embeddings for variable in state.residuals]


def rows_of_last_step(plan: Any) -> np.ndarray:
    """For each of them: rows of all ranks together, whether they crossed dense, and this rank's slices."""
    return plan.state.embedding_counts.numpy()


def row_bytes_sent(plan: Any, table: int) -> int:
    """What the rows of a table took on the wire in the last step."""
    return int(plan.embeddings[table].bytes_sent(*rows_of_last_step(plan)[table])[0])


# Collectives


def collectives(graph: Any) -> list[Any]:
    """Horovod's operations in a graph, without those inside of functions that it calls."""
    return [op for op in graph.get_operations() if op.type.startswith("Horovod")]


def types_of_ancestors(op: Any) -> set[str]:
    """The types of all operations that must run before this one, for its data or because of a control dependency."""
    seen, to_visit = set(), [op]
    while to_visit:
        last = to_visit.pop()
        before = {tensor.op for tensor in last.inputs} | set(last.control_inputs)
        to_visit += before - seen
        seen |= before
    return {each.type for each in seen}


def prefer_scatter_reduce(monkeypatch: Any, between_two: bool = False) -> None:
    """Buckets are scatter-reduced however small they are; `between_two`: between two hosts, too."""
    if between_two:
        usual = ScatterReduce.fits
        # As if two hosts were four, with twice the chunks.
        monkeypatch.setattr(
            ScatterReduce,
            "fits",
            lambda self, c, s, n: usual(self, c, [*s, *s], 4) if n == 2 else usual(self, c, s, n),
        )
    monkeypatch.setattr(choice, "_WORTH_A_COLLECTIVE", -(10**9))


def is_scatter_reduced(compressor: Compressor, shapes: Sequence[tuple[int, ...]], ranks: int) -> bool:
    """Whether a bucket of chunks of these shapes is."""
    return choice.choose(compressor, shapes, ranks).name == "scatter_reduce"


def collect_calibrations(monkeypatch: Any) -> list[Any]:
    """All calibrations that are made from now on when buckets are laid out; they come while they are made."""
    made: list[Any] = []
    monkeypatch.setattr(flat_or_hierarchical, "calibrate", lambda *a: made.append(hvdc.calibrate(*a)) or made[-1])
    return made


def set_hosts(monkeypatch: Any, local: Any, across: Any) -> Any:
    """As if `hvdc.init()` had found hosts with these process sets; returns what it would have found."""
    found = hosts.Hosts(local, across)
    monkeypatch.setattr(hosts, "_found", found)
    return found


def hosts_now() -> Any:
    """Between which hosts gradients may cross; None where they may not."""
    return hosts.current()


def crosses_in_two_levels(plan: Any, compressor: Compressor, shapes: Sequence[tuple[int, ...]]) -> bool:
    """Whether a bucket of chunks of these shapes crosses in two levels."""
    return plan.collective(compressor, shapes).hierarchical


def knows_hosts(plan: Any) -> bool:
    """Whether anything may cross in two levels."""
    return plan.hosts is not None


def one_level_compressors(plan: Any) -> list[str]:
    """Those that cross in one level although there are hosts."""
    return [compressor.spec for compressor in plan.flat]


def other_share_variables(plan: Any) -> list[tf.Variable]:
    """For each bucket, whether this rank may have residuals of chunks that another rank carries, bool."""
    return list(plan.state.has_foreign_residual.values())


# auto


def selector_state(plan: Any) -> Any:
    """What auto's choice rests on: variables by field (choice, now, age, progress, ...)."""
    return plan.auto.state


def trace_all_candidates(monkeypatch: Any, always: bool) -> None:
    """Whether the first steps of auto are traced with all candidates, so that a test may choose any of them.

    If not, candidates are first compared in step 8.
    """
    monkeypatch.setattr(tracing, "can_forget_traces", lambda: not always)


def traced_candidates(plan: Any) -> list[int]:
    """The candidates with which steps are traced from now on."""
    return list(plan.auto.traces.candidates)


def want_traced(plan: Any, candidates: Sequence[int]) -> None:
    """As if these candidates were worth a trace, when candidates are compared next.

    The position after that of the last candidate stands for compressed rows of embeddings.
    """
    plan.auto.traces._worth_tracing = lambda state, step, counts: frozenset(candidates)


def expect_quick_traces(plan: Any) -> None:
    """As if the first trace had taken no time."""
    plan.auto.traces._trace_seconds = 1e-9


def seem_to_train_for(plan: Any, seconds: float) -> None:
    """As if training had begun so many seconds earlier."""
    plan.auto.traces._made -= seconds


def measured_candidates(plan: Any) -> list[int]:
    """The candidates whose progress is measured in steps that are traced from now on."""
    return list(plan.auto.traces.measured)


def compress_rows(plan: Any) -> None:
    """Compresses the rows of embeddings from the next step on."""
    plan.auto.traces._trace([len(plan.auto.auto.candidates)])


def selector_bytes(plan: Any) -> list[int]:
    """The size of each bucket of auto, as float32."""
    return plan.auto.nbytes


def selected(plan: Any) -> list[str]:
    """The spec string of each bucket's candidate."""
    return [plan.auto.current(b).spec for b in plan.layout.auto_buckets]


def nothing_is_compressed(plan: Any) -> bool:
    """Whether the next step sends gradients as they are, and no residual is left."""
    return bool(plan.auto._is_idle())


def force_choice(plan: Any, candidate: int | Sequence[int]) -> None:
    """As if all buckets had been switched to a candidate (or each to its own), and nothing else were to be tried."""
    state, count = selector_state(plan), len(selector_bytes(plan))
    choice = [candidate] * count if isinstance(candidate, int) else list(candidate)
    for variable in (state.choice, state.now):
        variable.assign(choice)
    state.age.assign(tf.zeros_like(state.age))
    plan.auto._numbers.assign(tf.zeros_like(plan.auto._numbers))


def force_next_step(plan: Any, candidates: Sequence[int]) -> None:
    """The next step compresses each bucket with this candidate; what auto thinks stays."""
    selector_state(plan).now.assign(candidates)


def propose(plan: Any, candidate: int, rank: int) -> None:
    """As if rank 0 had found, in the last step, that all buckets should switch to a candidate."""
    count, outgoing = len(selector_bytes(plan)), plan.auto._numbers
    votes = tf.fill([count], 1.0 + candidate if rank == 0 else 0.0)
    outgoing.assign(tf.concat([votes, outgoing[count:]], 0))


def replace_clock(monkeypatch: Any, other: Any) -> None:
    """In steps that are traced from now on, it is `other(time)`, where `time` is what the usual clock says."""
    usual = clock.stamp
    monkeypatch.setattr(clock, "stamp", lambda tensors, *after: other(usual(tensors, *after)))


def model_wide_members(plan: Any) -> list[int]:
    """The gradients that cross at once with a candidate that sees them in their own shapes; in their order."""
    return list(plan.layout.model_wide.tensors.members)


# Monitor


def watch(owner: Any) -> None:
    """Has the steps that are traced from now on record what they measure."""
    reducer_of(owner).watch(Recorder)


def recorded_rows(plan: Any) -> np.ndarray:
    """What the steps since the last call have recorded, as it is."""
    return recorder_of(plan).read()


def recorded_buckets(plan: Any) -> list[Any]:
    """What the columns of a record are of."""
    return recorder_of(plan).buckets


def recorded_steps(plan: Any, rows: np.ndarray | None = None) -> Any:
    """What the steps since the last call have recorded, read."""
    return Reader(recorded_buckets(plan)).steps(recorded_rows(plan) if rows is None else rows)


def record_layout() -> tuple[int, int]:
    """How many numbers a row has before those of the buckets, and how many of each bucket."""
    return len(HEADER), len(COLUMNS)


# Tapes


def reducers_of_tapes() -> int:
    """How many reducers are kept for tapes."""
    return len(tape._reducers)


# Checkpoints


def saved_state(plan: Any) -> Any:
    """What a checkpoint holds of a plan."""
    return plan_state.state_of(plan)


def saved_states(optimizer: Any, aggregation: bool = False) -> list[Any]:
    """What a checkpoint holds of an optimizer's plans, loaded ones that are not in use yet included."""
    distribution = optimizer._hvdc
    return states_of(distribution.reducer, distribution.aggregation if aggregation else None)


def states_of_reducer(reducer: Any) -> list[Any]:
    """What is saved of a reducer's plans."""
    return states_of(reducer, None)


def pending_states(owner: Any) -> list[Any]:
    """What was loaded for plans that are still to be made."""
    return reducer_of(owner).pending


def state_through_file(state: Any) -> Any:
    """A state as it is after it was written and read."""
    return plan_state.PlanState.unpacked("0", *state.packed("0"))


def state_with(state: Any, tensors: dict[str, dict[int, np.ndarray]]) -> Any:
    """The state with other residuals (and velocities): arrays by field and position of their gradient."""
    return dataclasses.replace(state, tensors=tensors)


def set_pending(owner: Any, states: Sequence[Any]) -> None:
    """As if these had been loaded for plans that are still to be made."""
    reducer_of(owner).pending = list(states)


def restore(owner: Any, states: Sequence[Any]) -> None:
    """Puts such states in place, or keeps them for plans that are still to be made."""
    plan_state.put(reducer_of(owner), states)


def restart_with(owner: Any, states: Sequence[Any]) -> None:
    """Forgets the plans, as after an elastic reset; new ones take these states."""
    reducer_of(owner).replan(states)
