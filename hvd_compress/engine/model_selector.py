"""A selector that chooses for several buckets from what steps measure."""

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
        """What this rank tells the others, float32 [any]; it is reduced along with the uncompressed gradients."""

    @abc.abstractmethod
    def probe(self, step: tf.Tensor, gradients: Sequence[Any]) -> Any:
        """Looks at the gradients before they are exchanged; the result comes back in `StepMeasurement.probe`.

        Args:
            step: int64 scalar, the number of steps before.
            gradients: All of the plan.
        """

    @abc.abstractmethod
    def switch_model(
        self,
        per_bucket: Callable[[], Any],
        uncompressed: Callable[[], Any],
        model_wide: Callable[[int, tf.Tensor], Any],
        step: tf.Tensor,
    ) -> Any:
        """The result of the exchange that holds for all buckets in this step.

        Args:
            per_bucket: Exchanges each bucket with its own candidate, see `switch`.
            uncompressed: Exchanges all as stock Horovod does.
            model_wide: Exchanges all at once with the candidate of this position; the second argument says whether to
                measure what is lost.
            step: int64 scalar, the number of steps before.
        """

    @abc.abstractmethod
    def no_loss(self) -> Any:
        """In place of `StepMeasurement.model_wide_loss`, where no candidate for the whole model was in use."""

    @abc.abstractmethod
    def replicated_state(self) -> dict[str, tf.Variable]:
        """Variables that are alike on all ranks, by the names that checkpoints use."""

    @abc.abstractmethod
    def report(self, step: int) -> list[BucketReport]:
        """What is known of each bucket after so many steps, outside of the graph."""
