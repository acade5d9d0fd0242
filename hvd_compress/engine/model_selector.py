"""A selector that chooses for all of its buckets, from what earlier steps measured."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from .compression_report import BucketReport
from .observer import Observer
from .selector import Selector


class ModelSelector(Selector, Observer):
    """Chooses for the buckets of `auto`: a selector that is an observer, too.

    Besides the methods of `Selector` and `Observer`, subclasses define those below, in the order in which a step calls
    them.
    """

    @abc.abstractmethod
    def numbers(self) -> tf.Tensor:
        """The numbers that this rank sends, float32 [any]; they are reduced along with the uncompressed gradients."""

    @abc.abstractmethod
    def probe(self, step: tf.Tensor, gradients: Sequence[Any]) -> Any:
        """Measures the gradients before they are exchanged. `observe` gets the result as `StepMeasurement.probe`.

        Args:
            step: The number of steps before this one, an int64 scalar.
            gradients: All gradients of the plan.
        """

    @abc.abstractmethod
    def switch_model(
        self,
        per_bucket: Callable[[], Any],
        uncompressed: Callable[[], Any],
        model_wide: Callable[[int, tf.Tensor], Any],
        step: tf.Tensor,
    ) -> Any:
        """Calls the function that exchanges all buckets in this step, and returns its result.

        Args:
            per_bucket: Exchanges each bucket with its own candidate, see `switch`.
            uncompressed: Exchanges all gradients as stock Horovod does.
            model_wide: Exchanges all gradients at once. Arguments: the candidate's position, and whether to measure its
                loss, a bool scalar.
            step: The number of steps before this one, an int64 scalar.
        """

    @abc.abstractmethod
    def no_loss(self) -> Any:
        """The value of `StepMeasurement.model_wide_loss` if no model-wide candidate was in use."""

    @abc.abstractmethod
    def replicated_state(self) -> dict[str, tf.Variable]:
        """The variables that are equal on all ranks, by their names in checkpoints."""

    @abc.abstractmethod
    def report(self, step: int) -> list[BucketReport]:
        """The reports of the buckets after `step` steps. Not for use in a graph."""
