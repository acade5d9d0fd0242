"""Steps of a reducer, called from one traced function as in training, for tests of `auto`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import introspect
import numpy as np
import tensorflow as tf


class ReducerTraining:
    """A reducer and its steps.

    Args:
        rank: The rank of this process.
        draw: From a rank and a step, the gradients of that step.
        spec: The reducer's compression.
        watched: Whether a monitor watches the reducer.
        **settings: Further settings of the reducer.
    """

    def __init__(
        self, rank: int, draw: Callable[[int, int], list[np.ndarray]], spec: str, watched: bool = False, **settings: Any
    ) -> None:
        self.rank, self.traces, self.steps = rank, 0, 0
        self.reducer = introspect.new_reducer(spec, watched, **settings)
        self.variables = [tf.Variable(tf.zeros(x.shape), name=f"v{i}") for i, x in enumerate(draw(rank, 0))]
        self._draw = draw

        @tf.function(autograph=False)
        def step(*tensors):
            self.traces += 1
            return self.reducer(list(tensors), self.variables)

        self._step = step

    def shared(self) -> ReducerTraining:
        """Traced at once, so that many tests can begin with it as if it were new."""
        self._rewind = introspect.rewinder(self._step, *map(tf.constant, self._draw(self.rank, 0)))
        return self

    def rewound(self) -> ReducerTraining:
        self.steps = 0
        self._rewind()
        return self

    def step(self, values: Sequence[np.ndarray] | None = None) -> list[np.ndarray]:
        """Reduces the values, or the step's own gradients."""
        values = self._draw(self.rank, self.steps) if values is None else values
        self.steps += 1
        return [tensor.numpy() for tensor in self._step(*map(tf.constant, values))]

    @property
    def plan(self) -> Any:
        return introspect.plan_of(self.reducer)

    @property
    def selector(self) -> Any:
        return introspect.selector_state(self.plan)

    def choose(self, candidate: int | Sequence[int]) -> None:
        """As if all buckets had been switched to it."""
        introspect.force_choice(self.plan, candidate)

    def residuals(self) -> list[np.ndarray]:
        """Every gradient's, float64."""
        return introspect.residuals(self.plan)
