"""Lists of gradients, reduced over the ranks."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, ClassVar

import horovod.tensorflow as hvd
import tensorflow as tf

from ..auto.report import CompressionReport
from ..checkpoint import plan_state
from ..common import checks, host_memory
from ..common.error_text import error_text
from ..common.names import path_of, plain_name
from ..monitor import tuning
from ..monitor.recorder import Loss, Recorder, measure_link
from . import agreement, progress
from .plan import Plan
from .settings import Settings
from .step import Step

_made = 0  # so many reducers
_alive: weakref.WeakSet[Reducer] = weakref.WeakSet()


class Reducer:
    """Reduces lists of gradients over the ranks, and keeps their residuals.

    A plan (buckets and residuals) belongs to a list of variables and lives as long as the reducer.

    Attributes:
        settings: How gradients are reduced.
        plans: By the variables' identities and the gradients' kinds.
        pending: Loaded for plans that are still to be made.
        epoch: That has begun last, None where nobody says so; see `progress`.
        name: With which the names of its collectives begin.
        watch_all: How many watch whatever reducer of this process makes a step.
    """

    watch_all: ClassVar[int] = 0

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.plans: dict[Any, Plan] = {}
        self._functions: dict[Any, Any] = {}  # each plan's step, for calls outside of a graph
        self.pending: list[plan_state.PlanState] = []
        # Horovod matches collectives by name: two reducers must not share theirs. All ranks make
        # their reducers in the same order.
        self.name = f"hvdc_{made()}_{plain_name(settings.name)}"
        set_made(made() + 1)
        self._watched = False
        self._loss: Loss | None = None
        self.epoch: float | None = None
        self._warned = False  # that a single rank exchanges nothing
        _alive.add(self)

    @checks.plain_errors  # also converts nothing, which takes twice as long as tracing
    def __call__(
        self, gradients: Sequence[Any], variables: Sequence[Any], so_far: tf.Tensor | None = None
    ) -> list[Any]:
        """The gradients, averaged or summed over the ranks of the process set.

        Args:
            gradients: Tensors, IndexedSlices or None, one for each of `variables`.
            variables: What the gradients belong to. Residuals are kept for this list of variables.
            so_far: What the plan's `progress` is to be from now on, float64 scalar, the same on all ranks; None leaves
                it as it is.

        Returns:
            As `gradients`, in shape and dtype. On a rank outside of the process set, and where it has
            only one rank, the gradients themselves.

        Raises:
            ValueError: Horovod is not initialized, or ranks disagree on what they are to do.
            RuntimeError: Called inside an XLA-compiled step.
        """
        check_not_in_xla()
        process_set = self.settings.process_set
        hvd.size()  # raises Horovod's own error where hvd.init() was not called
        checks.registered(process_set)
        if not process_set.included() or process_set.size() == 1:
            if not self._warned and process_set.size() == 1:
                self._warned = True
                progress.warn_alone(self.settings)
            return list(gradients)
        if self.settings.sparse_as_dense:
            gradients = [tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g for g in gradients]
        gradients = [_tensor(g, v) for g, v in zip(gradients, variables)]
        key = tuple(
            (id(v), tuple(v.shape), None if g is None else (isinstance(g, tf.IndexedSlices), g.dtype))
            for g, v in zip(gradients, variables)
        )
        if key not in self.plans:
            host_memory.keep_freed_memory()
            name, watched = self.agree(gradients, variables)
            progress.check(self.settings, self.epoch)
            with tf.init_scope():
                plan = Plan(name, self.settings, gradients, variables)
                plan.link = measure_link(process_set) if watched else None
            plan_state.take_pending(self, plan)
            with tf.init_scope():
                progress.start(self, plan)
            tuning.settings(self.settings)
            self.plans[key] = plan
        plan = self.plans[key]
        if (self._watched or Reducer.watch_all) and plan.recorder is None:
            plan.recorder = Recorder(plan, self._loss)
        if not tf.executing_eagerly():
            return Step(plan, gradients, so_far).run()
        traced = (key, plan.recorder is not None)
        if traced not in self._functions:
            self._functions[traced] = tf.function(
                lambda gradients, so_far: Step(plan, gradients, so_far).run(), autograph=False
            )
        return self._functions[traced](list(gradients), so_far)

    def watch(self, loss: Loss | None = None) -> bool:
        """Has the steps that are traced from now on record what they measure (see `monitor.recorder`).

        On this rank only, whatever others do: collectives stay as they are.

        Args:
            loss: Where the graph finds the loss, None if nowhere.

        Returns:
            Whether steps were traced before that do not record: trace them anew.
        """
        self._watched = True
        self._loss = loss
        return any(plan.recorder is None for plan in self.plans.values())

    def agree(self, gradients: Sequence[Any], variables: Sequence[Any]) -> tuple[str, bool]:
        """Asks whether the other ranks are about to reduce the same.

        Returns:
            The next plan's name, and whether somebody watches the steps of any rank.

        Raises:
            ValueError: They are not.
        """
        name, process_set = f"{self.name}_{len(self.plans)}", self.settings.process_set
        watched = self._watched or bool(Reducer.watch_all)
        if process_set.included() and process_set.size() > 1:
            with tf.init_scope():
                watched = agreement.check(name, self.settings, gradients, variables, watched)
        return name, watched

    def replan(self, states: Sequence[plan_state.PlanState]) -> None:
        """Forgets the plans, made for other ranks; new ones, in graphs that are traced anew, take `states`."""
        self.plans.clear()
        self._functions.clear()
        self.pending = list(states)

    def report(self) -> CompressionReport:
        """What each bucket of the plan that was made last is compressed with, and why.

        Raises:
            RuntimeError: There is none yet.
        """
        return CompressionReport(tuple(self.last_plan("compression_report()").report()))

    def last_plan(self, who: str) -> Plan:
        """The plan that was made last.

        Raises:
            RuntimeError: There is none yet; `who` asks for it.
        """
        if not self.plans:
            raise RuntimeError(f"{who} is known after the first step on more than one rank: train one first")
        return list(self.plans.values())[-1]


def _tensor(gradient: Any, variable: Any) -> Any:
    if gradient is None or tf.is_tensor(gradient) or isinstance(gradient, tf.IndexedSlices):
        return gradient
    try:
        return tf.convert_to_tensor(gradient, variable.dtype)
    except (TypeError, ValueError):
        path = path_of(variable)
        raise TypeError(f"the gradient of {path} must be a tensor, got {error_text(gradient)}") from None


def made() -> int:
    """How many reducers this process has made, on which the next one's name depends."""
    return _made


def set_made(number: int) -> None:
    """Lets ranks that have made different numbers of reducers go on from the same one."""
    global _made
    _made = number


def alive() -> list[Reducer]:
    """All reducers that there are."""
    return list(_alive)


def check_not_in_xla() -> None:
    """Refuses to put collectives into an XLA-compiled function.

    Raises:
        RuntimeError: The current graph is compiled with `jit_compile=True`.
    """
    from tensorflow.python.ops import control_flow_util

    graph = tf.compat.v1.get_default_graph() if not tf.executing_eagerly() else None
    if graph is not None and control_flow_util.GraphOrParentsInXlaContext(graph):
        raise RuntimeError(
            "the training step is compiled with jit_compile=True, and Horovod's collectives do not exist inside "
            "XLA: pass jit_compile=False to model.compile() or tf.function() (hvd_compress compiles its own "
            "kernels; on a GPU, Keras 3 sets jit_compile=True unless told otherwise)"
        )


def scale_local_gradient(gradient: Any, size: int) -> Any:
    """A local variable's gradient divided by the number of ranks, as Horovod does."""
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values / size, gradient.indices, gradient.dense_shape)
    return gradient / size
