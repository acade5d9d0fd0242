"""What makes an optimizer distributed, apart from Keras's ways of calling it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ...common import checks
from ...common.names import path_of
from ...engine import nonfinite
from ...engine.reducer import scale_local_gradient
from ...engine.settings import Settings
from ..build import new_reducer
from .aggregation import LocalGradientAggregation


@dataclasses.dataclass(frozen=True)
class OptimizerSettings:
    """The arguments of `hvdc.DistributedOptimizer`."""

    reduction: Settings
    backward_passes_per_step: int
    average_aggregated_gradients: bool


class Distribution:
    """The distributed state of one optimizer: its reducer, its residuals, what is local.

    Deliberately nothing that Keras or TensorFlow would track: residuals are rank-local, and must be
    neither broadcast nor saved with the model.

    Attributes:
        aggregation: The helper for `backward_passes_per_step` > 1, else None.
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
        self._local: set[int] = set()

    def register_local_var(self, variable: Any) -> None:
        """Keeps the gradient of `variable` local to this rank."""
        self._local.add(id(variable))

    def reduce(
        self, gradients: Sequence[Any], variables: Sequence[Any], so_far: tf.Tensor | None = None
    ) -> list[Any]:
        """Reduces the gradients over the ranks, but for those of local variables; see `Reducer` for `so_far`."""
        result = list(gradients)
        shared = [i for i, variable in enumerate(variables) if id(variable) not in self._local]
        reduced = self.reducer([gradients[i] for i in shared], [variables[i] for i in shared], so_far)
        for i, gradient in zip(shared, reduced):
            result[i] = gradient
        if self._local and self.settings.scale_local_gradients:
            for i in set(range(len(result))) - set(shared):
                result[i] = scale_local_gradient(result[i], self.settings.process_set.size())
        return result

    @checks.plain_errors
    def check(self, gradients: Sequence[Any], variables: Sequence[Any], unknown: Sequence[Any]) -> None:
        """Refuses, before any exchange, what the optimizer would refuse after it, and in many lines.

        Args:
            gradients: One for each of `variables`, None where there is none.
            variables: What is to be updated; at least one.
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

        Gradients of local variables do not count, which other ranks do not see.
        """
        return nonfinite.all_finite([g for g, v in zip(reduced, variables) if id(v) not in self._local])

    def raise_if_told(self, reduced: Sequence[Any], variables: Sequence[Any], iterations: Any) -> list[Any]:
        """The reduced gradients; raises where they are not finite and `on_nonfinite` is "raise".

        Raises:
            tf.errors.InvalidArgumentError: So it is.
        """
        if self.settings.on_nonfinite != "raise":
            return list(reduced)
        step = tf.convert_to_tensor(iterations) + 1
        return nonfinite.raise_unless(self.all_finite(reduced, variables), reduced, step)

    def add(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Reduces, at once or when `backward_passes_per_step` passes have come together."""
        if self.aggregation is None:
            return self.reduce(gradients, variables)
        return self.aggregation.add(gradients, variables)
