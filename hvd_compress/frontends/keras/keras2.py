"""Distributed optimizers of Keras 2: `tf_keras`, `tf.keras` of TensorFlow 2.15, and their legacy optimizers.

As in Horovod, `compute_gradients`, which `minimize` and therefore `fit` call, returns reduced gradients. If a
custom loop takes gradients from a tape, `apply_gradients` reduces them. Keras 2 clips inside `apply_gradients`: in
both cases after the exchange.

A LossScaleOptimizer around this optimizer unscales the gradients, calls `aggregate_gradients`, and then checks whether
they are finite. `aggregate_gradients` reduces them, so all ranks skip the same steps, and residuals are unscaled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ...common.tracing import data_of_step, outermost_graph
from .distribution import DistributedMixin
from .optimizer_state import create_variables


class Keras2Mixin(DistributedMixin):
    """Reduces gradients when they are computed, or else when they are applied."""

    def compute_gradients(self, loss: Any, var_list: Any, tape: Any = None, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Pairs of (gradient, variable) of `loss`; reduced, unless a LossScaleOptimizer has yet to unscale them."""
        pairs = super().compute_gradients(loss, var_list, tape=tape, **kwargs)  # type: ignore[misc]
        return self._reduced_unless_scaled(pairs)

    def _compute_gradients(
        self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None
    ) -> list[tuple[Any, Any]]:
        """The legacy optimizers' name of `compute_gradients`; Horovod defines it for all optimizers."""
        base = super()
        if not hasattr(base, "_compute_gradients"):
            return self.compute_gradients(loss, var_list, tape=tape)
        if not callable(loss) and tape is None:
            raise ValueError("`tape` is required when a `Tensor` loss is passed.")
        return self._reduced_unless_scaled(base._compute_gradients(loss, var_list, grad_loss, tape=tape))

    def get_gradients(self, loss: Any, params: Sequence[Any]) -> list[Any]:
        """Gradients of `loss`, one for each of `params`, reduced over the ranks."""
        gradients = super().get_gradients(loss, params)  # type: ignore[misc]
        return [g for g, _ in self._reduced_unless_scaled(list(zip(gradients, params)))]

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        """Updates the variables; reduces the gradients first, unless they come from `compute_gradients`."""
        pairs = list(grads_and_vars)
        if not pairs:
            return super().apply_gradients(pairs, *args, **kwargs)  # type: ignore[misc]
        known = getattr(self, "_index_dict", None) if getattr(self, "_built", False) else None
        unknown = [v for _, v in pairs if known is not None and self._var_key(v) not in known]  # type: ignore[attr-defined]
        self._hvdc.check([g for g, _ in pairs], [v for _, v in pairs], unknown)
        if self._hvdc.rounds is not None and self._is_scaled:
            raise RuntimeError(
                "the LossScaleOptimizer around the DistributedOptimizer looks at each rank's own gradients, so that "
                "ranks would count different local_steps: wrap the other way round, "
                "hvdc.DistributedOptimizer(LossScaleOptimizer(optimizer), ...)"
            )
        self._hvdc.begin_step([v for _, v in pairs])
        if self.__dict__.pop("_hvdc_pending", None) != _identity(pairs):
            if self._is_scaled:
                raise RuntimeError(
                    "the LossScaleOptimizer around the DistributedOptimizer was told not to aggregate gradients and "
                    "looks at each rank's own, so that ranks would wait for each other for ever: leave out "
                    "skip_gradients_aggregation and experimental_aggregate_gradients"
                )
            pairs = self._reduced_pairs(pairs)
            self.__dict__.pop("_hvdc_pending")
        distribution = self._hvdc
        reduced, variables = [g for g, _ in pairs], [v for _, v in pairs]
        # A LossScaleOptimizer, around this optimizer or this optimizer itself, handles non-finite gradients.
        scaler_decides = self._is_scaled or hasattr(self, "get_scaled_loss")
        skip = distribution.settings.on_nonfinite == "skip" and not scaler_decides

        def update() -> Any:
            gradients = reduced
            if getattr(self, "dynamic", False):  # a LossScaleOptimizer itself, which checks them
                gradients = distribution.skip_together(reduced, variables)
            if not scaler_decides:
                gradients = distribution.raise_if_nonfinite(reduced, variables, self.iterations)  # type: ignore[attr-defined]
            self.__dict__["_hvdc_variables"] = [v for g, v in zip(gradients, variables) if g is not None]
            return super(Keras2Mixin, self).apply_gradients(list(zip(gradients, variables)), *args, **kwargs)  # type: ignore[misc]

        if distribution.aggregation is None and not skip:
            with tf.control_dependencies(data_of_step()):  # or `iterations` would count steps without data
                result = update()
            distribution.end_step()
            return result
        with tf.init_scope():
            # Outside of the branch of tf.cond that uses the slot variables first.
            create_variables(self, variables)
        finite = (lambda: distribution.all_finite(reduced, variables)) if skip else None
        distribution.update_if_complete(update, self.iterations, finite)  # type: ignore[attr-defined]
        return self.iterations  # type: ignore[attr-defined]

    def aggregate_gradients(self, grads_and_vars: Any) -> list[tuple[Any, Any]]:
        """Reduces the gradients; a LossScaleOptimizer calls this before it checks whether they are finite."""
        return super().aggregate_gradients(self._reduced_for_scaler(grads_and_vars))  # type: ignore[misc]

    def _aggregate_gradients(self, grads_and_vars: Any) -> Any:
        """The legacy optimizers' name of `aggregate_gradients`."""
        return super()._aggregate_gradients(self._reduced_for_scaler(grads_and_vars))  # type: ignore[misc]

    def _clip_gradients(self, grads: Sequence[Any]) -> list[Any]:
        clip, variables = super()._clip_gradients, self.__dict__["_hvdc_variables"]  # type: ignore[misc]
        return self._hvdc.shared_and_local(clip, grads, variables)

    def _transform_gradients(self, grads_and_vars: Any) -> list[Any]:
        """The legacy optimizers clip in here."""
        pairs = list(grads_and_vars)
        return self._hvdc.shared_and_local(super()._transform_gradients, pairs, [v for _, v in pairs])  # type: ignore[misc]

    @property
    def _is_scaled(self) -> bool:
        """Whether a LossScaleOptimizer wraps this optimizer."""
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
        reduced = self._reduced_pairs(pairs)
        variables = [v for _, v in reduced]
        return list(zip(self._hvdc.skip_together([g for g, _ in reduced], variables), variables))

    def _reduced_unless_scaled(self, pairs: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        return list(pairs) if self._is_scaled else self._reduced_pairs(list(pairs))

    def _reduced_pairs(self, pairs: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        gradients, variables = [g for g, _ in pairs], [v for _, v in pairs]
        reduced = self._hvdc.add(gradients, variables)
        self.__dict__["_hvdc_pending"] = _identity(pairs)
        return list(zip(reduced, variables))


def _identity(pairs: Sequence[tuple[Any, Any]]) -> tuple[Any, ...]:
    """Identifies the variables with a gradient, and the step that is being traced."""
    # The outermost graph: a LossScaleOptimizer calls from a graph of its own, a branch of tf.cond.
    graph = None if tf.executing_eagerly() else outermost_graph()
    return (id(graph), *(id(variable) for gradient, variable in pairs if gradient is not None))
