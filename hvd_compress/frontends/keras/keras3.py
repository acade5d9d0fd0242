"""Distributed optimizers of Keras 3.

Keras's `apply` filters the gradients, unscales them, accumulates them (`gradient_accumulation_steps`), clips them
and updates the variables, in this order. It calls `_clip_gradients` exactly once per update. Gradients are reduced
there: no micro-batch is ever sent, and averaged gradients are clipped.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from ...common.gradients import with_values
from .distribution import DistributedMixin


class Keras3Mixin(DistributedMixin):
    """Reduces gradients right before they are clipped."""

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Updates the variables, with the gradients reduced over the ranks.

        Raises:
            RuntimeError: A LossScaleOptimizer with an `apply` of its own calls this method, and decides from this
                rank's gradients alone whether to do so.
        """
        if self._is_reduced:
            super().apply(grads, trainable_variables)  # type: ignore[misc]
            return
        if _is_inside_loss_scale_optimizer():
            raise RuntimeError(
                "the LossScaleOptimizer around the DistributedOptimizer has an apply() of its own, which looks at "
                "each rank's own gradients, and ranks would wait for each other for ever: wrap the other way round, "
                "hvdc.DistributedOptimizer(LossScaleOptimizer(optimizer))"
            )
        distribution = self._hvdc
        skip = distribution.settings.on_nonfinite == "skip"
        variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)  # type: ignore[attr-defined]
        if len(grads):
            known = getattr(self, "_trainable_variables_indices", None) if self.built else None  # type: ignore[has-type]
            unknown = [v for v in variables if known is not None and self._var_key(v) not in known]  # type: ignore[attr-defined]
            distribution.check(list(grads), variables, unknown)
        if len(grads) == 0 or (distribution.aggregation is None and not skip):
            super().apply(grads, trainable_variables)  # type: ignore[misc]
            return
        if trainable_variables is not None and not self.built:  # type: ignore[has-type]
            self.build(variables)  # type: ignore[attr-defined]
            self.built = True
        # Gradients are always exchanged unscaled. Keras's `apply` unscales them later, so they are scaled again for it.
        scale = self.loss_scale_factor  # type: ignore[attr-defined]
        if scale is not None:
            grads = [times(g, 1.0 / scale) for g in grads]
        reduced = distribution.add(grads, variables)

        def update() -> None:
            gradients = distribution.raise_if_nonfinite(reduced, variables, self.iterations)  # type: ignore[attr-defined]
            if scale is not None:
                gradients = [times(g, scale) for g in gradients]
            with self.gradients_are_reduced():
                super(Keras3Mixin, self).apply(gradients, variables)  # type: ignore[misc]

        finite = (lambda: distribution.all_finite(reduced, variables)) if skip else None
        distribution.update_if_complete(update, self._iterations, finite)  # type: ignore[attr-defined]

    def apply_gradients(self, grads_and_vars: Any) -> Any:
        """Applies pairs of (gradient, variable); does nothing if there are none."""
        pairs = list(grads_and_vars)
        return super().apply_gradients(pairs) if pairs else None  # type: ignore[misc]

    def _backend_apply_gradients(self, grads: Sequence[Any], trainable_variables: Sequence[Any]) -> None:
        # `_clip_gradients` does not get the variables, but needs them.
        self.__dict__["_hvdc_variables"] = list(trainable_variables)
        super()._backend_apply_gradients(grads, trainable_variables)  # type: ignore[misc]

    def _clip_gradients(self, grads: Sequence[Any]) -> Sequence[Any]:
        if not self._is_reduced:
            variables = self.__dict__["_hvdc_variables"]
            grads = self._hvdc.reduce(grads, variables)
            grads = self._hvdc.raise_if_nonfinite(grads, variables, self.iterations)  # type: ignore[attr-defined]
        clipped: Sequence[Any] = super()._clip_gradients(grads)  # type: ignore[misc]
        return clipped

    @property
    def _is_reduced(self) -> bool:
        return "_hvdc_reduced" in self.__dict__

    @contextlib.contextmanager
    def gradients_are_reduced(self) -> Iterator[None]:
        """In this context, `apply` gets reduced gradients and applies them without further checks."""
        self.__dict__["_hvdc_reduced"] = True
        try:
            yield
        finally:
            del self.__dict__["_hvdc_reduced"]


def _is_inside_loss_scale_optimizer() -> bool:
    frame: Any = sys._getframe(2)
    for _ in range(12):  # Keras and TensorFlow have fewer frames between the two
        if frame is None:
            return False
        if frame.f_code.co_name == "_stateful_handle_finite_grads":
            return not isinstance(frame.f_locals.get("self"), DistributedMixin)
        frame = frame.f_back
    return False


def times(gradient: Any, factor: tf.Tensor) -> Any:
    """The gradient times a loss scale or its inverse. float16 becomes float32, because it cannot hold every scale."""

    def scaled(values: tf.Tensor) -> tf.Tensor:
        if values.dtype == tf.float16:
            values = tf.cast(values, tf.float32)
        return values * tf.cast(factor, values.dtype)

    return with_values(gradient, scaled)
