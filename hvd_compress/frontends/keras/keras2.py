"""Keras 2's ways of applying gradients: tf_keras, tf.keras of TensorFlow 2.15, and their legacy optimizers.

As in Horovod, `compute_gradients` (which `minimize` and so `fit` call) returns reduced gradients. Where a custom
loop takes gradients from a tape and calls `apply_gradients`, they are reduced there. Keras 2 clips inside
`apply_gradients`, after the exchange in both cases.

A LossScaleOptimizer around this one unscales gradients, calls `aggregate_gradients`, and looks then whether they are
finite: there they are reduced, so that all ranks skip the same steps and residuals are kept unscaled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ...common.tracing import outermost_graph
from .optimizer import DistributedMixin


class Keras2Mixin(DistributedMixin):
    """Reduces gradients where they are computed, else where they are applied."""

    def compute_gradients(
        self, loss: Any, var_list: Any, tape: Any = None, **kwargs: Any
    ) -> list[tuple[Any, Any]]:
        """Gradients of `loss`, with their variables; reduced, unless a LossScaleOptimizer has yet to unscale them."""
        pairs = super().compute_gradients(loss, var_list, tape=tape, **kwargs)  # type: ignore[misc]
        return pairs if self._is_scaled else self._reduced_pairs(pairs)

    def _compute_gradients(
        self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None
    ) -> list[tuple[Any, Any]]:
        """The legacy optimizers' name for it; Horovod has it on all."""
        base = super()
        if hasattr(base, "_compute_gradients"):
            if not callable(loss) and tape is None:
                raise ValueError("`tape` is required when a `Tensor` loss is passed.")
            pairs = base._compute_gradients(loss, var_list, grad_loss, tape=tape)
            return pairs if self._is_scaled else self._reduced_pairs(pairs)
        return self.compute_gradients(loss, var_list, tape=tape)

    def get_gradients(self, loss: Any, params: Sequence[Any]) -> list[Any]:
        """Gradients of `loss`, reduced over the ranks."""
        gradients = super().get_gradients(loss, params)  # type: ignore[misc]
        if self._is_scaled:
            return list(gradients)
        return [g for g, _ in self._reduced_pairs(list(zip(gradients, params)))]

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        """Updates the variables; reduces the gradients first, unless they come from `compute_gradients`."""
        pairs = list(grads_and_vars)
        if not pairs:
            return super().apply_gradients(pairs, *args, **kwargs)  # type: ignore[misc]
        known = getattr(self, "_index_dict", None) if getattr(self, "_built", False) else None
        unknown = [v for _, v in pairs if known is not None and self._var_key(v) not in known]  # type: ignore[attr-defined]
        self._hvdc.check([g for g, _ in pairs], [v for _, v in pairs], unknown)
        if self.__dict__.pop("_hvdc_pending", None) != _identity(pairs):
            if self._is_scaled:
                raise RuntimeError(
                    "the LossScaleOptimizer around the DistributedOptimizer was told not to aggregate gradients and "
                    "looks at each rank's own, so that ranks would wait for each other for ever: leave out "
                    "skip_gradients_aggregation and experimental_aggregate_gradients"
                )
            pairs = self._reduced_pairs(pairs)
            self.__dict__.pop("_hvdc_pending")
        distribution, aggregation = self._hvdc, self._hvdc.aggregation
        reduced, variables = [g for g, _ in pairs], [v for _, v in pairs]
        # A LossScaleOptimizer, around this one or this one itself, decides by itself.
        decides = not self._is_scaled and not hasattr(self, "get_scaled_loss")
        skip = decides and distribution.settings.on_nonfinite == "skip"

        def apply() -> Any:
            gradients = reduced
            if decides:
                gradients = distribution.raise_if_told(reduced, variables, self.iterations)  # type: ignore[attr-defined]
            return super(Keras2Mixin, self).apply_gradients(list(zip(gradients, variables)), *args, **kwargs)  # type: ignore[misc]

        if aggregation is None and not skip:
            return apply()
        with tf.init_scope():
            self._build_before_cond(variables)

        def update() -> tf.Tensor:
            apply()
            return tf.constant(True)

        def step() -> tf.Tensor:
            if not skip:
                return update()
            return tf.cond(distribution.all_finite(reduced, variables), update, lambda: tf.constant(False))

        def wait() -> tf.Tensor:
            self.iterations.assign_add(1)  # type: ignore[attr-defined]
            return tf.constant(False)

        if aggregation is None:
            step()
        else:
            tf.cond(aggregation.is_step(), step, wait)
        return self.iterations  # type: ignore[attr-defined]

    def aggregate_gradients(self, grads_and_vars: Any) -> list[tuple[Any, Any]]:
        """What a LossScaleOptimizer calls before it looks at the gradients: reduces them."""
        return super().aggregate_gradients(self._reduced_for_scaler(grads_and_vars))  # type: ignore[misc]

    def _aggregate_gradients(self, grads_and_vars: Any) -> Any:
        """The legacy optimizers' name for it."""
        return super()._aggregate_gradients(self._reduced_for_scaler(grads_and_vars))  # type: ignore[misc]

    @property
    def _is_scaled(self) -> bool:
        """Whether a LossScaleOptimizer is around this one."""
        return getattr(self, "_is_wrapped_by_loss_scale_optimizer", False)

    def _reduced_for_scaler(self, grads_and_vars: Any) -> list[tuple[Any, Any]]:
        pairs = list(grads_and_vars)
        if not self._is_scaled:
            return pairs
        if self._hvdc.aggregation is not None:
            raise RuntimeError(
                "a LossScaleOptimizer around the DistributedOptimizer looks at each rank's own passes, so that ranks "
                "would scale differently with backward_passes_per_step > 1: wrap the other way round, "
                "hvdc.DistributedOptimizer(LossScaleOptimizer(optimizer))"
            )
        return self._reduced_pairs(pairs)

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
        self.__dict__["_hvdc_pending"] = _identity(pairs)
        return list(zip(reduced, variables))


def _identity(pairs: Sequence[tuple[Any, Any]]) -> tuple[Any, ...]:
    """These gradients' variables, in the step that is being traced (or eagerly)."""
    # The whole step's, not that of a LossScaleOptimizer's tf.cond, say.
    graph = None if tf.executing_eagerly() else outermost_graph()
    return (id(graph), *(id(variable) for gradient, variable in pairs if gradient is not None))
