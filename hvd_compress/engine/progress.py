"""How far training is, for compressors with stages: the warm-up of `dgc`, and `schedule`.

`State.progress` must be the same on all ranks, since the sizes of payloads depend on it. It is saved with the
residuals. If the user says how many steps an epoch or training has, it grows by 1 / steps in each step. Otherwise a
callback tells the reducer when an epoch of Keras begins and ends, and how long training is. Stages that are counted in
steps need neither: `State.step` counts them.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..common.verbosity import say
from .plan import Plan
from .settings import Settings
from .state import State

_CALLBACK = (
    "with hvdc.DistributedOptimizer, put hvdc.callbacks.BroadcastGlobalVariablesCallback(0) into the callbacks of fit; "
    "with a tape or a loop of your own,"
)
_DGC_UNKNOWN = (
    f"dgc: nobody says which epoch it is, on which the warm-up's density depends: {_CALLBACK} "
    "pass dgc's steps_per_epoch=..., or warmup_epochs=0 for no warm-up"
)
_UNKNOWN = {
    "epochs": f"schedule: nobody says which epoch it is, on which the compressor depends: {_CALLBACK} count in steps, "
    "such as schedule:(0=int8|1000=int4)",
    "training": f"schedule: nobody says how long training is, on which the compressor depends: {_CALLBACK} pass "
    "schedule's steps=..., the number of steps of the optimizer in training",
}


class Epoch(NamedTuple):
    """What callbacks tell when an epoch of Keras begins; the same on all ranks."""

    number: float  # of epochs so far
    share: float  # of training so far
    per_step: float  # by how much the share grows in each step; 0 if Keras does not know the steps in an epoch
    limit: float  # the share of training at the end of the epoch; 0 if nobody says how many epochs training has


def epoch_of(
    epoch: int, epochs: int | None, steps: float | None, before: Epoch | None, saved: Sequence[Mapping[str, Any]]
) -> Epoch:
    """What this rank knows of the epoch that begins.

    Args:
        epoch: The number of epochs so far.
        epochs: The number of epochs of training; None if it is not known.
        steps: The number of steps in an epoch; None if it is not known.
        before: The epoch that began before this one; None if there was none.
        saved: The values of `State.replicated` of all plans, by their names.
    """
    numbers = [float(epoch), 0.0 if before is None else before.number]
    share, per_step, limit = 0.0, 0.0, 0.0
    if epochs:
        share, limit = epoch / epochs, (epoch + 1) / epochs
        per_step = 1.0 / (epochs * steps) if steps else 0.0
    shares = [share, *(float(state.get("progress_of_training", 0.0)) for state in saved)]
    numbers += [float(state.get("progress", 0.0)) for state in saved]
    return Epoch(max(numbers), max(shares), per_step, limit)


def begin(state: State, epoch: Epoch) -> None:
    """Sets the progress at the beginning of an epoch."""
    if state.follows_epochs:
        state.progress["epochs"].assign(epoch.number)
    if state.pace is not None:
        state.progress["training"].assign(epoch.share)
        state.pace.assign([epoch.per_step, epoch.limit])


def end(state: State, epoch: Epoch) -> None:
    """Sets the progress at the end of an epoch."""
    if state.follows_epochs:
        state.progress["epochs"].assign(epoch.number + 1.0)
    if state.pace is not None:
        share = state.progress["training"]
        share.assign(max(float(share), epoch.limit))


def start(plan: Plan, epoch: Epoch | None) -> None:
    """Sets the progress of a new plan, unless the restored progress is further; rank 0 says what the stages are."""
    state = plan.state
    if epoch is not None:
        further = epoch_of(0, None, None, epoch, [state.replicated])
        begin(state, epoch._replace(number=further.number, share=max(epoch.share, further.share)))
    compressors = [group.compressor for group in plan.layout.param_groups]
    lines = [_dgc_line(c, plan) for c in compressors if c.momentum_settings is not None][:1]
    lines += [_schedule_line(c, plan) for c in compressors if c.stages_in_words]
    if plan.settings.process_set.rank() == 0:
        for line in dict.fromkeys(lines):
            say(line)


def follows_keras(settings: Settings) -> bool:
    """Whether any stages are counted in Keras's epochs."""
    return any(settings.counted(count) and settings.steps_per(count) is None for count in ("epochs", "training"))


def check(settings: Settings, epoch: Epoch | None) -> None:
    """Raises a ValueError if stages are counted in Keras's epochs, and no callback tells these."""
    for count, unknown in (("epochs", epoch is None), ("training", epoch is None or not epoch.limit)):
        if unknown and settings.counted(count) and settings.steps_per(count) is None:
            warms_up = count == "epochs" and settings.dgc is not None and len(settings.dgc.stages) > 1
            raise ValueError(_DGC_UNKNOWN if warms_up else _UNKNOWN[count])


def warn_alone(settings: Settings) -> None:
    """Warns that one rank, which exchanges nothing, gets no momentum."""
    dgc = settings.dgc
    if dgc is not None and dgc.momentum:
        warnings.warn(
            f"dgc: a single rank exchanges nothing, and so there is no momentum ({dgc.momentum}) either: for a "
            "comparison, give the optimizer its own momentum and use compression='none'",
            stacklevel=3,
        )


def _dgc_line(dgc: Any, plan: Plan) -> str:
    *warmup, last = [f"{100 * density:.3g}%" for density in dgc.densities]
    if not warmup:
        return f"dgc sends {last} of each gradient, without a warm-up"
    epochs = plan.state.progress_of(dgc)
    length = "an epoch" if dgc.epochs_per_stage == 1.0 else f"{dgc.epochs_per_stage:g} epochs"
    steps = "as Keras counts them" if dgc.steps_per_epoch is None else f"of {dgc.steps_per_epoch} steps"
    now = f"{100 * dgc.densities[int(dgc.stage_at(epochs.read_value()))]:.3g}%"
    return (
        f"dgc sends {', '.join(warmup)} and then {last} of each gradient, {length} each, {steps}; "
        f"now {now} (epoch {float(epochs):g})"
    )


def _schedule_line(schedule: Any, plan: Plan) -> str:
    now = schedule.stages[int(schedule.stage_at(plan.state.progress_of(schedule).read_value()))]
    return f"schedule: {schedule.stages_in_words}; now {now.spec}"
