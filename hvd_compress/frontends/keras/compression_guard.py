"""`hvdc.callbacks.CompressionGuard`."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from ...common import checks
from ...common.elastic import is_elastic
from ...common.verbosity import say
from ...compressors.resolve import CompressionLike, resolve
from ...engine import agreement, guarding
from ...engine.guard import Guard
from ...engine.reducer import Reducer
from ...monitor.trend import Caution, Change
from .callbacks import CountingCallback
from .optimizer_state import innermost

# Names of metrics of which larger values are better, as in Keras's callbacks.
_LARGER = ("acc", "auc", "fmeasure", "precision", "recall", "f1")


class CompressionGuard(CountingCallback):
    """Lets all ranks compress less while training is in trouble, and as before when it is over.

    Put it on all ranks. Every `every` batches, the ranks gather four numbers each and judge training by its own past:

    - The loss jumps: the mean losses of three windows of `every` batches in a row are far above the best level so far.
    - The loss stays above its trend: those of eight windows in a row lie above it, by less.
    - The residual grows without bound: beyond what error feedback with a contraction can leave, the sum of the norms
      of all gradients.
    - A metric falls behind, if `monitor` names one: in two epochs in a row it is far worse than it was.

    Then all ranks change to the first of `milder` that loses less than the compressors in use, in the same step; with
    `compression="auto"`, to this candidate or to the one that loses least. Residuals begin again with zeros: what they
    hold belongs to a training that went wrong. Rank 0 prints one line that says why. After `calm` batches the ranks go
    back by one change, or to the next of `milder` if the loss has not recovered. If the trouble returns, it takes twice
    as many batches. Each change traces the step again.

    A run that is merely noisy is left alone: "far" is measured in what the loss has fallen so far, and in its noise.
    Where no bucket is compressed, there is nothing to do.

    The callback keeps nothing in checkpoints: a run that is resumed begins with the compressors as configured. In an
    elastic job, workers that join take the level of the others.

    Args:
        milder: Compressors, from less mild to mild. Where one would send more bytes than no compression, or cannot
            take the gradients as they are divided, "none" takes its place.
        every: Batches in a window.
        calm: Batches without an alarm after which the ranks go back.
        monitor: The name of a metric in the logs of an epoch, such as "val_accuracy"; None for none. The ranks that
            have it count, with their mean.
        mode: "min", "max" or "auto", as in `keras.callbacks.EarlyStopping`.

    Raises:
        TypeError: In `on_train_begin`: the model's optimizer is not a `hvdc.DistributedOptimizer`.
        ValueError: An argument is not valid. In the first step, or in `on_train_begin` if the optimizer has trained
            before: the compression has momentum of its own (`dgc`, `momentum_correction`), or the optimizer has
            `delay=1`. In `on_train_begin`, on all ranks: they have other arguments.
    """

    def __init__(
        self,
        milder: Sequence[CompressionLike] = ("int8", "none"),
        every: int = 10,
        calm: int = 500,
        monitor: str | None = None,
        mode: str = "auto",
    ) -> None:
        super().__init__()
        self.milder = _checked_milder(milder)
        self.every = checks.integer("every", every, 1)
        self.calm = checks.integer("calm", calm, 1)
        if monitor is not None:
            checks.text("monitor", monitor)
        if mode not in ("auto", "min", "max"):
            raise ValueError(f"mode must be 'auto', 'min' or 'max', got {mode!r}")
        self.monitor, self.mode = monitor, mode
        self._guarded: Reducer | None = None
        self._caution = Caution(self.calm, self._next_level)
        self._before = (0.0, 0.0)  # total and weight of Keras's running mean of the loss, when last read
        self._sum, self._weight = 0.0, 0.0  # of the losses in this window
        self._has_warned = False  # that nothing logs `monitor`

    @property
    def level(self) -> int:
        """0 if gradients are compressed as configured; i if by the i-th of `milder`."""
        return self._caution.level

    def on_train_begin(self, logs: dict | None = None) -> None:
        """Begins to watch the optimizer; in an elastic job, all ranks take the mildest level of any."""
        reducer = self._reducer
        if reducer is None:
            raise TypeError(
                "CompressionGuard watches hvdc.DistributedOptimizer, and the model was compiled with "
                f"{innermost(getattr(self.model, 'optimizer', None))!r}: wrap its optimizer"
            )
        group = reducer.settings.process_set
        if not group.included() or group.size() == 1:
            self._guarded = None
            return
        self._batches, self._sum, self._weight = 0, 0.0, 0.0
        if reducer is not self._guarded:
            if self._guarded is not None and not is_elastic():
                self._caution = Caution(self.calm, self._next_level)  # another model
            self._guarded = reducer
            reducer.guard = Guard(self.milder)
        arguments = {
            "milder": [one.spec for one in self.milder],
            "every": self.every,
            "calm": self.calm,
            "monitor": self.monitor,
            "mode": self.mode,
        }
        level = max(map(int, agreement.on_arguments(self, arguments, group, str(self._caution.level))))
        if is_elastic():  # a rank that has joined has seen nothing yet
            self._caution = Caution(self.calm, self._next_level)
        self._caution.start_at(level)
        guard = reducer.guard
        assert guard is not None
        if level and not guard.level and any(plan.guard is guard for plan in reducer.plans.values()):
            self._set_level(level)  # see `on_train_end`
        guard.level = level
        unguarded = [plan for plan in reducer.plans.values() if plan.guard is not guard]  # of an earlier `fit`
        for plan in unguarded:
            guarding.attach(plan, guard)
            # The monitor's recorder does not know the milder compressors: the next trace makes another one.
            plan.observers[:] = [observer for observer in plan.observers if not observer.records_steps]
        if unguarded:
            self._trace_again()

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        """Keras's running mean of the loss begins again."""
        super().on_epoch_begin(epoch)
        self._before = (0.0, 0.0)

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        """Judges a window, if one is complete."""
        if self._guarded is None:
            return
        self._add_loss(logs)
        batches = self._count(batch)
        if batches < self.every:
            return
        self._batches = 0
        loss, residual, gradients = self._gathered()
        self._act(self._caution.see(loss, residual, gradients, batches))

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Judges the metric."""
        if self._guarded is None or self.monitor is None:
            return
        own = (logs or {}).get(self.monitor)
        (values,) = self._on_all("hvdc_guard_metric", [math.nan if own is None else float(np.mean(own))])
        known = values[~np.isnan(values)]
        if len(known):
            larger = self.mode == "max" or (self.mode == "auto" and any(word in self.monitor for word in _LARGER))
            self._act(self._caution.see_metric(math.fsum(known) / len(known), self.monitor, larger))
        elif not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"CompressionGuard: no rank has {self.monitor!r} in the logs of this epoch, but "
                f"{', '.join(sorted(logs or {})) or 'nothing'}",
                stacklevel=2,
            )

    def on_train_end(self, logs: dict | None = None) -> None:
        """Gives the optimizer its compressors back, as a `fit` without the guard could not; one with it goes on."""
        if self._guarded is not None and self.level:
            self._set_level(0)

    def _next_level(self, level: int) -> int | None:
        return None if self._guarded is None else guarding.next_level(self._guarded, level)

    def _add_loss(self, logs: dict | None) -> None:
        """Adds the losses of the batches since the last call to those of the window."""
        for metric in getattr(self.model, "metrics", ()):
            if metric.name == "loss" and hasattr(metric, "total") and hasattr(metric, "count"):
                total, weight = (float(np.asarray(value)) for value in (metric.total, metric.count))
                before = self._before if weight >= self._before[1] else (0.0, 0.0)
                self._before = (total, weight)
                self._sum, self._weight = self._sum + total - before[0], self._weight + weight - before[1]
                return
        if "loss" in (logs or {}):  # a training step of the user's own, which returns the loss of its batch
            self._sum, self._weight = self._sum + float(np.mean((logs or {})["loss"])), self._weight + 1.0

    def _gathered(self) -> tuple[float | None, float, float]:
        """The mean loss, the norm of all residuals, and the sum of the norms of all gradients, of all ranks."""
        assert self._guarded is not None
        plans = list(self._guarded.plans.values())
        residual = math.hypot(0.0, *(guarding.residual_norm(plan) for plan in plans))
        gradients = math.fsum(guarding.gradient_sum(plan) for plan in plans)
        loss = self._sum / self._weight if self._weight > 0.0 else math.nan
        losses, known, residuals, sums = self._on_all(
            "hvdc_guard", [loss, float(self._weight > 0.0), residual, gradients]
        )
        self._sum = self._weight = 0.0
        mean = float(np.sum(losses)) / len(losses) if known.all() else None
        return mean, math.hypot(0.0, *residuals.tolist()), math.fsum(sums)

    def _on_all(self, name: str, numbers: Sequence[float]) -> Any:
        """The numbers of all ranks, float64 [numbers, ranks], the same to the bit: a sum in Horovod might not be."""
        assert self._guarded is not None
        with tf.device("CPU"):
            own = tf.constant([numbers], tf.float64)
            group = self._guarded.settings.process_set
            return hvd.allgather(own, name=name, process_set=group).numpy().T

    def _act(self, change: Change | None) -> None:
        """Makes a change, on all ranks after the same step."""
        if change is None or self._guarded is None:
            return
        before = guarding.in_words(self._guarded.plans.values())
        event = guarding.change_level(self._guarded, change.level, change.reason)
        self._trace_again()
        if self._guarded.settings.process_set.rank() == 0:
            text = f"step {event.step}: {event.reason}: {event.compressor} in place of {before}; residuals begin with 0"
            say(f"CompressionGuard, {text}", "warning")

    def _set_level(self, level: int) -> None:
        assert self._guarded is not None
        guarding.set_level(self._guarded, level)
        self._trace_again()

    def _trace_again(self) -> None:
        if getattr(self.model, "train_function", None) is not None:
            self.model.make_train_function(force=True)


def _checked_milder(milder: Any) -> tuple[Any, ...]:
    if isinstance(milder, str) or not isinstance(milder, (list, tuple)) or not milder:
        raise ValueError(f"milder must be a list of compressors, such as ['int8', 'none'], got {milder!r}")
    resolved = tuple(resolve("none" if one is None else one) for one in milder)
    for one in resolved:
        if one.automatic or len(one.stages) > 1 or one.momentum_settings is not None or one.model_wide:
            raise ValueError(f"milder: {one.spec} cannot be used in place of another compressor: name one such as int8")
    return resolved
