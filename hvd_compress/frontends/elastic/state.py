"""`hvdc.elastic.KerasState`: model, optimizer and residuals of an elastic job."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any, NamedTuple

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod.common.elastic import ObjectState
from horovod.common.exceptions import HostsUpdatedInterrupt

from ...checkpoint import plan_state
from ...checkpoint.plan_state import PlanState
from ...engine import reducer as reducers
from .. import residuals
from ..keras import optimizer_state
from ..keras.broadcast import broadcast, unique
from . import takeover
from .failures import horovod_errors


@dataclasses.dataclass
class _Commit:
    """What a rank had at one point of training, in the host's memory."""

    number: int  # the same on all ranks
    rank: int
    ranks: int
    values: list[np.ndarray]  # of the model's and the optimizer's variables
    attributes: dict[str, Any]
    epoch: float | None  # `Reducer.epoch`
    residuals: list[PlanState]
    copies: list[PlanState] | None  # of the rank before's


_ALONE = -1  # the number of what a process begins with, of which the others know nothing


class _Hello(NamedTuple):
    """What ranks tell each other when they meet."""

    commits: dict[int, tuple[int, int]]  # by number: rank and number of ranks then; none of a new process
    made: int  # how many reducers
    name: str  # of the optimizer's reducer


class KerasState(ObjectState):
    """State of an elastic job with a Keras model, residuals included; as `horovod.tensorflow.keras.elastic.KerasState`.

    For Keras 3, `tf_keras` and `tf.keras` of TensorFlow 2.15. Every rank's residuals, and what
    `backward_passes_per_step` has summed so far, are committed and restored with the model. The sum of residuals over
    all ranks stays what it was at the last commit, whether ranks leave, join or are killed: at each commit rank r
    hands a copy to rank r + 1, which goes on with them if rank r is gone. They are lost, and a line says so, if
    both are gone at once. See docs/elastic.md.

    The optimizer's process set must be the global one: Horovod's others do not outlive a reset.
    """

    def __init__(
        self, model: Any, optimizer: Any = None, *, copy_residuals: bool = True, **kwargs: Any
    ) -> None:
        """Create the state, on all ranks alike; nothing is exchanged yet.

        Args:
            model: a built Keras model.
            optimizer: the optimizer, if it is not compiled into the model.
            copy_residuals: whether each commit hands a copy of the residuals to another rank. Costs memory on the host,
                and time: all residuals cross once, uncompressed.
            **kwargs: further properties to synchronize, which become attributes, such as `batch=0, epoch=0`.

        Raises:
            ValueError: the model is not built, there is no optimizer, or its process set is not the global one.
        """
        if not getattr(model, "built", True):
            raise ValueError("Model must be built first. Run `model.build(input_shape)`.")
        self.model = model
        self.optimizer = optimizer if optimizer is not None else getattr(model, "optimizer", None)
        if self.optimizer is None:
            raise ValueError("elastic: the model has no optimizer: compile it, or pass the optimizer")
        self.copy_residuals = copy_residuals
        self._reducer, self._aggregation = None, None
        if residuals.is_distributed(self.optimizer):
            self._reducer, self._aggregation, _ = residuals.owner(self.optimizer)
            if self._reducer.settings.process_set is not hvd.global_process_set:
                raise ValueError(
                    "elastic: the optimizer's process set must be the global one: "
                    "Horovod's others do not outlive a reset"
                )
        # They would come with the first step, and a rank that joins has made none.
        optimizer_state.create_variables(self.optimizer, model.trainable_variables)
        self._was_reset = False
        super().__init__(bcast_object=hvd.broadcast_object, get_rank=hvd.rank, **kwargs)
        # The last commit, and the one before until the last is known to be complete on all ranks.
        self._commits = [self._taken(_ALONE)]

    def save(self) -> None:
        """Copies everything to the host's memory, and residuals to the next rank; call it on all ranks."""
        self._save(self._commits[-1].number + 1)

    def restore(self) -> None:
        """Goes back to the last commit."""
        self._put(self._commits[-1])

    def check_host_updates(self) -> None:
        """As Horovod's: raises HostsUpdatedInterrupt on all ranks if ranks are to leave or to join."""
        try:
            with horovod_errors():
                super().check_host_updates()
        except HostsUpdatedInterrupt:
            self.save()  # all are still there
            # Never without `sync`: those that stay take over the residuals of those that leave.
            raise HostsUpdatedInterrupt(False) from None
        del self._commits[:-1]  # all ranks have asked, and so saved before

    def reset(self) -> None:
        """Horovod has begun anew, with other ranks: nothing that was made for the old ones is used again."""
        self._was_reset = True
        self.model.train_function = None  # Keras makes them anew
        self.model.test_function = None
        self.model.predict_function = None
        for other in reducers.alive():
            if other is not self._reducer and (other.plans or other.pending):
                warnings.warn(
                    f"elastic: the residuals of {other.name} are not part of the state: they start from zero",
                    stacklevel=2,
                )
                other.replan([])

    def sync(self) -> None:
        """Brings all ranks to the same point, that of the last commit if there were resets; call it on all ranks."""
        with horovod_errors():
            name = "" if self._reducer is None else self._reducer.name
            numbers = {c.number: (c.rank, c.ranks) for c in self._commits if c.number != _ALONE}
            met = hvd.allgather_object(_Hello(numbers, reducers.made(), name), name="hvdc_elastic_hello")
            # The last one that is complete on all ranks that have any, and those that were there.
            agreed = min((max(other.commits) for other in met if other.commits), default=_ALONE)
            old = [rank for rank, other in enumerate(met) if agreed in other.commits]
            root = old[0] if old else 0
            if numbers and max(numbers) > agreed:
                self._commits = [commit for commit in self._commits if commit.number <= agreed]
                self.restore()
            reducers.set_made(max(other.made for other in met))
            if self._reducer is not None:
                self._reducer.name = met[root].name
                # A job that goes on, for ranks that come back from a reset and those that join.
                if old and (self._was_reset or hvd.rank() not in old):
                    self._take_over({rank: met[rank].commits[agreed] for rank in old}, root)
            self._synchronize(root)
            self._save(agreed + 1)
        self._was_reset = False

    def _save(self, number: int) -> None:
        with horovod_errors():
            super().save()
            commit = self._taken(number)
            if self.copy_residuals and self._reducer is not None and hvd.size() > 1:
                commit.copies = takeover.exchange(commit.residuals)
        self._commits = [self._commits[-1], commit]

    def _synchronize(self, root: int) -> None:
        """Gives all ranks the root's model, optimizer and attributes."""
        broadcast(self._shared(), root, "hvdc_elastic")
        attributes = {name: getattr(self, name) for name in self._saved_state}
        self._saved_state: dict[str, Any] = hvd.broadcast_object(
            attributes, root, name="hvdc_elastic_attributes"
        )
        self._set_attrs()

    def _take_over(self, old: dict[int, tuple[int, int]], root: int) -> None:
        """Divides the residuals of the last commit's ranks among those that are there now.

        Args:
            old: Of the ranks that were there then: which rank they were, and of how many.
            root: One of them.
        """
        assert self._reducer is not None
        own, ranks = self._commits[-1], old[root][1]
        copied, outline = hvd.broadcast_object(
            (own.copies is not None, takeover.outline(own.residuals)), root, name="hvdc_elastic_residuals"
        )
        shares = takeover.shares(ranks, [rank for rank, _ in old.values()], copied)
        if hvd.rank() not in old:
            states = takeover.zeros(outline)
        else:
            inherits = own.rank in shares.heirs.values()
            states = takeover.merged(
                [own.residuals, own.copies] if inherits and own.copies else [own.residuals]
            )
        if shares.lost and outline and hvd.rank() == root:
            warnings.warn(
                f"elastic: the residuals of rank {', '.join(map(str, shares.lost))} of {ranks} are lost: "
                + ("the rank with their copies is gone, too" if copied else "there are no copies of them"),
                stacklevel=2,
            )
        self._reducer.replan([])
        if self._aggregation is not None and states:
            self._aggregation.restore(states[0])
            states = states[1:]
        self._reducer.pending = states

    def _taken(self, number: int) -> _Commit:
        """What there is now, without copies."""
        held = [] if self._reducer is None else residuals.states_of(self._reducer, self._aggregation)
        values = [variable.numpy() for variable in self._all()]
        rank, ranks = (hvd.rank(), hvd.size()) if hvd.is_initialized() else (0, 1)
        epoch = None if self._reducer is None else self._reducer.epoch
        return _Commit(number, rank, ranks, values, dict(self._saved_state), epoch, held, None)

    def _put(self, commit: _Commit) -> None:
        with tf.init_scope():
            for variable, value in zip(self._all(), commit.values):
                variable.assign(value)
        self._saved_state = dict(commit.attributes)
        self._set_attrs()
        if self._reducer is not None:
            self._reducer.epoch = commit.epoch
            for plan in self._reducer.plans.values():  # it may be newer than the commit
                plan_state.restore(plan, plan_state.zeroed(plan_state.state_of(plan)))
            states = list(commit.residuals)
            if self._aggregation is not None and states:
                self._aggregation.restore(states.pop(0))
            plan_state.put(self._reducer, states)

    def _shared(self) -> list[tf.Variable]:
        """What is alike on all ranks."""
        return unique([*self.model.weights, *optimizer_state.optimizer_variables(self.optimizer)])

    def _all(self) -> list[tf.Variable]:
        """What is restored: the states of random generators, say, too, which are each rank's own."""
        return unique([*self._shared(), *self.model.variables])
