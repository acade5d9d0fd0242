"""`hvdc.elastic.KerasState`."""

from __future__ import annotations

import dataclasses
import warnings
import weakref
from typing import Any, NamedTuple

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod.common.elastic import ObjectState
from horovod.common.exceptions import HostsUpdatedInterrupt

from ...checkpoint import plan_state
from ...checkpoint.plan_state import PlanState
from ...engine import reducer as reducers
from ...engine.progress import Epoch
from .. import residuals
from ..keras import optimizer_state
from . import takeover
from .failures import horovod_errors


@dataclasses.dataclass
class _Commit:
    """A rank's state at one point of training, in host memory."""

    number: int  # the same on all ranks
    rank: int  # at that point
    ranks: int
    values: list[np.ndarray]  # of the variables of model and optimizer
    attributes: dict[str, Any]  # the user's properties of the state
    epoch: Epoch | None  # `Reducer.epoch`
    residuals: list[PlanState]  # this rank's
    copies: list[PlanState] | None = None  # the residuals of the previous rank; None if ranks exchange no copies


_UNSHARED = -1  # number of a process's first commit, which the other ranks do not have


class _Status(NamedTuple):
    """A rank's status that all ranks get in `sync`."""

    commits: dict[int, tuple[int, int]]  # by number: rank and number of ranks at that point; empty in a new process
    made: int  # the number of reducers that the process has made
    name: str  # of the optimizer's reducer


class KerasState(ObjectState):
    """The state of an elastic job with a Keras model, as `horovod.tensorflow.keras.elastic.KerasState`.

    It works with Keras 3, `tf_keras`, and `tf.keras` of TensorFlow 2.15. It commits and restores, together with the
    model, each rank's residuals and the gradients that `backward_passes_per_step` has summed so far. At each
    commit, rank r sends a copy of them to rank r + 1, which takes them over if rank r is gone. So the sum of
    residuals over all ranks is that of the last commit, whether ranks leave, join or are killed. If both ranks
    are gone at once, the residuals are lost, and a warning says so. With local steps, all ranks go back to the
    synchronized weights of the last commit. See docs/elastic.md.

    Creating a state communicates nothing. Create it with the same arguments on all ranks. The optimizer must use the
    global process set: Horovod's others do not survive a reset.

    Args:
        model: A built Keras model.
        optimizer: The optimizer, if the model was not compiled with it.
        copy_residuals: Whether each commit sends a copy of the residuals to another rank. This takes host memory, and
            the time to send all residuals once, uncompressed.
        **kwargs: Other properties to synchronize, such as `batch=0, epoch=0`. They become attributes.

    Raises:
        ValueError: The model is not built, there is no optimizer, or its process set is not the global one.
    """

    def __init__(self, model: Any, optimizer: Any = None, *, copy_residuals: bool = True, **kwargs: Any) -> None:
        if not getattr(model, "built", True):
            raise ValueError("Model must be built first. Run `model.build(input_shape)`.")
        self.model = model
        self.optimizer = optimizer if optimizer is not None else getattr(model, "optimizer", None)
        if self.optimizer is None:
            raise ValueError("elastic: the model has no optimizer: compile it, or pass the optimizer")
        self.copy_residuals = copy_residuals
        self._reducer, self._aggregation, self._rounds = None, None, None
        if optimizer_state.distributed_optimizer(self.optimizer) is not None:
            self._reducer, self._aggregation, self._rounds, *_ = residuals.owner(self.optimizer)
            if self._reducer.settings.process_set is not hvd.global_process_set:
                raise ValueError(
                    "elastic: the optimizer's process set must be the global one: "
                    "Horovod's others do not outlive a reset"
                )
        # Keras creates them in the first step, but a rank that joins has made no step.
        optimizer_state.create_variables(self.optimizer, model.trainable_variables)
        if self._rounds is not None:
            distribution = optimizer_state.distributed_optimizer(self.optimizer)._hvdc
            distribution.model = weakref.ref(model)
            distribution.begin_step(model.trainable_variables)
        self._was_reset = False
        super().__init__(bcast_object=hvd.broadcast_object, get_rank=hvd.rank, **kwargs)
        # The last commit; also the one before, as long as the last may be incomplete on other ranks.
        self._commits = [self._snapshot(_UNSHARED)]

    def save(self) -> None:
        """Commits to host memory, and sends residuals to the next rank. Call it on all ranks."""
        self._save(self._commits[-1].number + 1)

    def restore(self) -> None:
        """Restores the last commit."""
        commit = self._commits[-1]
        with tf.init_scope():
            for variable, value in zip(self._all_variables(), commit.values):
                variable.assign(value)
        self._saved_state = dict(commit.attributes)
        self._set_attrs()
        if self._reducer is not None:
            self._reducer.epoch = commit.epoch
            for plan in self._reducer.plans.values():  # may be newer than the commit
                plan_state.restore(plan, plan_state.zeroed(plan_state.state_of(plan)))
            residuals.put(self._reducer, self._aggregation, self._rounds, commit.residuals)

    def check_host_updates(self) -> None:
        """As Horovod's: raises HostsUpdatedInterrupt on all ranks if ranks are about to leave or to join."""
        try:
            with horovod_errors():
                super().check_host_updates()
        except HostsUpdatedInterrupt:
            if self._rounds is not None:
                self._rounds.synchronize()
            self.save()  # all ranks are still there
            # False: `sync` must not be skipped, because ranks that stay take over the residuals of those that leave.
            raise HostsUpdatedInterrupt(False) from None
        del self._commits[:-1]  # this was a collective call, so all ranks have completed the last commit

    def reset(self) -> None:
        """Called by Horovod after it has started again with other ranks: drops what was made for the old ones."""
        self._was_reset = True
        # Keras creates new ones.
        self.model.train_function = self.model.test_function = self.model.predict_function = None
        for other in reducers.alive():
            if other is not self._reducer and (other.plans or other.pending):
                warnings.warn(
                    f"elastic: the residuals of {other.name} are not part of the state: they start from zero",
                    stacklevel=2,
                )
                other.replan([])

    def sync(self) -> None:
        """Synchronizes all ranks, after a reset with the last commit. Call it on all ranks."""
        with horovod_errors():
            name = "" if self._reducer is None else self._reducer.name
            commits = {c.number: (c.rank, c.ranks) for c in self._commits if c.number != _UNSHARED}
            statuses = hvd.allgather_object(_Status(commits, reducers.Reducer.made, name), name="hvdc_elastic_hello")
            # The last commit that is complete on all ranks with commits, and these ranks.
            agreed = min((max(status.commits) for status in statuses if status.commits), default=_UNSHARED)
            old = [rank for rank, status in enumerate(statuses) if agreed in status.commits]
            root = old[0] if old else 0
            if commits and max(commits) > agreed:
                self._commits = [commit for commit in self._commits if commit.number <= agreed]
                self.restore()
            reducers.Reducer.made = max(status.made for status in statuses)
            if self._reducer is not None:
                self._reducer.name = statuses[root].name
                # Training continues, on a rank that was reset or that joins.
                if old and (self._was_reset or hvd.rank() not in old):
                    self._take_over({rank: statuses[rank].commits[agreed] for rank in old}, root)
            if self._rounds is not None:
                if old:
                    self._rounds.discard()
                else:  # weights may have been loaded since this object was made
                    self._rounds.show_own()
            optimizer_state.broadcast(self._shared_variables(), root, "hvdc_elastic")
            if self._rounds is not None:
                self._rounds.adopt()
            attributes = {name: getattr(self, name) for name in self._saved_state}
            self._saved_state = hvd.broadcast_object(attributes, root, name="hvdc_elastic_attributes")
            self._set_attrs()
            self._save(agreed + 1)
        self._was_reset = False

    def _save(self, number: int) -> None:
        with horovod_errors():
            super().save()
            commit = self._snapshot(number)
            if self.copy_residuals and self._reducer is not None and hvd.size() > 1:
                commit.copies = takeover.exchange(commit.residuals)
        self._commits = [self._commits[-1], commit]

    def _take_over(self, old: dict[int, tuple[int, int]], root: int) -> None:
        """Distributes the residuals of the last commit among the present ranks.

        `old` has, for each rank that took part in the commit, its rank and the number of ranks then; `root` is one.
        """
        assert self._reducer is not None
        commit, ranks = self._commits[-1], old[root][1]
        copied, outlines = hvd.broadcast_object(
            (commit.copies is not None, takeover.outline(commit.residuals)), root, name="hvdc_elastic_residuals"
        )
        heirs, lost = takeover.succession(ranks, [rank for rank, _ in old.values()], copied)
        if hvd.rank() not in old:
            states = [plan_state.zeroed(state) for state in outlines]
        elif commit.copies and commit.rank in heirs.values():
            states = [plan_state.merged(pair) for pair in zip(commit.residuals, commit.copies)]
        else:
            states = list(commit.residuals)
        if lost and outlines and hvd.rank() == root:
            warnings.warn(
                f"elastic: the residuals of rank {', '.join(map(str, lost))} of {ranks} are lost: "
                + ("the rank with their copies is gone, too" if copied else "there are no copies of them"),
                stacklevel=2,
            )
        # What waits under a delay is restored on all ranks or on none: of `randomk`, it includes which rows were drawn.
        states = [dataclasses.replace(state, waiting={}) for state in states]
        self._reducer.replan([])
        self._reducer.continues = True
        if self._rounds is not None:
            self._rounds.forget_traces()
        residuals.put(self._reducer, self._aggregation, self._rounds, states)

    def _snapshot(self, number: int) -> _Commit:
        """The present state of this rank, without copies of another rank's residuals."""
        states = [] if self._reducer is None else residuals.states_of(self._reducer, self._aggregation, self._rounds)
        values = [variable.numpy() for variable in self._all_variables()]
        rank, ranks = (hvd.rank(), hvd.size()) if hvd.is_initialized() else (0, 1)
        epoch = None if self._reducer is None else self._reducer.epoch
        return _Commit(number, rank, ranks, values, dict(self._saved_state), epoch, states)

    def _shared_variables(self) -> list[tf.Variable]:
        """The variables that are equal on all ranks."""
        return optimizer_state.unique([*self.model.weights, *optimizer_state.optimizer_variables(self.optimizer)])

    def _all_variables(self) -> list[tf.Variable]:
        """All variables that are restored, including those that differ between ranks, such as seed generators."""
        return optimizer_state.unique([*self._shared_variables(), *self.model.variables])
