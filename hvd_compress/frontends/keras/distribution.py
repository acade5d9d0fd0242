"""The distributed state of one optimizer, independent of the Keras version that calls it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Callable

import tensorflow as tf

from ...common import checks
from ...common.names import path_of
from ...engine import nonfinite
from ...engine.settings import Settings
from ..build import new_reducer
from ..local_gradients import reduce_shared
from .aggregation import LocalGradientAggregation


@dataclasses.dataclass(frozen=True)
class OptimizerSettings:
    """The arguments of `hvdc.DistributedOptimizer`."""

    reduction: Settings
    backward_passes_per_step: int
    average_aggregated_gradients: bool


class Distribution:
    """Reduces the gradients of one optimizer.

    Keras and TensorFlow must not track this object: its residuals differ from rank to rank, and must be neither
    broadcast nor saved with the model.

    Attributes:
        settings: How gradients are reduced.
        reducer: Reduces them and keeps the residuals.
        aggregation: Sums the gradients of several passes if `backward_passes_per_step` > 1, else None.
    """

    def __init__(self, settings: OptimizerSettings) -> None:
        self.settings = settings.reduction
        self.reducer = new_reducer(settings.reduction)
        self.aggregation = None
        if settings.backward_passes_per_step > 1:
            self.aggregation = LocalGradientAggregation(
                settings.backward_passes_per_step,
                self.reduce,
                settings.reduction.sparse_as_dense,
                settings.average_aggregated_gradients,
            )
        self._local: set[int] = set()  # ids of the variables whose gradients stay local

    def register_local_var(self, variable: Any) -> None:
        """Keeps the gradient of `variable` local to this rank."""
        self._local.add(id(variable))

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any], so_far: tf.Tensor | None = None) -> list[Any]:
        """Reduces the gradients over the ranks, except those of local variables; see `Reducer` for `so_far`."""
        return reduce_shared(self.reducer, gradients, variables, self._local, so_far)

    def add(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Adds the gradients of one pass, and reduces the sum if this pass completes a step."""
        if self.aggregation is None:
            return self.reduce(gradients, variables)
        return self.aggregation.add(gradients, variables)

    def update_if_complete(
        self, update: Callable[[], Any], iterations: Any, finite: Callable[[], tf.Tensor] | None = None
    ) -> None:
        """Calls `update` if this pass completes a step; otherwise only counts the pass.

        Args:
            update: Applies the reduced gradients.
            iterations: The optimizer's step counter, an integer variable.
            finite: Returns whether the update may be made, a bool scalar that is the same on all ranks. None always
                updates.
        """

        def updated() -> tf.Tensor:
            update()
            return tf.constant(True)

        def complete() -> tf.Tensor:
            if finite is None:
                return updated()
            return tf.cond(finite(), updated, lambda: tf.constant(False))

        def incomplete() -> tf.Tensor:
            iterations.assign_add(1)
            return tf.constant(False)

        if self.aggregation is None:
            complete()
        else:
            tf.cond(self.aggregation.is_step(), complete, incomplete)

    @checks.plain_errors
    def check(self, gradients: Sequence[Any], variables: Sequence[Any], unknown: Sequence[Any]) -> None:
        """Raises, before any exchange, the errors that Keras would raise after it.

        Args:
            gradients: One for each of `variables`, None where there is no gradient.
            variables: The variables to be updated, at least one.
            unknown: Those of `variables` that the optimizer was not built for.

        Raises:
            ValueError: No variable has a gradient (on this rank or, with another text, on another one), or there are
                unknown variables.
        """
        if unknown:
            raise ValueError(
                f"the optimizer was built for other variables, {path_of(unknown[0])} is not among them: call "
                "optimizer.build(variables) with all that it will ever update before the first step, or make a new one"
            )
        if all(gradient is None for gradient in gradients):
            self.reducer.agree(gradients, variables)
            raise ValueError("No gradients provided for any variable: the loss depends on none of them")

    def all_finite(self, reduced: Sequence[Any], variables: Sequence[Any]) -> tf.Tensor:
        """Whether all reduced gradients are finite; a bool scalar, the same on all ranks.

        Gradients of local variables are ignored, because other ranks do not see them.
        """
        return nonfinite.all_finite([g for g, v in zip(reduced, variables) if id(v) not in self._local])

    def raise_if_nonfinite(self, reduced: Sequence[Any], variables: Sequence[Any], iterations: Any) -> list[Any]:
        """Returns the reduced gradients; with `on_nonfinite="raise"`, raises if they are not finite.

        Raises:
            tf.errors.InvalidArgumentError: When the step runs: a reduced gradient is not finite.
        """
        if self.settings.on_nonfinite != "raise":
            return list(reduced)
        step = tf.convert_to_tensor(iterations) + 1
        return nonfinite.raise_unless(self.all_finite(reduced, variables), reduced, step)
