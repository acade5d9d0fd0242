"""Loss scaling on Keras 3: all ranks skip the same steps.

Keras's LossScaleOptimizer checks the gradients of its own process, and calls its inner optimizer only if they are
finite. If one rank overflowed, the others would wait for it for ever. So gradients are unscaled, reduced and
scaled again before the check. Residuals are therefore unscaled and stay valid when the scale changes. In a step in
which any rank overflowed, they stay as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Callable

import tensorflow as tf

from .distribution import Distribution
from .keras3 import Keras3Mixin, times


class LossScaleMixin(Keras3Mixin):
    """For a LossScaleOptimizer that `hvdc.DistributedOptimizer` wraps."""

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Updates the variables if the reduced gradients are finite."""
        _apply_reduced(self, self._hvdc, grads, trainable_variables, super(Keras3Mixin, self).apply)  # type: ignore[misc]


def reduce_before_check(scaler: type) -> None:
    """Makes Keras's LossScaleOptimizer, the class `scaler`, reduce gradients before it checks them.

    Under mixed_float16, `compile` wraps the optimizer in one by itself. So this replaces the class's public method
    `apply`, once. It changes nothing if the inner optimizer is not distributed.
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


def _apply_reduced(
    scaler: Any,
    distribution: Distribution,
    grads: Sequence[Any],
    trainable_variables: Sequence[Any] | None,
    apply: Callable[[Sequence[Any], Sequence[Any] | None], None],
) -> None:
    """Calls `apply`, the LossScaleOptimizer's own, with reduced gradients in each pass that completes a step."""
    if not scaler.built:
        scaler.build(trainable_variables)
        scaler.built = True
    variables = trainable_variables or scaler._trainable_variables
    scale = tf.convert_to_tensor(scaler.dynamic_scale)
    reduced = distribution.add([times(g, 1.0 / scale) for g in grads], variables)
    distribution.update_if_complete(
        lambda: apply([times(g, scale) for g in reduced], trainable_variables), scaler.iterations
    )


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
