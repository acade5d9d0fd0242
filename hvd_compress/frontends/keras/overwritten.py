"""Variables that Keras overwrites with their gradients.

The layers of float8 keep the largest magnitudes of the last steps there, and the scales that follow from them. All
ranks need the largest of any rank: with a smaller one, values of other ranks would be cut off.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from ...common import tracing
from ...engine.reducer import Reducer, check_not_in_xla


def is_overwritten(variable: Any) -> bool:
    """Whether Keras assigns the variable's gradient to it, in place of an update."""
    return bool(getattr(variable, "overwrite_with_gradient", False))


class OverwrittenVariables:
    """Reduces such gradients, and other numbers, to their maximum over the ranks."""

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer
        # By graph: the calls so far, for the names of collectives; see `Step`.
        self._traces: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """The largest values of any rank, of dtype float32, in the shapes of the variables.

        Raises:
            ValueError: Ranks disagree on the variables or on settings.
        """
        process_set = self._reducer.settings.process_set
        if not variables or not process_set.included() or process_set.size() == 1:
            return list(gradients)
        check_not_in_xla()
        self._reducer.agree_once(gradients, variables)
        sizes = [int(np.prod(variable.shape)) for variable in variables]
        packed = tf.concat([tf.reshape(tf.cast(gradient, tf.float32), [-1]) for gradient in gradients], 0)
        largest = self.largest(tf.ensure_shape(packed, [sum(sizes)]))
        return [tf.reshape(part, v.shape) for part, v in zip(tf.split(largest, sizes), variables)]

    def keep_largest(self, variables: Sequence[tf.Variable]) -> None:
        """Assigns the largest values of any rank to float variables. All ranks call it together."""
        values = self.reduce([variable.read_value() for variable in variables], variables)
        for variable, value in zip(variables, values):
            variable.assign(tf.cast(value, variable.dtype))

    def largest(self, values: tf.Tensor) -> tf.Tensor:
        """The largest values of any rank, element by element. All ranks call it together."""
        process_set = self._reducer.settings.process_set
        if not process_set.included() or process_set.size() == 1:
            return values
        return hvd.allreduce(values, op=hvd.Max, name=self._name(), ignore_name_scope=True, process_set=process_set)

    def _name(self) -> str:
        index = 0
        if not tf.executing_eagerly():
            graph = tracing.function_graph()
            index = self._traces[graph] = self._traces.get(graph, -1) + 1
        return f"{self._reducer.name}_overwritten_{index}"
