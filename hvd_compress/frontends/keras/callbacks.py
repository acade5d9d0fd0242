"""Base classes of callbacks, and Horovod's callbacks that communicate, for Keras 3, `tf_keras` and Keras 2.

Names, arguments and meaning are those of `horovod.tensorflow.keras.callbacks` 0.28.1, which fail on Keras 3
(https://github.com/horovod/horovod/issues/4290). No callback checks which Keras a model belongs to.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import warnings
import weakref
import zlib
from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from tensorflow import keras

from ...common import checks
from ...engine import agreement
from ...engine.reducer import alive
from ...monitor import environment, tuning
from . import optimizer_state

_PROCESS_SET, _BATCHES, _LAYOUT = "process_set", "batches", "layout"


class Callback(keras.callbacks.Callback):
    """Base class of the callbacks. A callback for Keras 3 that also has what a `tf_keras` model asks for."""

    # No batch hook here reads its logs, so Keras 2 need not wait for each step's results.
    _supports_tf_logs = True
    _implements_train_batch_hooks = staticmethod(lambda: True)
    _implements_test_batch_hooks = staticmethod(lambda: False)
    _implements_predict_batch_hooks = staticmethod(lambda: False)

    @property
    def _reducer(self) -> Any:
        """The reducer of the model's distributed optimizer; None if the optimizer is not distributed."""
        optimizer = optimizer_state.distributed_optimizer(getattr(self.model, "optimizer", None))
        return None if optimizer is None else optimizer._hvdc.reducer

    @property
    def _group(self) -> Any:
        """The process set in which the model's distributed optimizer exchanges; None if this rank does not exchange."""
        if self._reducer is None:
            return None
        group = self._reducer.settings.process_set
        checks.registered(group)
        return group if group.included() and group.size() > 1 else None

    @property
    def _rounds(self) -> Any:
        """The rounds of the model's distributed optimizer; None without local steps."""
        optimizer = optimizer_state.distributed_optimizer(getattr(self.model, "optimizer", None))
        return None if optimizer is None else optimizer._hvdc.rounds

    def _facts(self) -> agreement.Facts:
        """What ranks that train the model together compare when `fit` begins. Communicates nothing."""
        optimizer = optimizer_state.distributed_optimizer(getattr(self.model, "optimizer", None))
        facts = {"whether the model's optimizer is distributed": str(optimizer is not None)}
        if optimizer is None:
            return facts
        facts[_PROCESS_SET] = str(optimizer._hvdc.settings.process_set.ranks)
        return facts | optimizer._hvdc.facts(self.model.trainable_variables if _is_built(self.model) else None)

    def _agree(self, group: Any, own: agreement.Facts) -> list[agreement.Facts]:
        """Checks, before any other collective of a `fit`, that ranks are about to train alike; costs one allgather.

        Args:
            group: The process set whose ranks call it.
            own: What else this rank tells the others; it is not compared.

        Returns:
            What each rank of `group` has told.

        Raises:
            ValueError: On all ranks: ranks of one optimizer's process set disagree.
        """
        everyone = agreement.gathered(self._facts() | own, "hvdc_fit", group)
        compared = [{key: text for key, text in facts.items() if key not in own} for facts in everyone]
        if not all(agreement.NUMBER_TRAINED in facts for facts in compared):  # some models are built by a first batch
            compared = [agreement.without_variables(facts) for facts in compared]
        by_rank = dict(zip(group.ranks, compared))
        # Ranks that are in no process set, or in another one, may train as they like.
        for ranks in dict.fromkeys(facts[_PROCESS_SET] for facts in compared if _PROCESS_SET in facts):
            members = [rank for rank in json.loads(ranks) if rank in by_rank]
            agreement.raise_difference([by_rank[rank] for rank in members], members)
        return everyone

    def _known_batches(self) -> int:
        """The number of batches in an epoch; 0 if Keras does not know it."""
        return (getattr(self, "params", None) or {}).get("steps") or 0  # Keras 2 has no params outside of `fit`

    def _begin_epoch(self, epoch: int, epochs: int | None) -> None:
        """Tells the optimizer the number of epochs so far, and in all of training; all ranks call it."""
        optimizer = optimizer_state.distributed_optimizer(getattr(self.model, "optimizer", None))
        if optimizer is not None:
            batches = self._known_batches()
            steps = batches / optimizer_state.batches_per_exchange(optimizer) if batches else None
            optimizer._hvdc.reducer.begin_epoch(epoch, epochs, steps)


class CountingCallback(Callback):
    """Base class of the callbacks that act after every so many batches."""

    def __init__(self) -> None:
        super().__init__()
        self._batches = 0  # since the callback last acted, which then sets it to 0
        self._last_batch = -1  # index, in its epoch, of the last batch that was counted

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        """Keras numbers batches from 0 again."""
        self._last_batch = -1

    def _count(self, batch: int) -> int:
        """Counts all batches up to this one: with `steps_per_execution`, Keras calls a hook once for several."""
        # Keras 3 may call batch hooks from several threads, and so in another order.
        self._batches += max(0, batch - self._last_batch)
        self._last_batch = max(batch, self._last_batch)
        return self._batches


class RoundsCallback(Callback):
    """Base class of the callbacks that show the synchronized weights of local steps between two epochs.

    From the validation of an epoch until the next epoch begins, the model holds the synchronized weights. So those are
    validated, and saved at the end of an epoch. The end of training ends the round.
    """

    def __init__(self) -> None:
        super().__init__()
        self._is_in_fit = False
        self._epoch_batches = self._missing = 0  # this rank's batches, and how many more another rank has
        self._shown: np.ndarray | None = None  # checksums of the synchronized weights at the end of the last epoch
        self._steps_before_epoch = 0

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        """Continues with this rank's own weights."""
        self._is_in_fit, self._shown = True, None
        if self._rounds is not None:
            self._rounds.show_own()
            self._steps_before_epoch = self._rounds.steps

    def on_test_begin(self, logs: dict | None = None) -> None:
        """Shows the synchronized weights to the validation of an epoch."""
        if self._rounds is not None and self._is_in_fit:
            self._make_up()
            self._rounds.show_synchronized()

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Shows the synchronized weights to the callbacks that save the model."""
        if self._reducer is not None:
            self._reducer.end_epoch()
        if self._rounds is not None:
            self._make_up()
            self._rounds.show_synchronized()
            self._shown = self._rounds.checksums()

    def on_train_end(self, logs: dict | None = None) -> None:
        """Ends the round, on all ranks; weights that another callback has restored stay."""
        self._is_in_fit = False
        if self._rounds is not None:
            self._keep_restored()
            self._rounds.synchronize()

    def _keep_restored(self) -> None:
        """All ranks go on with weights that replaced the synchronized ones at the end of the last epoch, if any did.

        Keras 2's `EarlyStopping(restore_best_weights=True)` does so then, on all ranks or on some.
        """
        group = self._rounds.settings.process_set
        if not group.included():
            return
        is_replaced = self._shown is not None and bool((self._rounds.checksums() != self._shown).any())
        replaced = hvd.allgather_object(is_replaced, name="hvdc.rounds.replaced", process_set=group)
        if any(replaced):
            root = group.ranks[replaced.index(True)]
            optimizer_state.broadcast(
                [variable.value for variable in self._rounds.variables], root, "hvdc.broadcast.replaced", group
            )
            self._rounds.adopt()

    def _learn_batches(self, numbers: Sequence[int]) -> None:
        """Learns how many batches an epoch has on the ranks of the optimizer's process set; 0 if Keras does not know.

        Raises:
            ValueError: On all ranks: the numbers differ, and a step has several batches.
        """
        self._epoch_batches, self._missing = self._known_batches(), 0
        if 0 in numbers or len(set(numbers)) == 1:
            return
        if optimizer_state.passes_per_step(optimizer_state.distributed_optimizer(self.model.optimizer)) > 1:
            different = ", ".join(map(str, sorted(set(numbers))))
            raise ValueError(
                f"local_steps: the ranks have different numbers of batches, {different}, so that "
                f"their steps of several batches part: use fit(steps_per_epoch={min(numbers)}), or no accumulation"
            )
        self._missing = max(numbers) - self._epoch_batches

    def _make_up(self) -> None:
        """At the end of an epoch, takes part in the exchanges of steps for which only other ranks have batches."""
        if self._missing and self._rounds.steps - self._steps_before_epoch == self._epoch_batches:
            self._rounds.make_up(self._missing)
            # The number of the training's step: schedules and checkpoints depend on it.
            optimizer_state.tf_variable(optimizer_state.innermost(self.model.optimizer).iterations).assign_add(
                self._missing
            )


class BroadcastGlobalVariablesCallback(RoundsCallback):
    """Copies the model and the optimizer from the root rank to all ranks when training starts.

    All ranks must start from the same state, whether it is random or restored from a checkpoint on the root rank. The
    callback broadcasts all weights of the model, the variables of the optimizer and its learning rate. It does not
    broadcast metrics or the states of random seed generators.

    It broadcasts before the first step, or after it if the model of a rank is built by the first batch. It does so
    once: a second `fit` with the same callback does not broadcast again.

    With the optimizer's `local_steps`, it broadcasts the weights at the beginning of each `fit`, and ends the round at
    the end. From the validation of an epoch until the next epoch begins, the model holds the synchronized weights, so
    those are validated, and saved at the end of an epoch. See docs/local-steps.md.

    Args:
        root_rank: The rank whose values the others take.
        device: TensorFlow device on which to broadcast. If empty, TensorFlow chooses it.
        local_variables: A variable of TensorFlow or Keras, or several, that are not broadcast. The same ones on all
            ranks.

    Raises:
        ValueError: `root_rank` is not an integer from 0 on, or `local_variables` contains something else than
            variables. In `fit`: there are not so many ranks; or, on all ranks: they disagree on settings or on the
            variables that they train. After the first step, on all ranks: the variables differ between ranks in number,
            shape or dtype.
        ModuleNotFoundError: In `fit`: there is Keras's TensorBoard callback, and tensorboard is not installed.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        self.root_rank = checks.integer("root_rank", root_rank, 0)
        self.device = device
        self.broadcast_done = self._has_warned = self._all_trained_together = False
        # If this rank may train alone in this `fit`: the steps that each reducer had made before it.
        self._steps_before: weakref.WeakKeyDictionary[Any, int] | None = None
        self._local: set[Any] = set()
        if isinstance(optimizer_state.tf_variable(local_variables), tf.Variable):
            local_variables = [local_variables]
        for variable in [] if local_variables is None else local_variables:
            self.register_local_var(variable)

    def register_local_var(self, var: Any) -> None:
        """Excludes a variable of TensorFlow or Keras from the broadcast.

        Raises:
            ValueError: `var` is not a variable.
        """
        variable = optimizer_state.tf_variable(var)
        if not isinstance(variable, tf.Variable):
            raise ValueError(f"All local variables must be of tf.Variable type (or Keras's), not {var!r}")
        self._local.add(variable.ref())

    def on_train_begin(self, logs: dict | None = None) -> None:
        """Checks that the ranks are about to train alike, and broadcasts if the models of all ranks are built."""
        _check_tensorboard()
        environment.train_begins(self.model)
        self._is_in_fit = False  # an earlier `fit` may have ended with an error
        if self._rounds is not None:
            # Read in the first step: a model may be built by its first batch.
            optimizer = optimizer_state.distributed_optimizer(self.model.optimizer)
            optimizer._hvdc.model = weakref.ref(self.model)
        if not self.broadcast_done:
            self._broadcast(stepped=False)
        else:
            self._agree_again()
            if self._rounds is not None:
                self._start_rounds()
        self._watch_if_alone()

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        """Broadcasts after the first step, if a model was not built before."""
        if not self.broadcast_done:
            self._broadcast(stepped=True)
        if self._steps_before is not None and not any(reducer.has_begun for reducer in alive()):
            self._warn_if_alone()  # otherwise after an epoch

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        """Tells the optimizer which epoch it is, on which `schedule` and the warm-up of `dgc` may depend."""
        environment.epoch_begins(epoch)
        super().on_epoch_begin(epoch, logs)
        self._begin_epoch(epoch, (self.params or {}).get("epochs"))

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Tells the optimizer that the epoch has ended, and passes the metrics to `hvd-compress tune` if it runs."""
        super().on_epoch_end(epoch, logs)
        tuning.metrics(logs)
        self._warn_if_alone()

    def _agree_on(self, group: Any, layout: str) -> list[agreement.Facts]:
        """As `_agree`, and learns the numbers of batches. `layout` describes the variables to broadcast."""
        everyone = self._agree(group, {_LAYOUT: layout, _BATCHES: str(self._known_batches())})
        if self._rounds is not None:
            by_rank = dict(zip(group.ranks, everyone))
            members = [by_rank[rank] for rank in self._rounds.settings.process_set.ranks if rank in by_rank]
            self._learn_batches([int(facts[_BATCHES]) for facts in members])
        return everyone

    def _agree_again(self) -> None:
        """In a later `fit`: among all ranks if all trained together in the first one, and do so as far as is known."""
        may_be_all = self._group in (None, hvd.global_process_set)
        group = hvd.global_process_set if self._all_trained_together and may_be_all else self._group
        if group is not None and group.size() > 1:
            self._agree_on(group, "")

    def _facts(self) -> agreement.Facts:
        return super()._facts() | {"whether they have broadcast the model before": str(self.broadcast_done)}

    def _start_rounds(self) -> None:
        """All ranks begin with the root's weights. Optimizers stay as they are."""
        variables = [variable.value for variable in self._rounds.variables]
        optimizer_state.broadcast(variables, self.root_rank, "hvdc.broadcast.rounds")
        self._rounds.adopt()

    def _watch_if_alone(self) -> None:
        """Rank 0 notes the steps of all reducers if the optimizer is plain: a tape or LocalSteps may exchange."""
        is_plain = self._reducer is None and not checks.is_horovods(getattr(self.model, "optimizer", None))
        watches = is_plain and hvd.size() > 1 and hvd.rank() == 0 and not self._has_warned
        self._steps_before = (
            weakref.WeakKeyDictionary((reducer, reducer.steps_made()) for reducer in alive()) if watches else None
        )

    def _warn_if_alone(self) -> None:
        """Warns if nothing is known to have reduced gradients in this `fit`, as after a saved model was loaded."""
        before, self._steps_before = self._steps_before, None
        if before is not None and not any(reducer.steps_made() > before.get(reducer, 0) for reducer in alive()):
            self._has_warned = True
            warnings.warn(
                f"the model's optimizer {type(self.model.optimizer).__name__} is not distributed: each rank trains "
                "alone, unless the model averages its gradients itself. Compile it with "
                "hvdc.DistributedOptimizer(optimizer), also after loading or copying a model",
                stacklevel=2,
            )

    def _broadcast(self, stepped: bool) -> None:
        size = hvd.size()  # raises Horovod's own error where hvd.init() was not called
        if self.root_rank >= size:
            raise ValueError(f"root_rank must be one of the {size} ranks, 0 to {size - 1}, got {self.root_rank}")
        model = self.model
        optimizer = getattr(model, "optimizer", None)
        ready = stepped or _is_built(model)
        if ready and optimizer is not None:
            # Keras does so in the first step. A root rank that restored its optimizer has its variables already.
            optimizer_state.create_variables(optimizer, model.trainable_variables)
        # `weights`, not `variables`: in Keras 3 the latter includes the states of seed generators.
        candidates = [*model.weights, *optimizer_state.optimizer_variables(optimizer)] if ready else []
        variables = [v for v in optimizer_state.unique(candidates) if v.ref() not in self._local]

        # If one rank broadcast while another trained, both would wait for ever. So ranks compare their states first.
        layout = repr([(v.shape.as_list(), v.dtype.name) for v in variables]).encode()
        state = [ready, len(variables), zlib.crc32(layout)]
        everyone = self._agree_on(hvd.global_process_set, json.dumps(state))
        self._all_trained_together = all(facts.get(_PROCESS_SET) == str(list(range(size))) for facts in everyone)
        states = [json.loads(facts[_LAYOUT]) for facts in everyone]
        if any(other != [True, *state[1:]] for other in states):
            if not stepped:
                return
            raise ValueError(
                "BroadcastGlobalVariablesCallback: model and optimizer must have variables of the same "
                f"shapes and types on all ranks. How many they have, by rank: {[s[1] for s in states]}"
            )

        with tf.device(self.device):
            optimizer_state.broadcast(variables, self.root_rank, "hvdc.broadcast")
        self.broadcast_done = True
        if self._rounds is not None:
            # Before the first step, so that a checkpoint can be restored into them.
            optimizer_state.distributed_optimizer(optimizer)._hvdc.begin_step(model.trainable_variables)
            self._rounds.adopt()


def _is_built(model: Any) -> bool:
    return bool(model.built and all(layer.built for layer in model.layers))


def _check_tensorboard() -> None:
    """Raises, before the first step, what Keras's TensorBoard callback would raise after it.

    It looks for that callback beside the one whose `on_train_begin` Keras calls now.
    """
    frame = sys._getframe(2)
    callbacks = getattr(frame.f_locals.get("self"), "callbacks", None)
    names = {type(callback).__name__ for callback in callbacks} if isinstance(callbacks, list) else set()
    if "TensorBoard" in names and importlib.util.find_spec("tensorboard") is None:
        raise ModuleNotFoundError(
            "Keras's TensorBoard callback needs tensorboard, which is not installed: pip install tensorboard, or leave "
            "the callback out (hvdc.callbacks.CompressionMonitor writes for TensorBoard without it)"
        )


class MetricAverageCallback(Callback):
    """Replaces the epoch's metrics in `logs` by their averages over all ranks.

    Put it before the callbacks that should get the averages (ReduceLROnPlateau, EarlyStopping, TensorBoard). Keras
    calls its own History and progress bar last. The logs that `on_train_end` gets are not averaged.

    Args:
        device: TensorFlow device on which to reduce. If empty, TensorFlow chooses it.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self.device = device

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Replaces each number, and each array of numbers, in `logs` by its mean over the ranks.

        Raises:
            ValueError: On all ranks: names or shapes differ between ranks.
        """
        hvd.size()  # raises Horovod's own error where hvd.init() was not called
        logs = {} if logs is None else logs
        arrays = {name: np.asarray(value) for name, value in sorted(logs.items())}
        # The kinds of booleans, integers, floats, and "V", the kind of bfloat16.
        arrays = {name: a.astype(np.float64) for name, a in arrays.items() if a.dtype.kind in "biufV"}
        layout = {name: array.shape for name, array in arrays.items()}
        # All are reduced as one vector. Horovod would detect different lengths, but not different names.
        layouts = hvd.allgather_object(layout, name="hvdc.metrics.layout")
        if any(other != layout for other in layouts):
            raise ValueError(
                "MetricAverageCallback: the metrics must have the same names and shapes on all ranks. "
                f"They are, by rank: {layouts}"
            )
        if not arrays:
            return
        vector = tf.constant(np.concatenate([array.ravel() for array in arrays.values()]))
        mean = hvd.allreduce(vector, op=hvd.Average, device_dense=self.device, name="hvdc.metrics").numpy()
        ends = np.cumsum([array.size for array in arrays.values()])
        for (name, shape), part in zip(layout.items(), np.split(mean, ends[:-1])):
            logs[name] = part.reshape(shape) if shape else float(part[0])
        tuning.metrics(logs)
