"""Distributed optimizers of Keras 3.

Keras's `apply` filters the gradients, unscales them, accumulates them (`gradient_accumulation_steps`), clips them
and updates the variables, in this order. It calls `_clip_gradients` exactly once per update. Gradients are reduced
there: no micro-batch is ever sent, and averaged gradients are clipped. Only the statistics of float8 layers, a few
numbers that Keras overwrites in each micro-batch, are reduced each time (`overwritten`).

Keras's LossScaleOptimizer checks the gradients of its own process, and calls its inner optimizer only if they are
finite. If one rank overflowed, the others would wait for it for ever. So gradients are unscaled, reduced and scaled
again before the check, and all ranks skip the same steps. Residuals are therefore unscaled and stay valid when the
scale changes. In a step in which any rank overflowed, they stay as they are.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Callable

import tensorflow as tf

from ...common import tracing
from ...common.gradients import with_values
from .distribution import DistributedMixin, Distribution
from .optimizer_state import innermost


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
        if len(grads) == 0:
            super().apply(grads, trainable_variables)  # type: ignore[misc]
            return
        distribution.begin_step(self._trainable_variables if self.built else variables)  # type: ignore[attr-defined,has-type]
        if distribution.aggregation is None and not skip:
            with tf.control_dependencies(tracing.data_of_step()):  # or `iterations` would count steps without data
                super().apply(grads, trainable_variables)  # type: ignore[misc]
            distribution.end_step()
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

    def _overwrite_variables_directly_with_gradients(self, grads: Any, vars: Any) -> Any:  # Keras's argument names
        if not self._is_reduced:
            grads = self._hvdc.reduce_overwritten(list(grads), list(vars))
        return super()._overwrite_variables_directly_with_gradients(grads, vars)  # type: ignore[misc]

    def _clip_gradients(self, grads: Sequence[Any]) -> Sequence[Any]:
        variables = self.__dict__["_hvdc_variables"]
        if not self._is_reduced:
            grads = self._hvdc.reduce(grads, variables)
            grads = self._hvdc.raise_if_nonfinite(grads, variables, self.iterations)  # type: ignore[attr-defined]
        return self._hvdc.shared_and_local(super()._clip_gradients, grads, variables)  # type: ignore[misc]

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


class LossScaleMixin(Keras3Mixin):
    """For a LossScaleOptimizer that `hvdc.DistributedOptimizer` wraps."""

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Updates the variables if the reduced gradients are finite."""
        _apply_reduced(self, self._hvdc, grads, trainable_variables, super(Keras3Mixin, self).apply)  # type: ignore[misc]


def reduce_before_check(scaler: type) -> None:
    """Makes Keras's LossScaleOptimizer, the class `scaler`, reduce gradients before it checks them.

    Under mixed_float16, `compile` wraps the optimizer in one by itself. So this replaces the class's public method
    `apply`, once, and how it is copied. It changes nothing if the inner optimizer is not distributed.
    """
    original: Callable[..., None] = scaler.apply  # type: ignore[attr-defined]
    if hasattr(original, "_hvdc_original"):
        return

    @functools.wraps(original)
    def apply(self: Any, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        inner = self.inner_optimizer
        if not isinstance(inner, Keras3Mixin):
            original(self, grads, trainable_variables)
            return

        def decide(reduced: Sequence[Any], variables: Sequence[Any] | None) -> None:
            with inner.gradients_are_reduced():
                original(self, reduced, variables)

        _apply_reduced(self, inner._hvdc, grads, trainable_variables, decide)

    apply._hvdc_original = original  # type: ignore[attr-defined]
    scaler.apply = apply  # type: ignore[attr-defined]
    if scaler.__reduce__ is not object.__reduce__:  # Keras's own way
        scaler.__copy__ = _copied  # type: ignore[attr-defined]
        scaler.__deepcopy__ = lambda self, memo: _copied(self)  # type: ignore[attr-defined]


def _copied(scaler: Any) -> Any:
    """A copy by Keras's own way, which saves and loads; its inner optimizer is distributed, too, if the original's is.

    What Keras saves is a plain optimizer.
    """
    load, arguments = scaler.__reduce__()
    copied = load(*arguments)
    if isinstance(scaler.inner_optimizer, Keras3Mixin):
        copied.inner_optimizer.__class__ = type(scaler.inner_optimizer)
    return copied


def _apply_reduced(
    scaler: Any,
    distribution: Distribution,
    grads: Sequence[Any],
    trainable_variables: Sequence[Any] | None,
    apply: Callable[[Sequence[Any], Sequence[Any] | None], None],
) -> None:
    """Calls `apply`, the LossScaleOptimizer's own, with reduced gradients in each pass that completes a step.

    Raises:
        ValueError: The optimizer accumulates gradients itself, behind the check.
    """
    passes = getattr(innermost(scaler), "gradient_accumulation_steps", None)
    if passes and distribution.rounds is None:
        raise ValueError(
            "a LossScaleOptimizer checks each micro-batch, so that with gradient_accumulation_steps each one would be "
            f"exchanged: {distribution.accumulate_instead(passes)}"
        )
    if not scaler.built:
        scaler.build(trainable_variables)
        scaler.built = True
    variables = trainable_variables or scaler._trainable_variables
    distribution.begin_step(scaler._trainable_variables or variables)
    scale = tf.convert_to_tensor(scaler.dynamic_scale)
    reduced = distribution.add([times(g, 1.0 / scale) for g in grads], variables)

    def update() -> None:
        gradients = distribution.skip_together(reduced, variables)
        apply([times(g, scale) for g in gradients], trainable_variables)

    distribution.update_if_complete(update, scaler.iterations)


def mixin_for(optimizer: Any) -> type[Keras3Mixin]:
    """The mixin for a Keras 3 optimizer; also prepares Keras's LossScaleOptimizer to wrap the result."""
    import keras

    if keras.backend.backend() != "tensorflow":
        raise TypeError(
            f"Keras runs on the {keras.backend.backend()} backend, hvd_compress needs TensorFlow's: "
            "set KERAS_BACKEND=tensorflow"
        )
    scaler = keras.optimizers.LossScaleOptimizer
    reduce_before_check(scaler)
    return LossScaleMixin if isinstance(optimizer, scaler) else Keras3Mixin


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
