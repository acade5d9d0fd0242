"""`backward_passes_per_step`: sums gradients locally over several passes before they are exchanged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable

import numpy as np
import tensorflow as tf

from ...checkpoint.plan_state import Member, PlanState
from ...common import tracing
from ...common.names import path_of
from ...engine.settings import Settings


class LocalGradientAggregation:
    """Sums the gradients of `backward_passes_per_step` passes, and reduces the sums over the ranks in the last one.

    Attributes:
        backward_passes_per_step: Passes per step.
        counter: Passes since the last reduction, an int32 `tf.Variable`.
    """

    def __init__(
        self,
        settings: Settings,
        reduce: Callable[[Sequence[Any], Sequence[Any]], list[Any]],
    ) -> None:
        self.backward_passes_per_step = settings.backward_passes_per_step
        self.counter = tf.Variable(0, trainable=False, name="aggregation_counter")
        self._reduce = reduce
        self._sparse_as_dense = settings.sparse_as_dense
        self._divisor = settings.backward_passes_per_step if settings.average_aggregated_gradients else 1
        self._sums: dict[int, tuple[str, tf.Variable]] = {}  # by the variable's id: its path, and the sum
        # Restored sums that have no variable yet, in the order of creation: path of the variable, and value.
        self._pending: list[tuple[str, np.ndarray]] = []

    def add(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Adds the gradients of one pass; some may be None.

        Returns:
            The reduced sums if this pass completes a step (`is_step()` is then True), otherwise the sums so far. None
            where the gradient is None.

        Raises:
            ValueError: A gradient is `tf.IndexedSlices`, and `sparse_as_dense` is False.
        """
        dense = {i: self._dense(gradient) for i, gradient in enumerate(gradients) if gradient is not None}
        sums = {i: self._sum(gradient, variables[i]) for i, gradient in dense.items()}
        totals = {i: sums[i].assign_add(gradient).read_value() for i, gradient in dense.items()}
        # Not in a step that fails because the data has ended: it may do so on one rank before, on another after this.
        with tf.control_dependencies(list(dense.values())[:1]):
            self.counter.assign_add(1)

        def complete() -> list[tf.Tensor]:
            all_reduced = self._reduce([totals.get(i) for i in range(len(gradients))], variables)
            self.counter.assign(0)
            for total in sums.values():
                total.assign(tf.zeros_like(total))
            reduced = [all_reduced[i] for i in totals]
            return reduced if self._divisor == 1 else [x / tf.cast(self._divisor, x.dtype) for x in reduced]

        is_last = tf.equal(self.counter, self.backward_passes_per_step)
        results = dict(zip(totals, tf.cond(is_last, complete, lambda: list(totals.values()))))
        return [results.get(i) for i in range(len(gradients))]

    def is_step(self) -> tf.Tensor:
        """Whether the last pass completed a step; a bool scalar."""
        return tf.equal(self.counter, 0)

    def state(self) -> PlanState:
        """The sums so far and the counter, to be saved: this rank's gradients that have not been exchanged yet."""
        sums = [(path, variable.numpy()) for path, variable in self._sums.values()] + self._pending
        members = [Member(path, value.shape, "dense") for path, value in sums]
        tensors = {"sums": {i: value for i, (_, value) in enumerate(sums)}}
        return PlanState(members, tensors, {"sums": []}, [], {"counter": np.asarray(self.counter.numpy())})

    def restore(self, state: PlanState) -> None:
        """Restores a saved state. Sums whose variables do not exist yet are restored when they are created."""
        self.counter.assign(state.replicated_state["counter"])
        saved = [(member.path, state.tensors["sums"][i]) for i, member in enumerate(state.members)]
        for i, (_, variable) in enumerate(self._sums.values()):
            variable.assign(saved[i][1] if i < len(saved) else tf.zeros_like(variable))
        self._pending = saved[len(self._sums) :]

    def _dense(self, gradient: Any) -> Any:
        if not isinstance(gradient, tf.IndexedSlices):
            return gradient
        if not self._sparse_as_dense:
            raise ValueError(
                "IndexedSlices are not supported when `backward_passes_per_step` > 1 and `sparse_as_dense` is False."
            )
        return tf.convert_to_tensor(gradient)

    def _sum(self, gradient: Any, variable: Any) -> tf.Variable:
        if id(variable) not in self._sums:
            with tf.init_scope():
                start = self._pending.pop(0)[1] if self._pending else tf.zeros(variable.shape, gradient.dtype)
                # With a plain tf.Variable, TensorFlow would trace the step twice on a rank that joins an elastic job,
                # and the names of its collectives would differ from those of the other ranks.
                total = tracing.variable(start, "aggregated_gradient")
            self._sums[id(variable)] = path_of(variable), total
        return self._sums[id(variable)][1]
