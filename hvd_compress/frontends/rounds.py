"""Local steps: the ranks exchange the movements of their weights once per round, in place of gradients.

1. Each rank trains its own weights with its own optimizer, without any exchange.
2. At the end of a round, a rank's movement is its synchronized weights minus its local weights. Movements are reduced
   like gradients, by the same `Reducer`: with compression, and with residuals.
3. The outer optimizer (`engine.outer`) applies the mean movement to the synchronized weights, which stay equal on all
   ranks, and the local weights become the synchronized ones.

With `fragments="stream"` (Streaming DiLoCo, arXiv 2501.18512), a round has as many fragments as steps, and each step
exchanges one. Its movement was recorded at the end of the step before. So the exchange depends on nothing that the
step computes, and TensorFlow runs it beside the forward and backward pass.

A rank's own state (local weights, inner optimizer) is the model's. This module keeps, hidden from Keras, what is equal
on all ranks: the synchronized weights, the state of the outer optimizer, and the counts.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ..auto.round_length import RoundLength
from ..checkpoint.plan_state import Member, PlanState, restore_on_all
from ..common import tracing
from ..common.names import path_of
from ..engine import nonfinite
from ..engine.compression_report import CompressionReport, RoundsReport
from ..engine.fragments import Rows, divide, whole
from ..engine.outer import Average, OuterUpdate
from ..engine.plan import bytes_per_step
from ..engine.reducer import Reducer
from ..engine.round_log import RoundLog, squares
from ..engine.settings import Settings
from .pieces import Fragment, LocalVariable, Piece


class Rounds:
    """The rounds of local steps of one optimizer or `LocalSteps`.

    Args:
        settings: With `local_steps`.
        reducer: Reduces the movements, and keeps their residuals.
        calls_per_step: How often `step` is called for each update of the weights.
    """

    def __init__(self, settings: Settings, reducer: Reducer, calls_per_step: int = 1) -> None:
        assert settings.local_steps is not None
        self.settings, self.reducer = settings, reducer
        self.log = reducer.round_log = RoundLog(reducer.name)
        self._length: RoundLength | None = None
        if settings.round_lengths:
            owner = weakref.ref(reducer)  # whose plans refer to the length

            def name() -> str:
                alive = owner()
                assert alive is not None
                return alive.name

            self._length = RoundLength(settings.round_lengths, name, settings.process_set)
            reducer.round_length = self._length.present
        self._streams = settings.fragments == "stream"
        self._calls_per_step = calls_per_step
        self.variables: list[LocalVariable] = []
        self.fragments: list[Fragment] = []
        self._movement: tf.Variable | None = None  # of the next fragment, flat; only when streaming
        self._traced: dict[Any, Any] = {}  # for calls outside of a graph
        self._pending: PlanState | None = None
        self._pending_own: Sequence[tf.Variable] = ()
        self._shows_synchronized = False
        # Synchronizes what else the ranks share, once in a round.
        self.at_exchange: Callable[[], None] = lambda: None
        with tf.device("CPU"), tf.init_scope():
            # Calls, steps, and steps before the last one after which all weights were synchronized.
            self._counts = reducer.local_counts = tracing.variable(tf.zeros([3], tf.int64), "local_steps")

    # State

    @property
    def is_prepared(self) -> bool:
        """Whether `prepare` was called."""
        return bool(self.fragments)

    def prepare(self, variables: Sequence[LocalVariable]) -> None:
        """Makes the state in the first call: the present weights are the synchronized ones. Later calls only check.

        Raises:
            ValueError: A variable was not among those of the first call.
        """
        if self.fragments:
            known = {id(variable.value) for variable in self.variables}
            for variable in variables:
                if id(variable.value) not in known and not variable.is_statistic:
                    raise ValueError(
                        f"local_steps began with other variables, {path_of(variable.given)} is not among them: all "
                        "variables that are ever trained must be there in the first step"
                    )
            return
        self.variables = sorted(variables, key=lambda variable: variable.is_statistic)
        shapes = [tuple(variable.value.shape.as_list()) for variable in self.variables]
        with tf.init_scope():
            parts = divide(shapes, self.local_steps) if self._streams else [whole(shapes)]
            self.fragments = [self._fragment(rows) for rows in parts]
            if self._streams:
                wide = any(variable.value.dtype == tf.float64 for variable in self.variables)
                longest = max(fragment.numel for fragment in self.fragments)
                zeros = tf.zeros([longest], tf.float64 if wide else tf.float32)
                self._movement = tracing.variable(zeros, "movement")
        if self._pending is not None:
            with tf.init_scope():
                restore_on_all(self.settings.process_set, functools.partial(self.restore, self._pending))

    def _fragment(self, parts: Sequence[Rows]) -> Fragment:
        pieces = [Piece(self.variables[rows.variable], rows) for rows in parts]
        synchronized = []
        for piece in pieces:
            with tf.device(self.variables[0].value.device):
                synchronized.append(tracing.variable(piece.read(), "synchronized"))
        trained = [own for own, piece in zip(synchronized, pieces) if not piece.is_statistic]
        return Fragment(pieces, synchronized, self.settings.outer.begin(trained))

    def adopt(self) -> None:
        """Makes the present local weights the synchronized ones; they must be equal on all ranks."""
        self._shows_synchronized = False
        with tf.init_scope():
            for fragment in self.fragments:
                for own, piece in zip(fragment.synchronized, fragment.pieces):
                    own.assign(piece.read())
        self._begin_round()

    def discard(self) -> None:
        """Ends the round without an exchange: the local weights become the synchronized ones."""
        self.show_own()
        with tf.init_scope():
            for fragment in self.fragments:
                for own, piece in zip(fragment.synchronized, fragment.pieces):
                    piece.assign(own.read_value())
        self._begin_round()

    def _begin_round(self) -> None:
        """After all local weights became the synchronized ones."""
        with tf.init_scope():
            with tf.device("CPU"):
                calls, steps, _ = tf.unstack(self._counts.read_value())
                self._counts.assign(tf.stack([calls, steps, steps]))
            if self._length is not None:
                self._length.pause()
            if self._movement is not None:
                self._movement.assign(tf.zeros_like(self._movement))

    def show_synchronized(self) -> None:
        """Puts the synchronized weights into the variables, until `show_own`. Communicates nothing."""
        if not self._shows_synchronized:
            self._swap()
            self._shows_synchronized = True

    def show_own(self) -> None:
        """Undoes `show_synchronized`."""
        if self._shows_synchronized:
            self._swap()
            self._shows_synchronized = False

    def checksums(self) -> np.ndarray:
        """Of the present values of all variables, int64: the sums of their bits as integers."""
        sums = []
        for variable in self.variables:
            value = variable.value.read_value()
            of_bits = {2: tf.int16, 4: tf.int32, 8: tf.int64}[value.dtype.size]
            sums.append(tf.reduce_sum(tf.cast(tf.bitcast(value, of_bits), tf.int64)))
        return tf.stack(sums).numpy()

    def _swap(self) -> None:
        with tf.init_scope():
            for fragment in self.fragments:
                for own, piece in zip(fragment.synchronized, fragment.pieces):
                    local = tf.identity(piece.read())
                    piece.assign(own.read_value())
                    own.assign(local)

    # Steps

    def step(self) -> None:
        """Ends a step, after the inner optimizer's update; all ranks call it equally often. In a graph or outside."""
        if not tf.executing_eagerly():
            self._step()
            return
        self._call("step", self._step)

    def make_up(self, steps: int) -> None:
        """Ends so many steps without an update, for which other ranks have data and this one has none.

        The weights stay as they are, but for the exchanges that the other ranks make. Not for use in a graph.
        """
        for _ in range(steps):
            if self._length is not None:
                self._length.pause()
            self.step()

    def _call(self, name: str, function: Callable[[], None]) -> None:
        """Calls a function outside of a graph, traced anew where what is observed or the guard's level has changed."""
        guard = self.reducer.guard
        observers = [observer for plan in self.reducer.plans.values() for observer in plan.observers]
        key = (name, self.reducer.is_watched, 0 if guard is None else guard.level, *observers)
        if key not in self._traced:
            self._traced[key] = tf.function(function, autograph=False)
        self._traced[key]()

    def _step(self) -> None:
        with tf.device("CPU"):
            calls, steps, start = tf.unstack(self._counts.read_value())
            calls += 1
            is_step = tf.equal(calls % self._calls_per_step, 0)
            steps += tf.cast(is_step, steps.dtype)
            is_warm_up = is_step & (steps <= self.settings.local_warmup)
            is_last = is_warm_up
            if not self._streams:
                length = self.settings.local_steps if self._length is None else self._length.now.read_value()
                is_last |= is_step & (steps - start >= length)
        if self._length is not None:
            self._length.end_step(self._trained_first().read_value(), is_step)
        if self._streams:
            self._stream(is_step, steps, is_warm_up)
        else:
            tf.cond(is_last, lambda: self._exchange_all(steps, is_warm_up), lambda: None)
        # Keras learns that the data has ended from a step that fails. What does not depend on the update may run in it
        # on one rank and not on another: they would no longer exchange in the same steps.
        updated = self._trained_first().read_value()
        with tf.device("CPU"), tf.control_dependencies([updated]):
            self._counts.assign(tf.stack([calls, steps, tf.where(is_last, steps, start)]))

    def _trained_first(self) -> tf.Variable:
        """A weight that is updated last: its gradient is the last one of a backward pass."""
        return next(variable.value for variable in self.variables if not variable.is_statistic)

    def _stream(self, is_step: tf.Tensor, steps: tf.Tensor, is_warm_up: tf.Tensor) -> None:
        """Exchanges the fragment of this step; in the warm-up, all of them.

        Two switches: the first one, with the exchange, needs nothing that this step computes.
        """
        assert self._movement is not None
        count, movement = len(self.fragments), self._movement
        with tf.device("CPU"):
            nothing, warm_up = count, count + 1
            turn = tf.cast((steps - 1 - self.settings.local_warmup) % count, tf.int32)
            current = tf.where(is_step & ~is_warm_up, turn, nothing)
            action = tf.where(is_warm_up, warm_up, current)

        def exchange(f: int) -> Callable[[], tf.Tensor]:
            return lambda: self._flat(self._reduce(f, self._unflat(f, movement.read_value())))

        def nothing_received() -> tf.Tensor:
            return tf.zeros([0], movement.dtype)

        with tf.control_dependencies(tracing.data_of_step()):
            received = tf.switch_case(current, [*map(exchange, range(count)), nothing_received])

        def apply(f: int) -> Callable[[], None]:
            def run() -> None:
                own = self._unflat(f, movement.read_value())
                self.log.record(steps, self._apply(f, own, self._unflat(f, received), None))
                self._record((f + 1) % count)
                if f == count - 1:
                    self.at_exchange()

            return run

        def exchange_all() -> None:
            self._exchange_all(steps, is_warm_up)
            movement.assign(tf.zeros_like(movement))

        actions = [*map(apply, range(count)), lambda: None]
        if self.settings.local_warmup:
            actions.append(exchange_all)
        tf.switch_case(action, actions)

    @property
    def local_steps(self) -> int:
        """The number of steps of a round. Not for use in a graph."""
        return int(self.settings.local_steps or 1) if self._length is None else self._length.present()

    @property
    def steps(self) -> int:
        """The number of steps so far. Not for use in a graph."""
        return int(self._counts[1].numpy())

    def synchronize(self) -> None:
        """Ends the round now, on all ranks together; does nothing if it has no steps yet. Not for use in a graph."""
        _, steps, start = self._counts.numpy()
        if not self.fragments or steps == start:
            return
        self.show_own()
        self._call("synchronize", lambda: self._exchange_all(self._counts.read_value()[1], None))
        self._begin_round()

    def _exchange_all(self, steps: tf.Tensor, only_averages: tf.Tensor | None) -> None:
        """Exchanges the present movements of all fragments, at the end of the step with this number."""
        each = []
        for f, fragment in enumerate(self.fragments):
            own = fragment.movements()
            reduce = functools.partial(self._reduce, f)
            received = reduce(own) if self._length is None else self._length.exchange(own, reduce)
            each.append(self._apply(f, own, received, only_averages, alpha=0.0))
        self.log.record(steps, tf.add_n(each))
        self.at_exchange()

    def _reduce(self, f: int, movements: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The mean movements of a fragment."""
        if not movements:
            return []
        reduced = self.reducer(movements, [piece.reduced_as for piece in self.fragments[f].pieces])
        if self.settings.on_nonfinite == "raise":
            reduced = nonfinite.raise_unless(nonfinite.all_finite(reduced), reduced, self._counts.read_value()[1] + 1)
        return list(reduced)

    def _apply(
        self,
        f: int,
        own_movements: Sequence[tf.Tensor],
        deltas: Sequence[tf.Tensor],
        only_averages: tf.Tensor | None,
        alpha: float | None = None,
    ) -> tf.Tensor:
        """Applies the mean movements of a fragment, and mixes its local weights with the synchronized ones.

        Args:
            f: The fragment.
            own_movements: This rank's movements.
            deltas: The mean movements.
            only_averages: Whether to average, whatever the outer optimizer is; a bool scalar, or None for no.
            alpha: The share of the local weights; None for that of the settings.

        Returns:
            `round_log.squares` of the fragment.
        """
        fragment = self.fragments[f]
        alpha = (self.settings.alpha or 0.0) if alpha is None else alpha
        trained = len(fragment.outer.weights)
        before = [weights.read_value() for weights in fragment.synchronized]

        def update() -> None:
            if only_averages is None or isinstance(self.settings.outer, Average):
                fragment.outer.apply(deltas[:trained])
            else:
                averages = OuterUpdate(fragment.outer.weights, {})
                tf.cond(
                    only_averages,
                    lambda: averages.apply(deltas[:trained]),
                    lambda: fragment.outer.apply(deltas[:trained]),
                )
            OuterUpdate(fragment.synchronized[trained:], {}).apply(deltas[trained:])

        finite: tf.Tensor | None = None
        if self.settings.on_nonfinite == "skip":
            finite = nonfinite.all_finite(deltas)
            tf.cond(finite, update, lambda: None)
        else:
            update()
        after = [weights.read_value() for weights in fragment.synchronized]
        for weights, piece in zip(after, fragment.pieces):
            if alpha:
                mixed = alpha * piece.read() + (1.0 - alpha) * weights
                weights = mixed if finite is None else tf.where(finite, mixed, weights)
            piece.assign(weights)
        return squares(own_movements, deltas, before, after, trained)

    # The movement of the next fragment

    def _record(self, f: int) -> None:
        assert self._movement is not None
        flat = self._flat(self.fragments[f].movements())
        self._movement.assign(tf.pad(flat, [[0, self._movement.shape[0] - self.fragments[f].numel]]))

    def _flat(self, tensors: Sequence[tf.Tensor]) -> tf.Tensor:
        assert self._movement is not None
        dtype = self._movement.dtype
        if not tensors:
            return tf.zeros([0], dtype)
        return tf.concat([tf.reshape(tf.cast(tensor, dtype), [-1]) for tensor in tensors], 0)

    def _unflat(self, f: int, flat: tf.Tensor) -> list[tf.Tensor]:
        tensors, offset = [], 0
        for piece in self.fragments[f].pieces:
            size = math.prod(piece.shape)
            tensors.append(tf.cast(tf.reshape(flat[offset : offset + size], piece.shape), piece.dtype))
            offset += size
        return tensors

    def forget_traces(self) -> None:
        """After the ranks changed."""
        self._traced.clear()

    # Reports

    def bytes_sent(self) -> tuple[int, int]:
        """Bytes that each rank sends per step, on average over a round after the warm-up; and with stock Horovod."""
        self.reducer.last_plan("bytes_sent()")
        return bytes_per_step(self.reducer.plans.values(), self.local_steps)

    def report(self) -> CompressionReport:
        """The compressor of each bucket of movements."""
        self.reducer.last_plan("compression_report()")
        buckets = tuple(bucket for plan in self.reducer.plans.values() for bucket in plan.report())
        last = self.log.last()
        if not last:
            return CompressionReport(buckets)
        fields: dict[str, Any] = {**last}
        if self._length is not None:
            step, exchange = self._length.times.numpy().tolist()
            fields |= {"lengths": tuple(self._length.lengths), "step_seconds": step, "exchange_seconds": exchange}
        return CompressionReport(buckets, RoundsReport(self.local_steps, self.log.count, **fields))

    # Saving

    def state(self, own: Sequence[tf.Variable] = (), with_local: bool = True) -> PlanState:
        """The state that is saved.

        Args:
            own: Other variables that differ between ranks, such as the inner optimizer's.
            with_local: Whether to save these and the local weights. Without them, a restored round is discarded.
        """
        if self._pending is not None:
            return self._pending
        variables = [(variable.given, variable.value) for variable in self.variables]
        variables += [(variable, variable) for variable in own]
        # An optimizer puts a layer's counter into the middle of a name, and ranks may count their layers differently.
        paths = [re.sub(r"_\d+(?=[_/]|$)", "", path_of(given)) for given, _ in variables]
        members = [Member(path, tuple(value.shape.as_list()), "own") for path, (_, value) in zip(paths, variables)]
        tensors: dict[str, dict[int, np.ndarray]] = {}
        if with_local:
            with self._own_weights():
                values = {i: value.numpy() for i, (_, value) in enumerate(variables)}
            count = len(self.variables)
            tensors = {
                "weights": {i: values[i] for i in range(count)},
                "slots": {i: values[i] for i in range(count, len(values))},
            }
        with self._own_weights():
            replicated = {name: np.asarray(variable.numpy()) for name, variable in self._replicated().items()}
        return PlanState(members, tensors, {field: [] for field in tensors}, [], replicated)

    def restore(self, state: PlanState, own: Sequence[tf.Variable] = ()) -> None:
        """Restores a state; if `prepare` was not called yet, that does so.

        Raises:
            ValueError: The state belongs to other variables or another outer optimizer.
        """
        if not self.fragments:
            self._pending, self._pending_own = state, own
            return
        self._pending = None
        self._shows_synchronized = False
        replicated = self._replicated()
        if state.replicated_state.keys() <= self._counters().keys():  # of a time before the first step
            with tf.init_scope():
                for name, value in state.replicated_state.items():
                    replicated[name].assign(value)
            self.adopt()
            return
        shapes = {name: tuple(variable.shape) for name, variable in replicated.items()}
        if shapes != {name: value.shape for name, value in state.replicated_state.items()}:
            raise ValueError("the state of local_steps belongs to other variables or another outer optimizer")
        slots = state.tensors.get("slots", {})
        own = own or self._pending_own
        if slots and [tuple(v.shape) for v in own] != [value.shape for value in slots.values()]:
            raise ValueError(
                "the optimizer's variables are not those of the checkpoint: build or restore the optimizer first"
            )
        with tf.init_scope():
            for name, variable in replicated.items():
                variable.assign(state.replicated_state[name])
            for variable, value in zip(own, slots.values()):
                variable.assign(value)
            if self._length is not None:
                self._length.restored()
            if "weights" not in state.tensors:  # of another number of ranks, or a round that an elastic job lost
                self.discard()
                return
            for variable, value in zip(self.variables, state.tensors["weights"].values()):
                variable.value.assign(value)
            if self._streams:
                self._record(max(0, self.steps - self.settings.local_warmup) % self.local_steps)

    def _replicated(self) -> dict[str, Any]:
        """The variables that are equal on all ranks, by their names in checkpoints."""
        result = self._counters()
        for f, fragment in enumerate(self.fragments):
            result |= {f"synchronized_{f}_{i}": variable for i, variable in enumerate(fragment.synchronized)}
            result |= {f"outer_{f}_{name}": variable for name, variable in fragment.outer.variables.items()}
        return result

    def _counters(self) -> dict[str, Any]:
        """Those that are there before the first step."""
        return {"counts": self._counts} | ({} if self._length is None else self._length.variables)

    @contextlib.contextmanager
    def _own_weights(self) -> Iterator[None]:
        shown = self._shows_synchronized
        self.show_own()
        try:
            yield
        finally:
            if shown:
                self.show_synchronized()
