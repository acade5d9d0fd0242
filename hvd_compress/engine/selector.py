"""Selectors: which compressor a bucket uses in a step.

Each traced candidate is a branch of one graph, and a tensor that is the same on all ranks says which branch runs. So
the choice among them may change from step to step without a new trace.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from ..compressors import Compressor, Seeds
from .compression_report import BucketReport
from .observer import Observer
from .state import State

Result = TypeVar("Result")


class Selector(abc.ABC):
    """Chooses among candidates. Subclasses define `switch`, `choice` and `current`."""

    @abc.abstractmethod
    def switch(self, bucket: int, exchange: Callable[[Compressor], Result]) -> Result:
        """Calls `exchange` with the bucket's compressor, and returns its result.

        Args:
            bucket: The bucket's index in the plan.
            exchange: Traced once for each candidate. Its results have the same structure for all candidates.
        """

    @abc.abstractmethod
    def choice(self, bucket: int) -> tf.Tensor:
        """The position of the bucket's compressor among the candidates in this step; an integer scalar on the host."""

    @abc.abstractmethod
    def current(self, bucket: int) -> Compressor:
        """The bucket's current compressor. Not for use in a graph."""


class FixedSelector(Selector):
    """The same compressor in every step."""

    def __init__(self, compressor: Compressor) -> None:
        self._compressor = compressor

    def switch(self, bucket: int, exchange: Callable[[Compressor], Result]) -> Result:
        """The exchange with this compressor; no branch in the graph."""
        return exchange(self._compressor)

    def choice(self, bucket: int) -> tf.Tensor:
        """Always 0."""
        return tf.constant(0)

    def current(self, bucket: int) -> Compressor:
        """This compressor."""
        return self._compressor


class StagedSelector(Selector):
    """The stages of a compressor, one after the other, such as those of `schedule` and of the warm-up of `dgc`.

    `progress` is how far training is, a variable, the same on all ranks; see `State.progress_of`.
    """

    def __init__(self, compressor: Compressor, progress: tf.Variable) -> None:
        self._compressor, self._progress = compressor, progress

    def switch(self, bucket: int, exchange: Callable[[Compressor], Result]) -> Result:
        """The exchange with the current stage."""
        branches = [functools.partial(exchange, stage) for stage in self._compressor.stages]
        return switch_case(self.choice(bucket), branches)

    def choice(self, bucket: int) -> tf.Tensor:
        """The position of the current stage."""
        with tf.device("CPU"):
            return self._compressor.stage_at(self._progress.read_value())

    def current(self, bucket: int) -> Compressor:
        """The current stage."""
        stage: Compressor = self._compressor.stages[int(self.choice(bucket))]
        return stage


class ModelSelector(Selector, Observer):
    """Chooses for the buckets of `auto`, from what earlier steps measured: a selector that is an observer, too.

    Besides the methods of `Selector` and `Observer`, subclasses define those below, in the order in which a step calls
    them.
    """

    @property
    @abc.abstractmethod
    def compresses_rows(self) -> bool:
        """Whether steps that are traced now compress the rows of embeddings that `auto` decides on.

        It never becomes False again: the rows' residuals may not be zero then.
        """

    @abc.abstractmethod
    def log_choice(self) -> None:
        """Prints the choice before the first step, on rank 0; after a checkpoint was restored, if there is one."""

    @abc.abstractmethod
    def numbers(self) -> tf.Tensor:
        """The numbers that this rank sends, float32 [any]; they are reduced along with the uncompressed gradients."""

    @abc.abstractmethod
    def probe(self, seeds: Seeds, gradients: Sequence[Any]) -> Any:
        """Measures all gradients of the plan before they are exchanged; `StepMeasurement.probe` is the result.

        `seeds` are for random choices.
        """

    @abc.abstractmethod
    def switch_model(
        self,
        per_bucket: Callable[[], Any],
        uncompressed: Callable[[], Any],
        model_wide: Callable[[int], Any],
    ) -> Any:
        """Calls the function that exchanges all buckets in this step, and returns its result.

        Args:
            per_bucket: Exchanges each bucket with its own candidate, see `switch`.
            uncompressed: Exchanges all gradients as stock Horovod does.
            model_wide: Exchanges all gradients at once with the candidate at a position.
        """

    @abc.abstractmethod
    def hold(self, candidate: int | None) -> None:
        """Steps that are traced from now on use only the candidate at this position, until it is called with None.

        All ranks call it after the same number of steps, with residuals that are then zero. The choice of now comes
        back at the end.
        """

    def restored(self, choice: bool) -> None:
        """Called on all ranks after a checkpoint set residuals and the variables of `replicated_state`.

        `choice` says whether the choice is among them. It is not if the gradients are in other buckets now, or if there
        are other candidates.
        """

    @abc.abstractmethod
    def replicated_state(self) -> dict[str, tf.Variable]:
        """The variables that are equal on all ranks, by their names in checkpoints."""

    @abc.abstractmethod
    def report(self, step: int) -> list[BucketReport]:
        """The reports of the buckets after `step` steps. Not for use in a graph."""


class DelaySelector(Observer, abc.ABC):
    """Decides when a delay begins (`engine.delay`), from what earlier steps measured."""

    @abc.abstractmethod
    def has_begun(self) -> tf.Tensor:
        """Whether this step has a delay; a bool scalar, the same on all ranks."""

    @abc.abstractmethod
    def restored(self) -> None:
        """Called on all ranks after a checkpoint set the variables of `replicated_state`. Not for use in a graph."""

    @abc.abstractmethod
    def numbers(self) -> tf.Tensor:
        """The numbers that this rank sends, as those of `ModelSelector`."""

    @abc.abstractmethod
    def replicated_state(self) -> dict[str, tf.Variable]:
        """The variables that are equal on all ranks, by their names in checkpoints."""


def selector_for(compressor: Compressor, state: State) -> Selector:
    """The selector of a compressor that is not `automatic`, for a plan with this state."""
    if len(compressor.stages) == 1:
        return FixedSelector(compressor)
    return StagedSelector(compressor, state.progress_of(compressor))


def switch_case(index: tf.Tensor, branches: Sequence[Callable[[], Any]]) -> Any:
    """As tf.switch_case; a single branch is called directly."""
    return branches[0]() if len(branches) == 1 else tf.switch_case(index, list(branches))
