"""How far training is, in epochs, for `dgc`, whose density falls from epoch to epoch.

`State.progress` must be the same on all ranks, since the sizes of payloads depend on it. It is saved with the
residuals. It grows by 1 / steps_per_epoch in each step. Without `steps_per_epoch`, a callback tells the reducer when an
epoch of Keras begins and ends.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

from .plan import Plan
from .settings import Settings


def follows_keras(settings: Settings) -> bool:
    """Whether a warm-up counts Keras's epochs."""
    momentum = (c.momentum_settings for c in settings.compressors if len(c.stages) > 1)
    return any(m is not None and m.steps_per_epoch is None for m in momentum)


def check(settings: Settings, epoch: float | None) -> None:
    """Raises a ValueError if a warm-up counts Keras's epochs, and no callback tells the epoch: it is None."""
    if follows_keras(settings) and epoch is None:
        raise ValueError(
            "dgc: nobody says which epoch it is, on which the warm-up's density depends: put "
            "hvdc.callbacks.BroadcastGlobalVariablesCallback(0) into the callbacks of fit, or in a loop of your own "
            "pass dgc's steps_per_epoch=..., or warmup_epochs=0 for no warm-up"
        )


def start(plan: Plan, epoch: float | None) -> None:
    """Sets the progress to `epoch`, unless the restored progress is further; rank 0 prints one line."""
    progress = plan.state.progress
    if progress is not None and epoch is not None:
        progress.assign(max(epoch, float(progress)))
    groups = plan.layout.param_groups
    with_momentum = [group.compressor for group in groups if group.compressor.momentum_settings is not None]
    if with_momentum and plan.settings.process_set.rank() == 0:
        print(f"hvd_compress: {_described(with_momentum[0], plan)}", file=sys.stderr, flush=True)


def warn_alone(settings: Settings) -> None:
    """Warns that one rank, which exchanges nothing, gets no momentum."""
    dgc = settings.dgc
    if dgc is not None and dgc.momentum:
        warnings.warn(
            f"dgc: a single rank exchanges nothing, and so there is no momentum ({dgc.momentum}) either: for a "
            "comparison, give the optimizer its own momentum and use compression='none'",
            stacklevel=3,
        )


def _described(dgc: Any, plan: Plan) -> str:
    *warmup, last = [f"{100 * density:.3g}%" for density in dgc.densities]
    progress = plan.state.progress
    if not warmup or progress is None:
        return f"dgc sends {last} of each gradient, without a warm-up"
    length = "an epoch" if dgc.epochs_per_stage == 1.0 else f"{dgc.epochs_per_stage:g} epochs"
    steps = "as Keras counts them" if dgc.steps_per_epoch is None else f"of {dgc.steps_per_epoch} steps"
    now = f"{100 * dgc.densities[int(dgc.stage_at(progress.read_value()))]:.3g}%"
    return (
        f"dgc sends {', '.join(warmup)} and then {last} of each gradient, {length} each, {steps}; "
        f"now {now} (epoch {float(progress):g})"
    )
