"""Records gradients of some steps, for `hvdc.compare`."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ..common import checks, gradient_file, tracing
from ..common.verbosity import say
from ..engine.observer import Observer, StepMeasurement
from ..engine.plan import Plan
from .recorder import Loss, Recorder

FILE = "gradients.npz"
# So many steps are recorded, and fewer if the file would be larger, but at least one.
MAX_STEPS, MAX_BYTES = 8, 256 * 2**20


def make_recorder(log_dir: str | None, every: int | None, loss: Loss | None = None) -> Callable[[Plan], Observer]:
    """Makes the recorders of a run; those of the first rank also record gradients if `every` is given."""
    path = None if every is None or log_dir is None else os.path.join(log_dir, FILE)
    is_old = True  # the file, if there is one

    def make(plan: Plan) -> Observer:
        nonlocal is_old
        if path is None or every is None or plan.settings.process_set.rank() != 0:
            return Recorder(plan, loss)
        if is_old:
            is_old = False
            with contextlib.suppress(FileNotFoundError):
                os.remove(path)
        return GradientRecorder(plan, path, every, loss)

    return make


def checked_every(name: str, every: Any) -> int | None:
    """The argument that says of which steps gradients are recorded; None for none."""
    return None if every is None else checks.integer(name, every, 1)


class GradientRecorder(Recorder):
    """Records steps and, in each `every`-th step, this rank's gradients: before compression, clipping and momentum.

    Gradients that are IndexedSlices are left out, since they are compressed row by row. So are steps in which a
    gradient of any rank was not finite.
    """

    def __init__(self, plan: Plan, path: str, every: int, loss: Loss | None = None) -> None:
        super().__init__(plan, loss)
        layout = plan.layout
        self._path, self._every = path, every
        self._members = [
            i
            for i, dtype in enumerate(layout.dtypes)
            if i not in layout.sparse and dtype is not None and dtype.is_floating
        ]
        self._names = [layout.paths[i] for i in self._members]
        nbytes = 4 * sum(math.prod(layout.shapes[i]) for i in self._members)
        self._max_steps = max(1, min(MAX_STEPS, MAX_BYTES // max(1, nbytes)))
        with tf.init_scope(), tf.device("CPU"):
            self._written = tracing.variable(tf.constant(0), f"{plan.name}_recorded_gradients")

    def observe(self, measurement: StepMeasurement) -> None:
        """Writes one step into the ring buffer and, if it is time to, its gradients into the file."""
        super().observe(measurement)
        gradients = [measurement.gradients[i] for i in self._members]
        with tf.device("CPU"):
            number = measurement.step + 1
            is_due = (number % self._every == 0) & (self._written.read_value() < self._max_steps)

            def write() -> tf.Tensor:
                arrays = [tf.cast(gradient, tf.float32) for gradient in gradients]
                written = tf.numpy_function(self._append, [number, *arrays], tf.int32)
                return self._written.assign_add(written)

            tf.cond(is_due & measurement.committed, write, lambda: self._written.read_value())

    def stop(self) -> None:
        """Records no more gradients."""
        self._written.assign(self._max_steps)

    def _append(self, step: np.ndarray, *gradients: np.ndarray) -> np.ndarray:
        """Returns the number of steps written; after an error, so many that no more are written."""
        try:
            gradient_file.append(self._path, int(step), self._names, gradients)
        except OSError as error:
            text = f"cannot write {self._path} ({error}); training goes on"
            say(text, "warning")
            return np.int32(self._max_steps)
        return np.int32(1)


def stop_recording(plans: Sequence[Plan]) -> None:
    """Makes the recorders of these plans record no more gradients."""
    for plan in plans:
        for observer in plan.observers:
            if isinstance(observer, GradientRecorder):
                observer.stop()
