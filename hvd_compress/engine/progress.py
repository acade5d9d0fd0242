"""How far training has come, in epochs, for `dgc`, whose density falls from epoch to epoch.

A plan's `progress` must be the same on all ranks, since the sizes of what they exchange follow from it. It is saved and
handed on with the residuals. It grows by 1 / steps_per_epoch in each step; or, where no `steps_per_epoch` is given, a
callback says when an epoch of Keras begins and ends.
"""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING, Any

import horovod.tensorflow as hvd
import tensorflow as tf

from .settings import Settings

if TYPE_CHECKING:
    from .plan import Plan
    from .reducer import Reducer


def begin_epoch(reducer: Reducer, epoch: int) -> None:
    """Says that an epoch begins; call it on all ranks, which agree on one number in a small allreduce.

    Epochs never go back: a second `fit`, or one after an elastic reset, begins again with epoch 0.

    Args:
        reducer: Whose warm-up it is; where it has none by epochs, nothing happens.
        epoch: Keras's number of the epoch, from 0 on.
    """
    group = reducer.settings.process_set
    if not _is_told(reducer.settings) or not group.included() or group.size() == 1:
        return
    saved = [float(state.named.get("progress", 0.0)) for state in reducer.pending]
    own = [float(plan.progress) for plan in reducer.plans.values() if plan.progress is not None]
    furthest = tf.constant(max([float(epoch), reducer.epoch or 0.0, *saved, *own]), tf.float64)
    with tf.device("CPU"):
        agreed = hvd.allreduce(furthest, op=hvd.Max, name="hvdc_epoch", process_set=group)
    reducer.epoch = float(agreed)
    _put(reducer, reducer.epoch)


def end_epoch(reducer: Reducer) -> None:
    """Says that the epoch that has begun last is over; may be said more than once."""
    if reducer.epoch is not None:
        _put(reducer, reducer.epoch + 1.0)


def check(settings: Settings, epoch: float | None) -> None:
    """Refuses a warm-up of which nobody says how far it has come.

    Args:
        settings: Of a reducer.
        epoch: Which epoch it was told, None for none.

    Raises:
        ValueError: So it is.
    """
    if _is_told(settings) and epoch is None:
        raise ValueError(
            "dgc: nobody says which epoch it is, on which the warm-up's density depends: put "
            "hvdc.callbacks.BroadcastGlobalVariablesCallback(0) into the callbacks of fit, or in a loop of your own "
            "pass dgc's steps_per_epoch=..., or warmup_epochs=0 for no warm-up"
        )


def start(reducer: Reducer, plan: Plan) -> None:
    """Begins where the reducer is, or the plan's restored state if that is further; rank 0 says so in one line."""
    if plan.progress is not None and reducer.epoch is not None:
        plan.progress.assign(max(reducer.epoch, float(plan.progress)))
    dgcs = [
        param_group.compressor
        for param_group in plan.param_groups
        if param_group.compressor.momentum_settings is not None
    ]
    if dgcs and reducer.settings.process_set.rank() == 0:
        print(f"hvd_compress: {_described(dgcs[0], plan)}", file=sys.stderr, flush=True)


def warn_alone(settings: Settings) -> None:
    """Says what one rank, which exchanges nothing, does not get."""
    dgc = settings.dgc
    if dgc is not None and dgc.momentum:
        warnings.warn(
            f"dgc: a single rank exchanges nothing, and so there is no momentum ({dgc.momentum}) either: for a "
            "comparison, give the optimizer its own momentum and use compression='none'",
            stacklevel=3,
        )


def _is_told(settings: Settings) -> bool:
    """Whether it is Keras's epochs that count."""
    dgcs = [c for c in settings.compressors if c.momentum_settings is not None and len(c.stages) > 1]
    return any(dgc.steps_per_epoch is None for dgc in dgcs)


def _put(reducer: Reducer, epoch: float) -> None:
    for plan in reducer.plans.values():
        if plan.progress is not None:
            plan.progress.assign(epoch)


def _described(dgc: Any, plan: Plan) -> str:
    *warmup, last = [f"{100 * density:.3g}%" for density in dgc.densities]
    if not warmup or plan.progress is None:
        return f"dgc sends {last} of each gradient, without a warm-up"
    length = "an epoch" if dgc.epochs_per_stage == 1.0 else f"{dgc.epochs_per_stage:g} epochs"
    steps = "as Keras counts them" if dgc.steps_per_epoch is None else f"of {dgc.steps_per_epoch} steps"
    now = f"{100 * dgc.densities[int(plan.stage(dgc))]:.3g}%"
    return (
        f"dgc sends {', '.join(warmup)} and then {last} of each gradient, {length} each, {steps}; "
        f"now {now} (epoch {float(plan.progress):g})"
    )
