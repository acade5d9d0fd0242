"""Loss scaling on Keras 3: all ranks find the same gradients finite, and skip the same steps.

Keras's LossScaleOptimizer looks at the gradients of its own process and calls the optimizer in it only if they are
finite: ranks would wait for each other for ever. So gradients are unscaled, reduced and scaled again before
it looks. Residuals are thus kept unscaled and survive changes of the scale; in a step in which any rank
overflowed they stay as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Callable

import tensorflow as tf

from .distribution import Distribution
from .keras3 import Keras3Mixin, times


class LossScaleMixin(Keras3Mixin):
    """For a LossScaleOptimizer that is made distributed itself."""

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Updates the variables where the reduced gradients are finite."""
        _apply_reduced(self, self._hvdc, grads, trainable_variables, super(Keras3Mixin, self).apply)  # type: ignore[misc]


def reduce_before_check(scaler: type) -> None:
    """Makes `scaler`, Keras's LossScaleOptimizer, reduce before it looks, where the optimizer in it is distributed.

    compile() makes one around the optimizer under mixed_float16 and tells nobody, so this replaces its public
    method `apply`, once. Around any other optimizer it does what it did.
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
    """Calls the LossScaleOptimizer's own `apply` with reduced gradients, in the passes that complete a step."""
    if not scaler.built:
        scaler.build(trainable_variables)
        scaler.built = True
    variables = trainable_variables or scaler._trainable_variables
    scale = tf.convert_to_tensor(scaler.dynamic_scale)
    reduced = distribution.add([times(g, 1.0 / scale) for g in grads], variables)
    if distribution.aggregation is None:
        apply([times(g, scale) for g in reduced], trainable_variables)
        return

    def update() -> tf.Tensor:
        apply([times(g, scale) for g in reduced], trainable_variables)
        return tf.constant(True)

    def wait() -> tf.Tensor:
        scaler.iterations.assign_add(1)
        return tf.constant(False)

    tf.cond(distribution.aggregation.is_step(), update, wait)
