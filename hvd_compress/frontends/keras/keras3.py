"""Keras 3's way of applying gradients.

`apply` filters, unscales, accumulates (`gradient_accumulation_steps`) and only then clips and updates.
`_clip_gradients` is called exactly once per update, with the gradients that are to be clipped: there they are
reduced. So no micro-batch is ever sent, and clipping sees the averaged gradients.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from .optimizer import DistributedMixin


class Keras3Mixin(DistributedMixin):
    """Reduces gradients right before they are clipped."""

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Updates the variables, with the gradients reduced over the ranks.

        Raises:
            RuntimeError: A LossScaleOptimizer with an `apply` of its own has decided, from this rank's
                gradients alone, whether to call this one.
        """
        distribution = self._hvdc
        aggregation, skip = distribution.aggregation, distribution.settings.on_nonfinite == "skip"
        if not self._is_reduced and _is_inside_loss_scale_optimizer():
            raise RuntimeError(
                "the LossScaleOptimizer around the DistributedOptimizer has an apply() of its own, which looks at "
                "each rank's own gradients, and ranks would wait for each other for ever: wrap the other way round, "
                "hvdc.DistributedOptimizer(LossScaleOptimizer(optimizer))"
            )
        if len(grads) and not self._is_reduced:
            self._check(list(grads), trainable_variables)
        if self._is_reduced or len(grads) == 0 or (aggregation is None and not skip):
            super().apply(grads, trainable_variables)  # type: ignore[misc]
            return
        if trainable_variables is None:
            trainable_variables = self._trainable_variables  # type: ignore[attr-defined]
        elif not self.built:  # type: ignore[has-type]
            self.build(trainable_variables)  # type: ignore[attr-defined]
            self.built = True
        variables = list(trainable_variables)
        # Keras divides by it in `apply`, after what is exchanged here: which is unscaled, as elsewhere.
        scale = self.loss_scale_factor  # type: ignore[attr-defined]
        if scale is not None:
            grads = [times(g, 1.0 / scale) for g in grads]
        reduced = distribution.add(grads, variables)

        def update() -> tf.Tensor:
            gradients = distribution.raise_if_told(reduced, variables, self.iterations)  # type: ignore[attr-defined]
            if scale is not None:
                gradients = [times(g, scale) for g in gradients]
            with self.gradients_are_reduced():
                super(Keras3Mixin, self).apply(gradients, variables)  # type: ignore[misc]
            return tf.constant(True)

        def step() -> tf.Tensor:
            if not skip:
                return update()
            return tf.cond(distribution.all_finite(reduced, variables), update, lambda: tf.constant(False))

        def wait() -> tf.Tensor:
            self._iterations.assign_add(1)  # type: ignore[attr-defined]
            return tf.constant(False)

        if aggregation is None:
            step()
        else:
            tf.cond(aggregation.is_step(), step, wait)

    def apply_gradients(self, grads_and_vars: Any) -> Any:
        """As Keras's; with nothing to apply, does nothing."""
        pairs = list(grads_and_vars)
        return super().apply_gradients(pairs) if pairs else None  # type: ignore[misc]

    def _check(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None) -> None:
        if trainable_variables is None:
            trainable_variables = self._trainable_variables  # type: ignore[attr-defined]
        variables, unknown = list(trainable_variables), []
        known = getattr(self, "_trainable_variables_indices", None)
        if self.built and known is not None:
            unknown = [v for v in variables if self._var_key(v) not in known]  # type: ignore[attr-defined]
        self._hvdc.check(grads, variables, unknown)

    def _backend_apply_gradients(self, grads: Sequence[Any], trainable_variables: Sequence[Any]) -> None:
        # `_clip_gradients` is not told which variables the gradients belong to.
        self.__dict__["_hvdc_variables"] = list(trainable_variables)
        super()._backend_apply_gradients(grads, trainable_variables)  # type: ignore[misc]

    def _clip_gradients(self, grads: Sequence[Any]) -> Sequence[Any]:
        if not self._is_reduced:
            variables = self.__dict__["_hvdc_variables"]
            grads = self._hvdc.reduce(grads, variables)
            grads = self._hvdc.raise_if_told(grads, variables, self.iterations)  # type: ignore[attr-defined]
        clipped: Sequence[Any] = super()._clip_gradients(grads)  # type: ignore[misc]
        return clipped

    @property
    def _is_reduced(self) -> bool:
        return "_hvdc_reduced" in self.__dict__

    @contextlib.contextmanager
    def gradients_are_reduced(self) -> Iterator[None]:
        """What is applied in this context is reduced already, and whether to apply it is decided."""
        self.__dict__["_hvdc_reduced"] = True
        try:
            yield
        finally:
            del self.__dict__["_hvdc_reduced"]


def _is_inside_loss_scale_optimizer() -> bool:
    frame: Any = sys._getframe(2)
    for _ in range(12):  # Keras's and TensorFlow's frames for the branch that is being traced
        if frame is None:
            return False
        if frame.f_code.co_name == "_stateful_handle_finite_grads":
            return not isinstance(frame.f_locals.get("self"), DistributedMixin)
        frame = frame.f_back
    return False


def times(gradient: Any, factor: tf.Tensor) -> Any:
    """The gradient times a loss scale or its inverse; float16, which cannot hold every scale, becomes float32."""
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(times(gradient.values, factor), gradient.indices, gradient.dense_shape)
    if gradient.dtype == tf.float16:
        gradient = tf.cast(gradient, tf.float32)
    return gradient * tf.cast(factor, gradient.dtype)


def mixin_for(optimizer: Any) -> type[Keras3Mixin]:
    """The mixin for a Keras 3 optimizer; prepares Keras's LossScaleOptimizer to be put around it.

    Raises:
        TypeError: Keras runs on another backend than TensorFlow.
    """
    import keras

    if keras.backend.backend() != "tensorflow":
        raise TypeError(
            f"Keras runs on the {keras.backend.backend()} backend, hvd_compress needs TensorFlow's: "
            "set KERAS_BACKEND=tensorflow"
        )
    from .loss_scaling import LossScaleMixin, reduce_before_check

    scaler = keras.optimizers.LossScaleOptimizer
    reduce_before_check(scaler)
    return LossScaleMixin if isinstance(optimizer, scaler) else Keras3Mixin
