"""What `hvdc.callbacks.CompressionGuard` adds to plans: milder compressors, and the norms of gradients.

The compressor changes between two steps, which are then traced again. So the graph has no branch for a guard that never
acts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import tensorflow as tf

from ..common import tracing
from ..compressors import Compressor
from .norms import norm_of
from .observer import Observer, StepMeasurement
from .selector import Selector

Result = TypeVar("Result")


class GuardEvent(NamedTuple):
    """A change of the guard's level."""

    step: int  # the number of steps of the plan before it
    compressor: str  # spec strings of the compressors in use from then on, or "as configured"
    reason: str


@dataclasses.dataclass(eq=False)
class Guard:
    """The state of a guard; all ranks have the same."""

    milder: Sequence[Compressor]  # those of the levels 1, 2, ...
    level: int = 0  # 0: compressors as configured
    events: list[GuardEvent] = dataclasses.field(default_factory=list)

    @property
    def leaves_rows_uncompressed(self) -> bool:
        """Whether rows of embeddings are sent uncompressed at this level."""
        return self.level > 0 and self.milder[self.level - 1].uncompressed


class GuardedSelector(Selector):
    """A bucket's own selector at the guard's level 0; one of the milder compressors at the others.

    Args:
        own: The bucket's selector without a guard.
        candidates: The compressors that `own` chooses among.
        milder: The compressors at the levels 1, 2, ...
        guard: The guard.
    """

    def __init__(
        self, own: Selector, candidates: Sequence[Compressor], milder: Sequence[Compressor], guard: Guard
    ) -> None:
        self.own, self.milder = own, tuple(milder)
        self._own_candidates, self._guard = len(candidates), guard

    def switch(self, bucket: int, exchange: Callable[[Compressor], Result]) -> Result:
        """The exchange with the compressor of the level at which the step is traced."""
        level = self._guard.level
        return exchange(self.milder[level - 1]) if level else self.own.switch(bucket, exchange)

    def choice(self, bucket: int) -> tf.Tensor:
        """The position of the compressor among those of `own`, followed by the milder ones."""
        level = self._guard.level
        return tf.constant(self._own_candidates + level - 1) if level else self.own.choice(bucket)

    def current(self, bucket: int) -> Compressor:
        """The compressor of the level."""
        level = self._guard.level
        return self.milder[level - 1] if level else self.own.current(bucket)


class GradientSum(Observer):
    """Adds up the norms of this rank's gradients that are compressed, one pass over them in each step.

    Args:
        members: The positions of these gradients.
        factor: Of the norms: what is encoded has at most so many times the norm of the gradient.
        start: The norm of the residual before the first step.
        name: The prefix of the variable's name.

    Attributes:
        total: `start` and the norms of all steps so far, a float64 variable on the host.
    """

    def __init__(self, members: Sequence[int], factor: float, start: float, name: str) -> None:
        self._members, self._factor = members, factor
        with tf.init_scope(), tf.device("CPU"):
            self.total = tracing.variable(tf.constant(start, tf.float64), f"{name}_gradient_sum")

    def observe(self, measurement: StepMeasurement) -> None:
        """Adds the norm of a step in which all gradients were finite: in others, the residual does not change."""
        gradients: list[Any] = [measurement.gradients[i] for i in self._members]
        norm = self._factor * tf.cast(norm_of(gradients), tf.float64)
        with tf.device("CPU"):
            counts = measurement.committed & tf.math.is_finite(norm)
            self.total.assign_add(tf.where(counts, norm, tf.zeros_like(norm)))
