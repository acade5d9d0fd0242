"""Keras 3's way of applying gradients.

`apply` filters, unscales, accumulates (`gradient_accumulation_steps`) and only then clips and updates.
`_clip_gradients` is called exactly once per update, with the gradients that are to be clipped: there they are
reduced. So no micro-batch is ever sent, and clipping sees the averaged gradients.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from .optimizer import DistributedMixin


class Keras3Mixin(DistributedMixin):
    """Reduces gradients right before they are clipped."""

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Updates the variables, with the gradients reduced over the ranks.

        Raises:
            RuntimeError: A LossScaleOptimizer around this one has decided, from this rank's gradients alone,
                whether to call it.
        """
        if _is_inside_loss_scale_optimizer():
            raise RuntimeError(
                "a LossScaleOptimizer around the DistributedOptimizer (compile() adds one under mixed_float16) "
                "looks at each rank's own gradients, and ranks would wait for each other for ever: wrap the other "
                "way round, hvdc.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer))"
            )
        aggregation = self._hvdc.aggregation
        if aggregation is None or len(grads) == 0:
            super().apply(grads, trainable_variables)  # type: ignore[misc]
            return
        if trainable_variables is None:
            trainable_variables = self._trainable_variables  # type: ignore[attr-defined]
        elif not self.built:  # type: ignore[has-type]
            self.build(trainable_variables)  # type: ignore[attr-defined]
            self.built = True
        reduced = aggregation.add(grads, trainable_variables)

        def update() -> tf.Tensor:
            super(Keras3Mixin, self).apply(reduced, trainable_variables)  # type: ignore[misc]
            return tf.constant(True)

        def wait() -> tf.Tensor:
            self._iterations.assign_add(1)  # type: ignore[attr-defined]
            return tf.constant(False)

        tf.cond(aggregation.is_step(), update, wait)

    def _backend_apply_gradients(self, grads: Sequence[Any], trainable_variables: Sequence[Any]) -> None:
        # `_clip_gradients` is not told which variables the gradients belong to.
        self.__dict__["_hvdc_variables"] = list(trainable_variables)
        super()._backend_apply_gradients(grads, trainable_variables)  # type: ignore[misc]

    def _clip_gradients(self, grads: Sequence[Any]) -> Sequence[Any]:
        if self._hvdc.aggregation is None:
            grads = self._hvdc.reduce(grads, self.__dict__["_hvdc_variables"])
        clipped: Sequence[Any] = super()._clip_gradients(grads)  # type: ignore[misc]
        return clipped


class LossScaleMixin(Keras3Mixin):
    """For a LossScaleOptimizer: gradients are reduced before it looks whether they are finite.

    So that all ranks find the same, and skip the same steps. Residuals are kept unscaled, to survive changes of
    the scale.
    """

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Updates the variables where the reduced gradients are finite."""
        if not self.built:
            self.build(trainable_variables)  # type: ignore[attr-defined]
            self.built = True
        variables = trainable_variables or self._trainable_variables  # type: ignore[attr-defined]
        scale = tf.convert_to_tensor(self.dynamic_scale)  # type: ignore[attr-defined]
        unscaled = [None if g is None else g / tf.cast(scale, g.dtype) for g in grads]
        reduced = self._hvdc.reduce(unscaled, variables)
        scaled = [None if g is None else g * tf.cast(scale, g.dtype) for g in reduced]
        super(Keras3Mixin, self).apply(scaled, trainable_variables)  # type: ignore[misc]


def _is_inside_loss_scale_optimizer() -> bool:
    frame: Any = sys._getframe(2)
    for _ in range(12):  # Keras's and TensorFlow's frames for the branch that is being traced
        if frame is None:
            return False
        if frame.f_code.co_name == "_stateful_handle_finite_grads":
            return not isinstance(frame.f_locals.get("self"), DistributedMixin)
        frame = frame.f_back
    return False


def mixin_for(optimizer: Any) -> type[Keras3Mixin]:
    """The mixin for a Keras 3 optimizer.

    Raises:
        TypeError: Keras runs on another backend than TensorFlow.
    """
    import keras

    if keras.backend.backend() != "tensorflow":
        raise TypeError(
            f"Keras runs on the {keras.backend.backend()} backend, hvd_compress needs TensorFlow's: "
            "set KERAS_BACKEND=tensorflow"
        )
    return LossScaleMixin if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) else Keras3Mixin
