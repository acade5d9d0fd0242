"""Transforms: changes of a rank's gradients before they are encoded. `transforms_for` makes those of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from ..common.gradients import values_of, with_values
from ..compressors import error_feedback
from ..kernels.compile import compiled
from .settings import Settings


class LocalChunks(NamedTuple):
    """The chunks of a bucket on one rank, before they are encoded."""

    chunks: list[tf.Tensor]  # float32
    residuals: Sequence[Any]  # one for each chunk: a variable or tensor in its shape, or None
    decay: float  # the compressor encodes chunks + decay * residuals
    velocities: Sequence[Any] = ()  # of momentum correction, in the same shapes; empty without it


class Transform:
    """A change of the gradients.

    Subclasses override any of `prepare`, `apply`, `update` and `after_allreduce`; a step calls them in this order.
    """

    def prepare(self, gradients: list[Any]) -> list[Any]:
        """All gradients (tensors, IndexedSlices or None) of this rank, changed; called once in a step."""
        return gradients

    def apply(self, local: LocalChunks) -> LocalChunks:
        """A bucket's chunks, changed before they are encoded."""
        return local

    def update(self, local: LocalChunks, residuals: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The new velocities. `local` is the result of all transforms, `residuals` the part of its chunks not sent."""
        return []

    def after_allreduce(self, gradient: tf.Tensor, velocity: tf.Tensor) -> tf.Tensor | None:
        """The new velocity, float32, which replaces a gradient that was reduced uncompressed; None for no change."""
        return None


class Clip(Transform):
    """Local gradient clipping (Lin et al. 2018, DGC, section 3.2): the norm over all gradients is `limit` at most.

    Integers stay as they are. Where a value is infinite or NaN, some value of the result is, too.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit

    def prepare(self, gradients: list[Any]) -> list[Any]:
        """Scales all gradients down together."""
        values = [values_of(g) for g in gradients]
        floats = [tf.cast(v, tf.float32) for v in values if v is not None and v.dtype.is_floating]
        if not floats:
            return gradients
        norm = tf.sqrt(2.0 * tf.add_n([tf.nn.l2_loss(v) for v in floats]))
        factor = tf.minimum(1.0, self._limit / norm)

        def scaled(values: tf.Tensor) -> tf.Tensor:
            return values * tf.cast(factor, values.dtype) if values.dtype.is_floating else values

        return [with_values(gradient, scaled) for gradient in gradients]


class Predivide(Transform):
    """Divides gradients before they are summed, as Horovod's `gradient_predivide_factor`."""

    def __init__(self, factor: float) -> None:
        self._factor = factor

    def apply(self, local: LocalChunks) -> LocalChunks:
        """Divides the chunks."""
        return local._replace(chunks=[chunk / self._factor for chunk in local.chunks])


class MomentumCorrection(Transform):
    """Momentum before the compressor (Lin et al. 2018, DGC, equation 4 and section 3.2).

    The local velocity u = momentum * u + g replaces the gradient g. The velocities of elements that were sent are
    cleared (momentum factor masking). Meant for plain SGD: an optimizer's own momentum would count twice.
    """

    def __init__(self, momentum: float) -> None:
        self._momentum = momentum

    def apply(self, local: LocalChunks) -> LocalChunks:
        """Replaces the chunks by velocity + decay * residual: `update` needs this sum."""
        if not local.velocities:
            return local
        pairs = zip(local.chunks, local.velocities)
        velocities = [accelerate(chunk, value_of(velocity), self._momentum) for chunk, velocity in pairs]
        residuals = map(value_of, local.residuals)
        chunks = [error_feedback.add(v, r, local.decay) for v, r in zip(velocities, residuals)]
        return LocalChunks(chunks, [None] * len(chunks), 1.0, velocities)

    def update(self, local: LocalChunks, residuals: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The velocities, 0 where elements were sent."""
        sums = zip(local.velocities, local.chunks, residuals)
        return [mask(velocity, chunk - residual) for velocity, chunk, residual in sums]

    def after_allreduce(self, gradient: tf.Tensor, velocity: tf.Tensor) -> tf.Tensor:
        """The same momentum for uncompressed gradients."""
        return self._momentum * velocity + tf.cast(gradient, tf.float32)


class Chain(Transform):
    """Several transforms, one after the other."""

    def __init__(self, *transforms: Transform) -> None:
        self._transforms = transforms

    def prepare(self, gradients: list[Any]) -> list[Any]:
        """Applies all transforms in order."""
        for transform in self._transforms:
            gradients = transform.prepare(gradients)
        return gradients

    def apply(self, local: LocalChunks) -> LocalChunks:
        """Applies all transforms in order."""
        for transform in self._transforms:
            local = transform.apply(local)
        return local

    def update(self, local: LocalChunks, residuals: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The new velocities, of the one transform that returns any."""
        return [new for transform in self._transforms for new in transform.update(local, residuals)]

    def after_allreduce(self, gradient: tf.Tensor, velocity: tf.Tensor) -> tf.Tensor | None:
        """The result of the first transform that does not return None."""
        results = (transform.after_allreduce(gradient, velocity) for transform in self._transforms)
        return next((result for result in results if result is not None), None)


def transforms_for(settings: Settings) -> Chain:
    """The transforms for these settings."""
    chain: list[Transform] = []
    dgc = settings.dgc
    if dgc is not None and dgc.momentum_settings.clipnorm is not None:
        chain.append(Clip(dgc.local_limit(settings.process_set.size(), settings.averages)))
    if settings.gradient_predivide_factor != 1.0:
        chain.append(Predivide(settings.gradient_predivide_factor))
    if settings.momentum_correction:
        chain.append(MomentumCorrection(settings.momentum_correction))
    return Chain(*chain)


def value_of(tensor: Any) -> tf.Tensor | None:
    """The value of a variable; tensors and None are returned unchanged."""
    return tensor.value() if isinstance(tensor, tf.Variable) else tensor


@compiled
def accelerate(gradient: tf.Tensor, velocity: tf.Tensor, momentum: float) -> tf.Tensor:
    """The new velocity, momentum * velocity + gradient."""
    return momentum * velocity + gradient


@compiled
def mask(velocity: tf.Tensor, sent: tf.Tensor) -> tf.Tensor:
    """`velocity` with zeros where `sent`, the decoded payload, is not zero."""
    return tf.where(sent == 0.0, velocity, tf.zeros_like(velocity))
