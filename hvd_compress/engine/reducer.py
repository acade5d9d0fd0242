"""Reduces lists of gradients over the ranks: the optimizer and the tape each have a `Reducer`."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from ..common import checks, host_memory, tracing
from ..common.error_text import error_text
from ..common.names import path_of, plain_name
from ..common.phases import Phase
from . import agreement, progress
from .compression_report import CompressionReport
from .guard import Guard
from .observer import Observer
from .plan import Plan
from .round_log import RoundLog
from .settings import Settings
from .step import Step

_alive: weakref.WeakSet[Reducer] = weakref.WeakSet()
# Make observers for the plans of all reducers that are not watched, see `Reducer.watch`; the last one does.
watch_all: list[Callable[[Plan], Observer]] = []


class SavedState(Protocol):
    """The state of a plan, loaded before the plan is made."""

    replicated_state: dict[str, np.ndarray]  # the values of `Plan.replicated_state`


# Makes a plan. Arguments: reducer, name, gradients, variables, whether any rank records steps.
Build = Callable[["Reducer", str, Sequence[Any], Sequence[Any], bool], Plan]


class Reducer:
    """Reduces lists of gradients over the ranks, and keeps their residuals.

    A plan (buckets and residuals) belongs to a list of variables and lives as long as the reducer.
    """

    # The number of reducers that this process has made: a part of the next one's name.
    made: ClassVar[int] = 0

    def __init__(self, settings: Settings, build: Build) -> None:
        self.settings = settings
        self._build = build
        self.plans: dict[Any, Plan] = {}  # by the variables' identities and the gradients' kinds
        self._functions: dict[Any, Any] = {}  # each plan's step, for calls outside of a graph
        self._agreed: set[tuple[int, ...]] = set()  # see `agree_once`
        self.pending: list[Any] = []  # loaded states of plans that are not made yet
        # The prefix of its collectives' names. Horovod matches collectives by name: two reducers must not share theirs.
        # All ranks make their reducers in the same order.
        self.name = f"hvdc_{Reducer.made}_{plain_name(settings.name)}"
        Reducer.made += 1
        # What ranks compare besides the settings, of the optimizer that applies the gradients.
        self.of_optimizer: Callable[[], agreement.Facts] = dict
        self._watcher: Callable[[Plan], Observer] | None = None
        self.epoch: progress.Epoch | None = None  # that began last; None if no callback tells it
        self.guard: Guard | None = None  # of all plans, see `guarding`
        self.round_log: RoundLog | None = None  # with local steps
        self.local_counts: tf.Variable | None = None  # which grow with each local step
        self.round_length: Callable[[], int] | None = None  # the present one, if `auto` chooses it
        self.continues = False  # whether it continues the training of an elastic job after a reset
        self._warned = False  # that this rank exchanges nothing
        _alive.add(self)

    @checks.not_converted
    def __call__(
        self, gradients: Sequence[Any], variables: Sequence[Any], so_far: tf.Tensor | None = None
    ) -> list[Any]:
        """The gradients, averaged or summed over the ranks of the process set.

        Args:
            gradients: Tensors, IndexedSlices or None, one for each of `variables`.
            variables: The gradients' variables. Residuals are kept for this list of variables.
            so_far: The new value of `State.progress["given"]`, a float64 scalar, the same on all ranks; None for no
                change.

        Returns:
            A list like `gradients`, with the same shapes and dtypes. On a rank outside of the process set, and if that
            has only one rank, the gradients themselves.

        Raises:
            ValueError: Horovod is not initialized, or ranks disagree on settings or gradients.
            RuntimeError: Called inside an XLA-compiled step.
        """
        check_not_in_xla()
        process_set = self.settings.process_set
        hvd.size()  # raises Horovod's own error where hvd.init() was not called
        checks.registered(process_set)
        if not process_set.included() or process_set.size() == 1:
            if not self._warned:
                self._warned = True
                if process_set.included():
                    progress.warn_alone(self.settings)
                else:
                    warnings.warn(
                        f"rank {hvd.rank()} is not in the process set of ranks {process_set.ranks}: it applies its own "
                        "gradients, and its weights part from those of the others",
                        stacklevel=3,
                    )
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
            self.plans[key] = self._build(self, name, gradients, variables, watched)
            _say_if_slow(self.plans[key])
        plan = self.plans[key]
        make_observer = self._watcher or next(reversed(watch_all), None)
        if make_observer is not None and not plan.is_recorded:
            plan.observers.append(make_observer(plan))
        if not tf.executing_eagerly():
            return Step(plan, gradients).run(so_far)
        traced = (key, *plan.observers)
        if traced not in self._functions:
            self._functions[traced] = tf.function(lambda each, so_far: Step(plan, each).run(so_far), autograph=False)
        return self._functions[traced](list(gradients), so_far)

    @property
    def is_watched(self) -> bool:
        """Whether steps that are traced now are recorded on this rank."""
        return bool(self._watcher or watch_all)

    def watch(self, make: Callable[[Plan], Observer], anew: bool = False) -> bool:
        """Records the steps that are traced from now on, on this rank only; collectives stay as they are.

        Plans whose steps are recorded already keep their observer, unless `anew` is True; for others, `make` replaces
        that of an earlier call.

        Returns:
            Whether any plan's steps were traced without being recorded. The caller must then trace them again.
        """
        self._watcher = make
        if anew:
            self.forget_recorders()
        return not all(plan.is_recorded for plan in self.plans.values())

    def forget_recorders(self) -> None:
        """Lets steps that are traced from now on have new recorders."""
        self._functions.clear()
        for plan in self.plans.values():
            plan.observers[:] = [observer for observer in plan.observers if not observer.records_steps]

    def agree(self, gradients: Sequence[Any], variables: Sequence[Any]) -> tuple[str, bool]:
        """Checks that all ranks are about to reduce the same gradients with the same settings.

        Returns:
            The next plan's name, and whether any rank records its steps.

        Raises:
            ValueError: Ranks disagree.
        """
        name, process_set = f"{self.name}_{len(self.plans)}", self.settings.process_set
        watched = self.is_watched
        if process_set.included() and process_set.size() > 1:
            with tf.init_scope():
                watched = agreement.check(
                    name, self.settings, gradients, variables, watched, not self.plans, self.of_optimizer
                )
        return name, watched

    def facts(self, variables: Sequence[Any] | None) -> agreement.Facts:
        """What ranks compare before they train these variables; None if they do not exist yet. Communicates nothing."""
        facts = agreement.of_settings(self.settings, self.of_optimizer())
        facts |= {} if variables is None else agreement.of_variables(variables)
        return facts | {agreement.TRAINED_BEFORE: self.name}

    def agree_once(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """As `agree`, for gradients that are reduced without a plan; only the first call with these variables."""
        key = tuple(map(id, variables))
        if key not in self._agreed:
            self.agree(gradients, variables)
            self._agreed.add(key)

    def begin_epoch(self, epoch: int, epochs: int | None = None, steps: float | None = None) -> None:
        """Sets the progress at the beginning of an epoch. All ranks call it: they agree on the largest numbers.

        Progress never goes back, although Keras begins with epoch 0 again in a second `fit` or after an elastic reset.
        If no compressor depends on Keras's epochs, nothing happens.

        Args:
            epoch: The number of epochs so far.
            epochs: The number of epochs of training; None if it is not known.
            steps: The number of steps in an epoch; None if it is not known.
        """
        group = self.settings.process_set
        if not progress.follows_keras(self.settings) or not group.included() or group.size() == 1:
            return
        saved = [state.replicated_state for state in self.pending]
        saved += [plan.state.replicated for plan in self.plans.values()]
        own = progress.epoch_of(epoch, epochs, steps, self.epoch, saved)
        with tf.device("CPU"):
            told = tf.constant(own, tf.float64)
            agreed = hvd.allreduce(told, op=hvd.Max, name="hvdc_epoch", process_set=group).numpy()
        self.epoch = progress.Epoch(*agreed.tolist())
        for plan in self.plans.values():
            progress.begin(plan.state, self.epoch)

    def end_epoch(self) -> None:
        """Sets the progress at the end of the epoch that began last; may be called more than once."""
        if self.epoch is not None:
            for plan in self.plans.values():
                progress.end(plan.state, self.epoch)

    def replan(self, states: Sequence[SavedState]) -> None:
        """Deletes the plans after the ranks changed; new plans restore `states`. Graphs must be traced again."""
        self.plans.clear()
        self._agreed.clear()
        self._functions.clear()
        self.pending = list(states)

    def forget_functions(self) -> None:
        """Lets steps outside of the user's functions be traced again."""
        self._functions.clear()

    @property
    def has_begun(self) -> bool:
        """Whether it has exchanged anything, or has begun local steps."""
        return bool(self.plans) or self.local_counts is not None

    def steps_made(self) -> int:
        """A number that grows with each step, also with local ones. It waits for the device; not for use in a graph."""
        local = 0 if self.local_counts is None else int(self.local_counts.numpy()[0])
        return local + sum(int(plan.state.step.numpy()) for plan in self.plans.values())

    def report(self) -> CompressionReport:
        """The compressor of each bucket of the plan that was made last, and the reason for it."""
        return CompressionReport(tuple(self.last_plan("compression_report()").report()))

    def bytes_sent(self) -> tuple[int, int]:
        """See `Plan.bytes_sent`; of the plan that was made last."""
        return self.last_plan("bytes_sent()").bytes_sent()

    def last_plan(self, who: str) -> Plan:
        """The plan that was made last.

        Raises:
            RuntimeError: There is no plan yet; the message begins with `who`.
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


def _say_if_slow(plan: Plan) -> None:
    """Rank 0 says what it does until the first step is done, if that takes long."""
    step = plan.state.step
    with tf.init_scope():
        if not tf.executing_eagerly():  # graphs of TensorFlow 1
            return
        before = int(step)
    count, buckets = len(plan.layout.shapes), len(plan.layout.buckets)

    def what() -> str:
        return f"{'tracing' if tracing.is_tracing() else 'compiling and running'} the first step"

    Phase(
        what,
        f"once; {count} gradients in {buckets} bucket{'s' if buckets != 1 else ''}",
        plan.settings.process_set.rank() == 0,
        lambda: int(step) != before or not tracing.running_functions(),
    ).begin()


def alive() -> list[Reducer]:
    """All reducers of this process."""
    return list(_alive)


def check_not_in_xla() -> None:
    """Raises a RuntimeError if the current graph is compiled by XLA, which has no Horovod collectives."""
    from tensorflow.python.ops import control_flow_util

    graph = tf.compat.v1.get_default_graph() if not tf.executing_eagerly() else None
    if graph is not None and control_flow_util.GraphOrParentsInXlaContext(graph):
        raise RuntimeError(
            "the training step is compiled with jit_compile=True, and Horovod's collectives do not exist inside "
            "XLA: pass jit_compile=False to model.compile() or tf.function() (hvd_compress compiles its own "
            "kernels; on a GPU, Keras 3 sets jit_compile=True unless told otherwise)"
        )
