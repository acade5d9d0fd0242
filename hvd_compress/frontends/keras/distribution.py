"""The distributed state of one optimizer, and the mixin that adds it to an optimizer of any version of Keras."""

from __future__ import annotations

import functools
import math
import re
import warnings
import weakref
from collections.abc import Sequence
from typing import Any, Callable

import tensorflow as tf

from ...common import checks
from ...common.gradients import with_values
from ...common.names import path_of
from ...engine import nonfinite
from ...engine.agreement import Facts
from ...engine.compression_report import CompressionReport
from ...engine.settings import Settings
from ..build import new_reducer
from ..pieces import LocalVariable
from ..rounds import Rounds
from ..shared import reduce_shared
from .aggregation import LocalGradientAggregation
from .optimizer_state import accumulation_steps, facts_of, innermost, moving_statistics, tf_variable
from .overwritten import OverwrittenVariables, is_overwritten

# In the paths of variables: `batch_normalization/gamma`, `conv1_bn/beta`.
_BATCH_NORM = re.compile(r"batch_?norm|(?<![a-z])bn(?![a-z])", re.IGNORECASE)


class Distribution:
    """Reduces the gradients of one optimizer.

    Keras and TensorFlow must not track this object: its residuals differ from rank to rank, and must be neither
    broadcast nor saved with the model.

    Args:
        settings: How gradients are reduced.
        optimizer: The optimizer.

    Attributes:
        settings: How gradients are reduced.
        reducer: Reduces them and keeps the residuals.
        aggregation: Sums the gradients of several passes if `backward_passes_per_step` > 1, else None.
        rounds: Exchanges the movements of weights in place of gradients if `local_steps` is set, else None.
        model: A weak reference to the model, if a callback has set it; its moving statistics are averaged.
    """

    def __init__(self, settings: Settings, optimizer: Any) -> None:
        self.settings = settings
        self.reducer = new_reducer(settings)
        owner = weakref.ref(optimizer)  # which refers to this object
        self.reducer.of_optimizer = lambda: facts_of(owner())
        self.aggregation = None
        if settings.backward_passes_per_step > 1:
            self.aggregation = LocalGradientAggregation(settings, self.reduce)
        self.rounds = None
        if settings.local_steps is not None:
            self.rounds = Rounds(settings, self.reducer, accumulation_steps(optimizer))
        self.model: Callable[[], Any] = lambda: None
        self._local: set[int] = set()  # ids of the variables whose gradients stay local
        self._is_local_anywhere: bool | None = None  # on any rank; None as long as that is not known
        self._overwritten = OverwrittenVariables(self.reducer)

    def register_local_var(self, variable: Any) -> None:
        """Keeps the gradient of `variable` local to this rank."""
        self._local.add(id(variable))

    def facts(self, variables: Sequence[Any] | None) -> Facts:
        """What ranks compare when a `fit` begins that trains these variables, see `Reducer.facts`."""
        shared = None if variables is None else [v for v in variables if id(v) not in self._local]
        return self.reducer.facts(shared)

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any], so_far: tf.Tensor | None = None) -> list[Any]:
        """Reduces the gradients over the ranks, except those of local variables; see `Reducer` for `so_far`.

        Of variables that Keras overwrites with their gradients, all ranks get the largest values. With local steps, the
        gradients stay as they are, and all ranks get the largest values of these variables once in a round.
        """
        if self.rounds is not None:
            return list(gradients)
        result = self.reduce_overwritten(gradients, variables)
        others = [i for i, variable in enumerate(variables) if not is_overwritten(variable)]
        reduced = reduce_shared(
            self.reducer, [gradients[i] for i in others], [variables[i] for i in others], self._local, so_far
        )
        for i, gradient in zip(others, reduced):
            result[i] = gradient
        return result

    @checks.not_converted
    def reduce_overwritten(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Reduces only the gradients of variables that Keras overwrites with them."""
        if self.rounds is not None:
            return list(gradients)
        shared = [
            i
            for i, (gradient, variable) in enumerate(zip(gradients, variables))
            if gradient is not None and is_overwritten(variable) and id(variable) not in self._local
        ]
        result = list(gradients)
        reduced = self._overwritten.reduce([gradients[i] for i in shared], [variables[i] for i in shared])
        for i, gradient in zip(shared, reduced):
            result[i] = gradient
        return result

    def add(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Adds the gradients of one pass, and reduces the sum if this pass completes a step.

        Raises:
            ValueError: With several passes, for variables that Keras overwrites with their gradients.
        """
        if self.aggregation is None:
            return self.reduce(gradients, variables)
        overwritten = [path_of(variable) for variable in variables if is_overwritten(variable)]
        if overwritten:
            raise ValueError(
                f"{overwritten[0]} of a float8 layer is overwritten with its gradient, and backward_passes_per_step > "
                "1 would sum it: use the optimizer's own gradient_accumulation_steps"
            )
        return self.aggregation.add(gradients, variables)

    def skip_together(self, reduced: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """The reduced gradients, one of them NaN if a local variable's gradient is not finite on any rank.

        A LossScaleOptimizer that checks them then skips the same steps on all ranks. (Residuals have changed then.)
        """
        result = list(reduced)
        given = [i for i, gradient in enumerate(result) if gradient is not None]
        if self.rounds is not None or not given or not self._any_rank_has_local():
            return result
        # Of all gradients, although the shared ones are alike on all ranks: on a rank without local ones, TensorFlow
        # would take the flag for a constant, and exchange it only once.
        is_bad = self._overwritten.largest(tf.cast(~nonfinite.all_finite(reduced), tf.float32))
        # Slices may have no rows.
        first = next((i for i in given if not isinstance(result[i], tf.IndexedSlices)), given[0])
        result[first] = with_values(
            result[first], lambda x: tf.where(is_bad > 0.0, tf.fill(tf.shape(x), tf.constant(math.nan, x.dtype)), x)
        )
        return result

    def _any_rank_has_local(self) -> bool:
        """Whether any rank has local variables. All ranks make the first call together."""
        if self._is_local_anywhere is None:
            with tf.init_scope():
                own = tf.constant(float(bool(self._local)))
                self._is_local_anywhere = bool(self._overwritten.largest(own) > 0.0)
        return self._is_local_anywhere

    def shared_and_local(
        self, function: Callable[[list[Any]], Sequence[Any]], gradients: Sequence[Any], variables: Sequence[Any]
    ) -> list[Any]:
        """Calls `function` with the gradients of shared variables, and with those of local ones, which differ by rank.

        So a norm over all gradients is the same on all ranks.
        """
        if not self._local or self.rounds is not None:  # with local steps, each rank trains by itself
            return list(function(list(gradients)))
        result = list(gradients)
        for is_local in (False, True):
            places = [i for i, variable in enumerate(variables) if (id(variable) in self._local) == is_local]
            for i, gradient in zip(places, function([gradients[i] for i in places]) if places else []):
                result[i] = gradient
        return result

    def accumulate_instead(self, passes: int) -> str:
        """What to do in place of `gradient_accumulation_steps` with a loss scale."""
        return (
            f"use hvdc.DistributedOptimizer(..., backward_passes_per_step={passes}, "
            "average_aggregated_gradients=True), which exchanges their mean"
        )

    def update_if_complete(
        self, update: Callable[[], Any], iterations: Any, finite: Callable[[], tf.Tensor] | None = None
    ) -> None:
        """Calls `update` if this pass completes a step; otherwise only counts the pass in `iterations`.

        `finite` returns whether the update may be made, a bool scalar that is the same on all ranks. None: always.
        With local steps, each rank decides for itself, and counts the step in any case.
        """

        def updated() -> tf.Tensor:
            update()
            return tf.constant(True)

        def complete() -> tf.Tensor:
            has_updated = updated() if finite is None else tf.cond(finite(), updated, lambda: tf.constant(False))
            self.end_step()
            return has_updated

        def incomplete() -> tf.Tensor:
            iterations.assign_add(1)
            return tf.constant(False)

        if self.aggregation is None:
            complete()
        else:
            tf.cond(self.aggregation.is_step(), complete, incomplete)

    def begin_step(self, variables: Sequence[Any]) -> None:
        """Before the first update of these variables, keeps their values as the synchronized weights of local steps."""
        if self.rounds is None:
            return
        shared = [v for v in variables if id(v) not in self._local and not is_overwritten(v)]
        statistics = []
        if not self.rounds.is_prepared:
            overwritten = [tf_variable(v) for v in variables if id(v) not in self._local and is_overwritten(v)]
            if overwritten:
                self.rounds.at_exchange = functools.partial(self._overwritten.keep_largest, overwritten)
            statistics = moving_statistics(self.model())
            if self.model() is None:
                self._warn_of_statistics(shared)
        self.rounds.prepare(
            [LocalVariable(v, tf_variable(v)) for v in shared]
            + [LocalVariable(v, tf_variable(v), is_statistic=True) for v in statistics]
        )

    def _warn_of_statistics(self, variables: Sequence[Any]) -> None:
        """The first rank warns if the names of these variables say that there are moving statistics beside them."""
        group = self.settings.process_set
        paths = [path_of(variable) for variable in variables if _BATCH_NORM.search(path_of(variable))]
        if paths and group.included() and group.size() > 1 and group.rank() == 0:
            warnings.warn(
                f"local_steps: moving statistics, as beside {paths[0]}, are not averaged between ranks, because the "
                "optimizer does not know its model: use hvdc.callbacks.BroadcastGlobalVariablesCallback in fit, and "
                "hvdc.LocalSteps(model, ...) in a loop of your own",
                stacklevel=2,
            )

    def end_step(self) -> None:
        """After the update: with local steps, counts the step, and exchanges what its turn is."""
        if self.rounds is not None:
            self.rounds.step()

    @checks.not_converted
    def check(self, gradients: Sequence[Any], variables: Sequence[Any], unknown: Sequence[Any]) -> None:
        """Raises, before any exchange, the errors that Keras would raise after it.

        Raises:
            ValueError: No variable has a gradient (on this rank or, with another text, on another one), or the
                optimizer was not built for some of them (`unknown`).
        """
        if unknown:
            raise ValueError(
                f"the optimizer was built for other variables, {path_of(unknown[0])} is not among them: call "
                "optimizer.build(variables) with all that it will ever update before the first step, or make a new one"
            )
        if all(gradient is None for gradient in gradients):
            self.reducer.agree(gradients, variables)
            raise ValueError("No gradients provided for any variable: the loss depends on none of them")

    def all_finite(self, reduced: Sequence[Any], variables: Sequence[Any]) -> tf.Tensor:
        """Whether all reduced gradients are finite; a bool scalar, the same on all ranks.

        Gradients of local variables are ignored, because other ranks do not see them.
        """
        return nonfinite.all_finite([g for g, v in zip(reduced, variables) if id(v) not in self._local])

    def raise_if_nonfinite(self, reduced: Sequence[Any], variables: Sequence[Any], iterations: Any) -> list[Any]:
        """Returns the reduced gradients; with `on_nonfinite="raise"`, the step raises if they are not finite."""
        if self.settings.on_nonfinite != "raise" or self.rounds is not None:  # which check the mean movements
            return list(reduced)
        step = tf.convert_to_tensor(iterations) + 1
        return nonfinite.raise_unless(self.all_finite(reduced, variables), reduced, step)


class DistributedMixin:
    """Adds the distributed state, and the public methods that read it, to a Keras optimizer."""

    _hvdc_settings: Settings

    @property
    def _hvdc(self) -> Distribution:
        # Written into __dict__: Keras's __setattr__ would track the object, and save and broadcast its variables.
        if "_hvdc_distribution" not in self.__dict__:
            self.__dict__["_hvdc_distribution"] = Distribution(self._hvdc_settings, self)
        distribution: Distribution = self.__dict__["_hvdc_distribution"]
        return distribution

    @property
    def _agg_helper(self) -> Any:
        """Horovod's name for the `backward_passes_per_step` helper, which has a `counter`."""
        return self._hvdc.aggregation

    def register_local_var(self, var: Any) -> None:
        """Keeps the gradient of the variable `var` local to this rank, as Horovod's method does.

        With `global_clipnorm`, gradients of local variables have a norm of their own: the other variables are then
        updated alike on all ranks.

        Raises:
            ValueError: The optimizer is a LossScaleOptimizer around one with `global_clipnorm`.
        """
        is_around = innermost(self) is not self and self._hvdc.rounds is None
        if is_around and getattr(innermost(self), "global_clipnorm", None):
            raise ValueError(
                "register_local_var: global_clipnorm inside of a LossScaleOptimizer would clip by a norm that differs "
                "between ranks: wrap the other way round, LossScaleOptimizer(hvdc.DistributedOptimizer(optimizer)), or "
                "use clipnorm"
            )
        self._hvdc.register_local_var(var)

    def synchronize(self) -> None:
        """With local steps, ends the round now: the ranks exchange what their weights have moved so far.

        All ranks must call it, outside of tf.function. Without local steps, it does nothing.
        """
        if self._hvdc.rounds is not None:
            self._hvdc.rounds.synchronize()

    def bytes_sent(self) -> tuple[int, int]:
        """Bytes that each rank sends per step: with this compression, and with stock Horovod.

        With local steps, the average over a round after the warm-up. For embeddings with IndexedSlices, the rows of the
        last step count.

        Raises:
            RuntimeError: No step has been made yet.
        """
        return (self._hvdc.rounds or self._hvdc.reducer).bytes_sent()

    def compression_report(self) -> CompressionReport:
        """The compressor of each bucket; with `compression="auto"` also why it was chosen, and its times.

        Raises:
            RuntimeError: No step has been made yet.
        """
        return (self._hvdc.rounds or self._hvdc.reducer).report()
