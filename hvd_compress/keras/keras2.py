"""Keras 2's ways of applying gradients: tf_keras, tf.keras of TensorFlow 2.15, and their legacy optimizers.

As in Horovod, `compute_gradients` (which `minimize` and so `fit` call) returns reduced gradients. Where a custom
loop takes gradients from a tape and calls `apply_gradients`, they are reduced there. Keras 2 clips inside
`apply_gradients`, after the exchange in both cases.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from .optimizer import DistributedMixin


class Keras2Mixin(DistributedMixin):
    """Reduces gradients where they are computed, else where they are applied."""

    def compute_gradients(
        self, loss: Any, var_list: Any, tape: Any = None, **kwargs: Any
    ) -> list[tuple[Any, Any]]:
        """Gradients of `loss`, reduced over the ranks, with their variables."""
        return self._reduced_pairs(super().compute_gradients(loss, var_list, tape=tape, **kwargs))  # type: ignore[misc]

    def _compute_gradients(
        self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None
    ) -> list[tuple[Any, Any]]:
        """The legacy optimizers' name for it; Horovod has it on all."""
        base = super()
        if hasattr(base, "_compute_gradients"):
            if not callable(loss) and tape is None:
                raise ValueError("`tape` is required when a `Tensor` loss is passed.")
            return self._reduced_pairs(base._compute_gradients(loss, var_list, grad_loss, tape=tape))
        return self.compute_gradients(loss, var_list, tape=tape)

    def get_gradients(self, loss: Any, params: Sequence[Any]) -> list[Any]:
        """Gradients of `loss`, reduced over the ranks."""
        gradients = super().get_gradients(loss, params)  # type: ignore[misc]
        return [g for g, _ in self._reduced_pairs(list(zip(gradients, params)))]

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        """Updates the variables; reduces the gradients first, unless they come from `compute_gradients`."""
        pairs = list(grads_and_vars)
        if not pairs:
            return super().apply_gradients(pairs, *args, **kwargs)  # type: ignore[misc]
        if self.__dict__.pop("_hvdc_pending", None) != _identity([v for _, v in pairs]):
            pairs = self._reduced_pairs(pairs)
            self.__dict__.pop("_hvdc_pending")
        aggregation = self._hvdc.aggregation
        if aggregation is None:
            return super().apply_gradients(pairs, *args, **kwargs)  # type: ignore[misc]
        with tf.init_scope():
            self._build_before_cond([v for _, v in pairs])

        def update() -> tf.Tensor:
            super(Keras2Mixin, self).apply_gradients(pairs, *args, **kwargs)  # type: ignore[misc]
            return tf.constant(True)

        def wait() -> tf.Tensor:
            self.iterations.assign_add(1)  # type: ignore[attr-defined]
            return tf.constant(False)

        tf.cond(aggregation.is_step(), update, wait)
        return self.iterations  # type: ignore[attr-defined]

    def _build_before_cond(self, variables: list[Any]) -> None:
        """Creates slot variables outside of the branch that uses them first."""
        if hasattr(self, "_create_all_weights"):
            self._create_all_weights(variables)
        elif hasattr(self, "build"):
            self.build(variables)

    def _reduced_pairs(self, pairs: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        pairs = list(pairs)
        variables = [v for _, v in pairs]
        reduced = self._hvdc.add([g for g, _ in pairs], variables)
        self.__dict__["_hvdc_pending"] = _identity(variables)
        return list(zip(reduced, variables))


def _identity(variables: Sequence[Any]) -> tuple[Any, ...]:
    """These variables, in the step that is being traced (or eagerly)."""
    graph: Any = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    while getattr(getattr(graph, "outer_graph", None), "outer_graph", None) is not None:
        graph = graph.outer_graph  # out of a LossScaleOptimizer's tf.cond, say, to the whole step
    return (id(graph), *(id(variable) for variable in variables))
