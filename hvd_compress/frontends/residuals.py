"""`hvdc.save_residuals` and `hvdc.load_residuals`: what ranks keep for later steps, in files next to the model's.

All ranks decide alike: what one rank finds wrong, every rank raises. Nothing is put in place before all ranks
have read and checked their files.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from ..checkpoint import files, plan_state, resume
from ..checkpoint.plan_state import PlanState
from ..common import checks
from ..engine import agreement
from ..engine.reducer import Reducer
from ..engine.settings import Settings
from .keras import optimizer_state
from .keras.aggregation import LocalGradientAggregation
from .tape import reducer_of

T = TypeVar("T")


def save_residuals(
    optimizer_or_tape: Any,
    directory: str | os.PathLike,
    variables: Sequence[Any] | None = None,
    step: int | None = None,
    max_to_keep: int = 2,
) -> None:
    """Saves each rank's residuals, velocities and the step counter; call it on all ranks, outside of tf.function.

    A process killed at any point leaves the complete saves before this one as they were. One rank has no
    residuals, and saves nothing.

    Args:
        optimizer_or_tape: What `hvdc.DistributedOptimizer` or `hvdc.DistributedGradientTape` returned; any
            tape with the same settings will do.
        directory: Where to, shared by all ranks or each rank's own; one for each optimizer and process set.
        variables: For a tape: the sources whose gradients it takes.
        step: The training step that this belongs to. None takes the optimizer's `iterations`; for a tape, the number of
            its steps.
        max_to_keep: So many complete saves are kept, this one included; at least 1.

    Raises:
        RuntimeError: On all ranks, if a rank cannot write its file.
        TypeError, ValueError: An argument is not valid, or the ranks are at different steps.
    """
    if isinstance(max_to_keep, bool) or not isinstance(max_to_keep, int) or max_to_keep < 1:
        raise ValueError(f"max_to_keep must be a whole number from 1 on, got {max_to_keep!r}")
    directory = checks.path("directory", directory)
    reducer, aggregation, own_step = owner(optimizer_or_tape, variables)
    group = reducer.settings.process_set
    if not group.included() or group.size() == 1:
        return
    if step is None:
        step = _steps_of(reducer) if own_step is None else own_step
    rank, ranks = group.rank(), group.size()

    # A number and a token from rank 0: files of another save, left by a killed job, are not taken for this one's.
    begun = _on_all(group, lambda: (step, files.next_number(directory), secrets.token_hex(8)), RuntimeError)
    _check_steps([other for other, *_ in begun], directory)
    _, number, token = begun[0]
    manifest = {
        "save": token,
        "step": step,
        "ranks": ranks,
        "settings": _settings(reducer.settings, aggregation),
    }

    def write() -> None:
        packed = [state.packed(str(i)) for i, state in enumerate(states_of(reducer, aggregation))]
        arrays = {name: array for _, arrays in packed for name, array in arrays.items()}
        metadata = {**manifest, "rank": rank, "plans": [plan for plan, _ in packed]}
        files.write_rank(directory, number, metadata, arrays)

    def commit() -> list[int]:
        if rank == 0:
            files.write_manifest(directory, number, manifest)
        return files.complete(directory)[-max_to_keep:] if rank == 0 else []

    _on_all(group, write, RuntimeError)
    kept = _on_all(group, commit, RuntimeError)[0]
    files.prune(directory, kept)


def load_residuals(
    optimizer_or_tape: Any,
    directory: str | os.PathLike,
    variables: Sequence[Any] | None = None,
    step: int | None = None,
) -> int | None:
    """Loads the newest complete save of the model's step; call it on all ranks, outside of tf.function.

    On as many ranks as saved, training goes on as if it had never been interrupted. On m instead of n ranks,
    rank r takes the sum of what ranks r, r + m, r + 2 m, ... had, or zeros if there are none: the sum over all
    ranks stays the same. (With op Average, a step then divides it by m, not by n: see docs/checkpoints.md.)
    One rank has no use for residuals: a warning says that they are left out.

    Args:
        optimizer_or_tape: As in `save_residuals`.
        directory: As in `save_residuals`; if the number of ranks changed, all ranks must see all files.
        variables: As in `save_residuals`. For an optimizer, the variables that it trains: with them another model is
            found here, otherwise in the first step.
        step: The step that the restored model is at. None takes the optimizer's `iterations`; for a tape, whatever step
            is newest.

    Returns:
        The step of the save, or None if there is no complete one (or only one rank).

    Raises:
        ValueError: On all ranks, with one line: a file is missing, damaged, of another model, of other settings
            or of another version; or there are saves, but none of this step.
        TypeError: An argument is not valid.
    """
    directory = checks.path("directory", directory)
    reducer, aggregation, own_step = owner(optimizer_or_tape, variables)
    group = reducer.settings.process_set
    if not group.included():
        return None
    if group.size() == 1:
        if files.complete(directory):
            _warn(f"{directory}: one rank sends nothing, the residuals saved there are left out")
        return None
    step = own_step if step is None else step
    rank, ranks = group.rank(), group.size()

    def look() -> Any:
        return step, resume.find(directory, step) if rank == 0 else None, bool(files.numbers(directory))

    looked = _on_all(group, look)
    _check_steps([other for other, *_ in looked], directory)
    found = looked[0][1]
    if found is None:
        if rank == 0 and any(begun for *_, begun in looked):
            _warn(f"{directory} holds no complete save: residuals start from zero")
        return None
    number, manifest = found
    resume.check_settings(
        manifest["settings"], _settings(reducer.settings, aggregation), files.save_path(directory, number)
    )
    states: list[PlanState] = []
    _on_all(group, lambda: states.extend(resume.read(directory, number, manifest, rank, ranks, variables)))
    if aggregation is not None:
        aggregation.restore(states.pop(0))
    plan_state.put(reducer, states)
    return int(manifest["step"])


def has_steps(optimizer: Any) -> bool:
    """Whether this distributed optimizer has reduced gradients in this process, or has residuals of such that did."""
    reducer = owner(optimizer)[0]
    return bool(reducer.plans or reducer.pending)


def is_distributed(optimizer: Any) -> bool:
    """Whether `hvdc.DistributedOptimizer` is it, or is in it (a LossScaleOptimizer)."""
    return hasattr(optimizer_state.innermost(optimizer), "_hvdc") or hasattr(optimizer, "_hvdc")


def states_of(reducer: Reducer, aggregation: LocalGradientAggregation | None) -> list[PlanState]:
    """A copy of all that this rank keeps for later steps, that of `backward_passes_per_step` first."""
    states = [plan_state.state_of(plan) for plan in reducer.plans.values()] + reducer.pending
    return states if aggregation is None else [aggregation.state(), *states]


def owner(
    source: Any, variables: Sequence[Any] | None = None
) -> tuple[Reducer, LocalGradientAggregation | None, int | None]:
    """Who keeps the residuals, and the optimizer's step; None for a tape's."""
    if isinstance(source, tf.GradientTape) and hasattr(source, "_hvdc_settings"):
        if variables is None or not all(hasattr(variable, "assign") for variable in variables):
            raise ValueError("a tape's residuals belong to its sources: pass them, as a list, as `variables`")
        return reducer_of(source, variables), None, None
    optimizer = source
    while not hasattr(optimizer, "_hvdc") and hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    if not hasattr(optimizer, "_hvdc"):
        raise TypeError(
            f"residuals are kept by hvdc.DistributedOptimizer and hvdc.DistributedGradientTape, not by {source!r}"
        )
    step = int(optimizer_state.tf_variable(optimizer_state.innermost(optimizer).iterations).numpy())
    return optimizer._hvdc.reducer, optimizer._hvdc.aggregation, step


def _steps_of(reducer: Reducer) -> int:
    pending = [int(state.named["step"]) for state in reducer.pending]
    return max([int(plan.state.step.numpy()) for plan in reducer.plans.values()] + pending, default=0)


def _settings(settings: Settings, aggregation: LocalGradientAggregation | None) -> dict[str, Any]:
    """The settings that say what residuals there are and in which unit."""
    compressor = settings.compressor
    if (
        compressor.momentum_settings is not None
    ):  # on another number of ranks, an epoch has another number of steps
        compressor = dataclasses.replace(compressor, steps_per_epoch=None)
    return {
        "compression": compressor.spec,
        "error_feedback": settings.feeds_back(settings.compressor),
        "momentum_correction": settings.momentum_correction,
        "gradient_predivide_factor": settings.gradient_predivide_factor,
        "min_compress_size": settings.min_compress_size,
        "sparse_as_dense": settings.sparse_as_dense,
        "backward_passes_per_step": 1 if aggregation is None else aggregation.backward_passes_per_step,
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
