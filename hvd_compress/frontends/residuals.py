"""`hvdc.save_residuals` and `hvdc.load_residuals`.

If one rank finds an error, all ranks raise it. No rank restores anything before all ranks have read and checked their
files.
"""

from __future__ import annotations

import os
import secrets
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError

from ..checkpoint import files, plan_state, resume
from ..checkpoint.plan_state import PlanState
from ..common import checks
from ..engine import agreement
from ..engine.reducer import Reducer
from ..engine.settings import Settings
from .keras import optimizer_state
from .keras.aggregation import LocalGradientAggregation
from .local_steps import LocalSteps
from .rounds import Rounds
from .tape import reducer_of

T = TypeVar("T")


def save_residuals(
    optimizer_or_tape: Any,
    directory: str | os.PathLike,
    variables: Sequence[Any] | None = None,
    step: int | None = None,
    max_to_keep: int = 2,
) -> None:
    """Saves the residuals of all ranks, their velocities (momentum correction) and the step counter.

    With local steps, it also saves what differs between ranks besides: their local weights, and the variables of their
    optimizers.

    Call it on all ranks, outside of tf.function. If a process is killed at any point, the complete saves made before
    stay intact. With a single rank there are no residuals, and nothing is saved.

    Args:
        optimizer_or_tape: The result of `hvdc.DistributedOptimizer` or `hvdc.DistributedGradientTape`, or a
            `hvdc.LocalSteps`. Any tape with the same settings stands for the others.
        directory: The directory of the saves. All ranks may share it, or each rank may have one of its own. Use another
            one for each optimizer and process set.
        variables: For a tape: the sources whose gradients it computes. For a `LocalSteps`: other variables that
            differ between ranks, such as those of the optimizer.
        step: The training step of the save. None uses the optimizer's `iterations`, or the tape's number of steps.
        max_to_keep: The number of complete saves to keep, this one included; at least 1.

    Raises:
        RuntimeError: On all ranks: a rank cannot write its file.
        TypeError: `optimizer_or_tape` or `directory` is of a wrong type.
        ValueError: Another argument is not valid, or the ranks are at different steps.
    """
    max_to_keep = checks.integer("max_to_keep", max_to_keep, 1)
    directory = checks.path("directory", directory)
    kept = owner(optimizer_or_tape, variables)
    reducer = kept.reducer
    group = reducer.settings.process_set
    if not group.included() or group.size() == 1:
        return
    if step is None:
        step = _steps_of(reducer) if kept.step is None else kept.step
    rank, ranks = group.rank(), group.size()

    # All ranks use rank 0's number and token. The token distinguishes this save's files from those of a killed job.
    proposals = _on_all(group, lambda: (step, files.next_number(directory), secrets.token_hex(8)), RuntimeError)
    if kept.rounds is None:  # with local steps, a LossScaleOptimizer may leave out other steps on each rank
        _check_steps([rank_step for rank_step, *_ in proposals], directory)
    step, number, token = proposals[0]
    manifest = {"save": token, "step": step, "ranks": ranks, "settings": _settings(reducer.settings)}

    def write() -> None:
        packed = [state.packed(str(i)) for i, state in enumerate(states_of(*kept[:3], kept.own))]
        arrays = {name: array for _, arrays in packed for name, array in arrays.items()}
        metadata = {**manifest, "rank": rank, "plans": [plan for plan, _ in packed]}
        files.write_rank(directory, number, metadata, arrays)

    def commit() -> list[int]:
        if rank == 0:
            files.write_manifest(directory, number, manifest)
        return files.complete(directory)[-max_to_keep:] if rank == 0 else []

    try:
        _on_all(group, write, RuntimeError)
        saves_to_keep = _on_all(group, commit, RuntimeError)[0]
    except HorovodInternalError:  # a rank is gone, and another one may have completed the save
        raise
    except RuntimeError:  # A full disk would have less room with each attempt.
        files.discard(directory, number)
        raise
    files.prune(directory, saves_to_keep)


def load_residuals(
    optimizer_or_tape: Any,
    directory: str | os.PathLike,
    variables: Sequence[Any] | None = None,
    step: int | None = None,
) -> int | None:
    """Restores the residuals of all ranks from the newest complete save of the model's step.

    Call it on all ranks, outside of tf.function. On as many ranks as saved, training continues as if it had not been
    interrupted. On m instead of n ranks, rank r gets the sum of the residuals of ranks r, r + m, r + 2 m, ..., or zeros
    if there are none of these, so the sum over all ranks does not change. (With `op=hvd.Average`, a step then
    divides by m instead of n; see docs/checkpoints.md.) A single rank has no residuals: a warning says that they
    are not restored.

    Args:
        optimizer_or_tape: As in `save_residuals`.
        directory: As in `save_residuals`. If the number of ranks has changed, all ranks must see all files.
        variables: For a tape or `LocalSteps`, as in `save_residuals`. For an optimizer, the variables that it trains:
            with them, a save of another model is detected here, otherwise in the first step.
        step: The step of the restored model. None uses the optimizer's `iterations`; for a tape or `LocalSteps`, the
            newest save.

    Returns:
        The step of the save, or None if there is no complete save or only one rank.

    Raises:
        TypeError: `optimizer_or_tape` or `directory` is of a wrong type.
        ValueError: On all ranks, in one line: a file is missing, damaged, of another model, of other settings or of
            another version; or there are saves, but none of this step.
    """
    directory = checks.path("directory", directory)
    kept = owner(optimizer_or_tape, variables)
    reducer = kept.reducer
    group = reducer.settings.process_set
    if not group.included():
        return None
    if group.size() == 1:
        if files.complete(directory):
            _warn(f"{directory}: one rank sends nothing, the residuals saved there are left out")
        return None
    if step is None and not isinstance(optimizer_or_tape, LocalSteps):  # whose steps are those of the save
        step = kept.step
    rank, ranks = group.rank(), group.size()

    def look_up() -> Any:
        return step, resume.find(directory, step) if rank == 0 else None, bool(files.numbers(directory))

    answers = _on_all(group, look_up)
    _check_steps([rank_step for rank_step, *_ in answers], directory)
    save = answers[0][1]
    if save is None:
        if rank == 0 and any(has_incomplete for *_, has_incomplete in answers):
            _warn(f"{directory} holds no complete save: residuals start from zero")
        return None
    number, manifest = save
    resume.check_settings(manifest["settings"], _settings(reducer.settings), files.save_path(directory, number))
    states: list[PlanState] = []

    # With local steps, moving statistics as well.
    sources = variables if kept.rounds is None else [variable.given for variable in kept.rounds.variables] or None

    def read() -> str:
        states.extend(resume.read(directory, number, manifest, rank, ranks, sources))
        return repr([state.summary for state in states])

    if len(set(_on_all(group, read))) > 1:
        path = files.save_path(directory, number)
        raise ValueError(f"residual checkpoint {path}: the files of the ranks do not belong to the same training")
    plan_state.restore_on_all(group, lambda: put(*kept[:3], states, kept.own))
    return int(manifest["step"])


def has_steps(optimizer: Any) -> bool:
    """Whether this distributed optimizer has reduced gradients in this process, or has restored residuals.

    In an elastic job, also whether the job has trained before its last reset, be it on a single rank, which reduces
    nothing.
    """
    reducer = owner(optimizer).reducer
    return bool(reducer.plans or reducer.pending or reducer.continues)


def states_of(
    reducer: Reducer,
    aggregation: LocalGradientAggregation | None,
    rounds: Rounds | None = None,
    own: Sequence[tf.Variable] | None = None,
) -> list[PlanState]:
    """Copies of all state that this rank keeps from step to step; see `Owner` for the arguments.

    That of `backward_passes_per_step` is the first, then that of local steps. If `own` is None, local weights are not
    among it, and a restored round is discarded.
    """
    states = [plan_state.state_of(plan) for plan in reducer.plans.values()] + reducer.pending
    if rounds is not None:
        states = [rounds.state(own or (), with_local=own is not None), *states]
    return states if aggregation is None else [aggregation.state(), *states]


def put(
    reducer: Reducer,
    aggregation: LocalGradientAggregation | None,
    rounds: Rounds | None,
    states: Sequence[PlanState],
    own: Sequence[tf.Variable] = (),
) -> list[bool]:
    """Restores what `states_of` returned; returns what `plan_state.put` does."""
    if aggregation is not None and states:
        aggregation.restore(states[0])
        states = states[1:]
    if rounds is not None and states:
        rounds.restore(states[0], own)
        states = states[1:]
    return plan_state.put(reducer, states)


class Owner(NamedTuple):
    """What keeps the state of an optimizer, a tape or `LocalSteps`."""

    reducer: Reducer
    aggregation: LocalGradientAggregation | None = None  # of `backward_passes_per_step`
    rounds: Rounds | None = None  # of local steps
    step: int | None = None  # None for a tape
    own: Sequence[tf.Variable] = ()  # with local steps, variables that differ between ranks besides the weights


def owner(source: Any, variables: Sequence[Any] | None = None) -> Owner:
    """What keeps the state of `source`.

    Raises:
        TypeError: `source` is neither a distributed optimizer, nor a distributed tape or `LocalSteps`.
        ValueError: `source` is a tape, and `variables` is not a list of variables, its sources.
    """
    if isinstance(source, tf.GradientTape) and hasattr(source, "_hvdc_settings"):
        if variables is None or not all(hasattr(variable, "assign") for variable in variables):
            raise ValueError("a tape's residuals belong to its sources: pass them, as a list, as `variables`")
        return Owner(reducer_of(source, variables))
    if isinstance(source, LocalSteps):
        rounds = source._rounds
        return Owner(rounds.reducer, None, rounds, rounds.steps, optimizer_state.unique(variables or ()))
    optimizer = optimizer_state.distributed_optimizer(source)
    if optimizer is None:
        raise TypeError(
            f"residuals are kept by hvdc.DistributedOptimizer and hvdc.DistributedGradientTape, not by {source!r}"
        )
    step = int(optimizer_state.tf_variable(optimizer_state.innermost(optimizer).iterations).numpy())
    distribution = optimizer._hvdc
    own = [] if distribution.rounds is None else optimizer_state.unique(optimizer_state.optimizer_variables(source))
    return Owner(distribution.reducer, distribution.aggregation, distribution.rounds, step, own)


def _steps_of(reducer: Reducer) -> int:
    pending = [int(state.replicated_state["step"]) for state in reducer.pending]
    return max([int(plan.state.step.numpy()) for plan in reducer.plans.values()] + pending, default=0)


def _settings(settings: Settings) -> dict[str, Any]:
    """The settings on which the residuals and their unit depend."""
    unchanged = (
        "momentum_correction", "gradient_predivide_factor", "min_compress_size", "sparse_as_dense",
        "backward_passes_per_step",
    )  # fmt: skip
    return {
        # The number of steps in an epoch depends on the number of ranks, which may change.
        "compression": settings.compressor.without_steps().spec,
        "error_feedback": settings.feeds_back(settings.compressor),
        **{name: getattr(settings, name) for name in unchanged},
        "local_steps": settings.local_steps,
        **({} if settings.local_steps is None else {"outer": str(settings.outer), "fragments": settings.fragments}),
    }


def _check_steps(steps: Sequence[int | None], directory: str) -> None:
    if len(set(steps)) > 1:
        raise ValueError(
            f"residual checkpoint {directory}: the ranks are at different steps, {list(steps)}: restore the model "
            "on all ranks, or broadcast it (BroadcastGlobalVariablesCallback), first"
        )


def _on_all(group: Any, action: Callable[[], T], error: type[Exception] = ValueError) -> list[T]:
    return agreement.on_all(group, "hvdc_residuals", "residual checkpoint", action, error)


def _warn(line: str) -> None:
    warnings.warn(f"residual checkpoint: {line}", stacklevel=3)
