"""`backward_passes_per_step`: sums gradients locally over several passes before they are exchanged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable

import numpy as np
import tensorflow as tf

from ...checkpoint.plan_state import Member, PlanState
from ...common import tracing
from ...common.names import path_of


class LocalGradientAggregation:
    """Sums the gradients of `backward_passes_per_step` passes, and reduces the sums over the ranks in the last one.

    Attributes:
        backward_passes_per_step: Passes per step.
        counter: Passes since the last reduction, an int32 `tf.Variable`.
    """

    def __init__(
        self,
        backward_passes_per_step: int,
        reduce: Callable[[Sequence[Any], Sequence[Any]], list[Any]],
        sparse_as_dense: bool,
        average_aggregated_gradients: bool,
    ) -> None:
        self.backward_passes_per_step = backward_passes_per_step
        self.counter = tf.Variable(0, trainable=False, name="aggregation_counter")
        self._reduce = reduce
        self._sparse_as_dense = sparse_as_dense
        self._divisor = backward_passes_per_step if average_aggregated_gradients else 1
        self._sums: dict[int, tf.Variable] = {}
        self._paths: list[str] = []  # of the variables that the sums belong to
        # Restored sums that have no variable yet, in the order of creation: path of the variable, and value.
        self._pending: list[tuple[str, np.ndarray]] = []

    def add(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Adds the gradients of one pass.

        Args:
            gradients: One for each of `variables`; None where there is no gradient.
            variables: The trained variables.

        Returns:
            The reduced sums if this pass completes a step (`is_step()` is then True), otherwise the sums so far. None
            where the gradient is None.

        Raises:
            ValueError: A gradient is `tf.IndexedSlices`, and `sparse_as_dense` is False.
        """
        dense = [self._dense(gradient) for gradient in gradients]
        sums = [self._sum(g, v) for g, v in zip(dense, variables)]
        totals = [None if s is None else s.assign_add(g).read_value() for s, g in zip(sums, dense)]
        self.counter.assign_add(1)
        present = [i for i, total in enumerate(totals) if total is not None]

        def complete() -> list[tf.Tensor]:
            reduced = self._reduce(totals, variables)
            self.counter.assign(0)
            for total in sums:
                if total is not None:
                    total.assign(tf.zeros_like(total))
            return [
                reduced[i] if self._divisor == 1 else reduced[i] / tf.cast(self._divisor, reduced[i].dtype)
                for i in present
            ]

        results = tf.cond(
            tf.equal(self.counter, self.backward_passes_per_step),
            complete,
            lambda: [totals[i] for i in present],
        )
        for i, result in zip(present, results):
            totals[i] = result
        return totals

    def is_step(self) -> tf.Tensor:
        """Whether the last pass completed a step; a bool scalar."""
        return tf.equal(self.counter, 0)

    def state(self) -> PlanState:
        """The sums so far and the counter, to be saved: this rank's gradients that have not been exchanged yet."""
        current = zip(self._paths, (variable.numpy() for variable in self._sums.values()))
        sums = dict(enumerate([*current, *self._pending]))
        members = [Member(path, value.shape, "dense") for path, value in sums.values()]
        tensors = {"sums": {i: value for i, (_, value) in sums.items()}}
        return PlanState(members, tensors, {"sums": []}, [], {"counter": np.asarray(self.counter.numpy())})

    def restore(self, state: PlanState) -> None:
        """Restores a saved state. Sums whose variables do not exist yet are restored when they are created."""
        self.counter.assign(state.replicated_state["counter"])
        saved = [(member.path, state.tensors["sums"][i]) for i, member in enumerate(state.members)]
        for i, variable in enumerate(self._sums.values()):
            variable.assign(saved[i][1] if i < len(saved) else tf.zeros_like(variable))
        self._pending = saved[len(self._sums) :]

    def _dense(self, gradient: Any) -> Any:
        if isinstance(gradient, tf.IndexedSlices):
            if not self._sparse_as_dense:
                raise ValueError(
                    "IndexedSlices are not supported when `backward_passes_per_step` > 1 and "
                    "`sparse_as_dense` is False."
                )
            return tf.convert_to_tensor(gradient)
        return gradient

    def _sum(self, gradient: Any, variable: Any) -> tf.Variable | None:
        if gradient is None:
            return None
        if id(variable) not in self._sums:
            with tf.init_scope():
                saved = self._pending.pop(0)[1] if self._pending else None
                start = tf.zeros(variable.shape, gradient.dtype) if saved is None else saved
                # With a plain tf.Variable, TensorFlow would trace the step twice on a rank that joins an elastic job,
                # and the names of its collectives would differ from those of the other ranks.
                self._sums[id(variable)] = tracing.variable(start, "aggregated_gradient")
            self._paths.append(path_of(variable))
        return self._sums[id(variable)]
