"""Horovod's Keras callbacks, for Keras 3, `tf_keras` and the Keras 2 of TensorFlow 2.15 alike.

Names, arguments and meaning are those of `horovod.tensorflow.keras.callbacks` 0.28.1, which fail on Keras 3
(https://github.com/horovod/horovod/issues/4290). Nothing here
asks which Keras a model belongs to. `CompressionMonitor` and `ResidualCheckpoint` are not Horovod's.
"""

from __future__ import annotations

import zlib
from typing import Any, Callable

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from ...common import checks
from ...monitor import tuning
from . import epochs, optimizer_state
from .broadcast import broadcast, unique
from .callback import Callback
from .compression_monitor import CompressionMonitor as CompressionMonitor
from .residual_checkpoint import ResidualCheckpoint as ResidualCheckpoint


class BroadcastGlobalVariablesCallback(Callback):
    """Gives every rank the root's model and optimizer when training starts.

    All ranks must start from the same state, be it random or restored from a checkpoint on the root alone.
    Broadcast are the model's weights (trained or not), the optimizer's variables and its learning rate.
    Metrics and the states of random seed generators stay each rank's own.

    It happens before the first step; or after it, if a rank has a model that takes its shape from the first
    batch. It happens once: a second `fit` with the same object does not broadcast again.

    Raises:
        ValueError: on all ranks, after the first step, if the variables differ in number, shape or type.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        """Create the callback.

        Args:
            root_rank: the rank whose values the others take.
            device: TensorFlow device to broadcast on; empty leaves it to TensorFlow.
            local_variables: a variable of TensorFlow or Keras, or several, that stay each rank's own; the
                same ones on all ranks.

        Raises:
            ValueError: if `root_rank` is no rank, or `local_variables` holds anything but variables.
        """
        super().__init__()
        self.root_rank = checks.integer("root_rank", root_rank, 0)
        self.device = device
        self.broadcast_done = False
        self._local: set[Any] = set()
        if local_variables is None:
            local_variables = []
        elif isinstance(optimizer_state.tf_variable(local_variables), tf.Variable):
            local_variables = [local_variables]
        for variable in local_variables:
            self.register_local_var(variable)

    def register_local_var(self, var: Any) -> None:
        """Keep one more variable, of TensorFlow or Keras, out of the broadcast.

        Raises:
            ValueError: if it is not a variable.
        """
        variable = optimizer_state.tf_variable(var)
        if not isinstance(variable, tf.Variable):
            raise ValueError(f"All local variables must be of tf.Variable type (or Keras's), not {var!r}")
        self._local.add(variable.ref())

    def on_train_begin(self, logs: dict | None = None) -> None:
        """Broadcast if all ranks are ready for it."""
        if not self.broadcast_done:
            self._broadcast(stepped=False)

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        """Broadcast after the first step, if it was too early before."""
        if not self.broadcast_done:
            self._broadcast(stepped=True)

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        """Tell the optimizer which epoch it is, which counts in the warm-up of `dgc`."""
        epochs.begin(self.model, epoch)

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Tell the optimizer that it is over; and `hvd-compress tune` this rank's metrics, if it asked for them."""
        epochs.end(self.model)
        tuning.metrics(logs)

    def _broadcast(self, stepped: bool) -> None:
        size = hvd.size()  # raises Horovod's own error where hvd.init() was not called
        if self.root_rank >= size:
            raise ValueError(
                f"root_rank must be one of the {size} ranks, 0 to {size - 1}, got {self.root_rank}"
            )
        model = self.model
        optimizer = getattr(model, "optimizer", None)
        ready = stepped or (model.built and all(layer.built for layer in model.layers))
        if ready and optimizer is not None:
            # Keras does it in the first step. But a root that restored its optimizer has it done already.
            optimizer_state.create_variables(optimizer, model.trainable_variables)
        # `weights`, not `variables`: in Keras 3 the latter has the seed generators' states.
        held = [*model.weights, *optimizer_state.optimizer_variables(optimizer)] if ready else []
        variables = [variable for variable in unique(held) if variable.ref() not in self._local]

        # If one rank broadcast while another trained, both would wait for ever: all decide on equal numbers.
        layout = repr([(v.shape.as_list(), v.dtype.name) for v in variables]).encode()
        state = (ready, len(variables), zlib.crc32(layout))
        states = hvd.allgather_object(state, name="hvdc.broadcast.layout")
        if set(states) != {(True, *state[1:])}:
            if not stepped:
                return
            raise ValueError(
                "BroadcastGlobalVariablesCallback: model and optimizer must have variables of the same "
                f"shapes and types on all ranks. How many they have, by rank: {[s[1] for s in states]}"
            )

        with tf.device(self.device):
            broadcast(variables, self.root_rank, "hvdc.broadcast")
        self.broadcast_done = True


class MetricAverageCallback(Callback):
    """Averages the epoch's metrics over all ranks, in place in the logs.

    Put it before the callbacks that should see the averages (ReduceLROnPlateau, EarlyStopping, TensorBoard).
    Keras calls its own History and progress bar last. What `fit` hands to `on_train_end` is not averaged.
    """

    def __init__(self, device: str = "") -> None:
        """Create the callback.

        Args:
            device: TensorFlow device to reduce on; empty leaves it to TensorFlow.
        """
        super().__init__()
        self.device = device

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Replace every number, and every array of numbers, in `logs` by its mean over the ranks.

        Raises:
            ValueError: on all ranks, if the names or shapes differ between ranks.
        """
        hvd.size()  # raises Horovod's own error where hvd.init() was not called
        logs = {} if logs is None else logs
        arrays = {name: np.asarray(value) for name, value in sorted(logs.items())}
        # Booleans, integers, floats, and "V", which is bfloat16.
        arrays = {name: a.astype(np.float64) for name, a in arrays.items() if a.dtype.kind in "biufV"}
        layout = {name: array.shape for name, array in arrays.items()}
        # All go as one vector. Horovod would notice if its length differed, but not if only the names did.
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


class LearningRateScheduleCallback(Callback):
    """Sets the learning rate to `initial_lr * multiplier` from `start_epoch` on, until `end_epoch`.

    A constant multiplier means exponential decay, `multiplier ** (epoch - start_epoch)`. At the end of each
    epoch the rate goes to the logs, as `lr`.

    Momentum correction: SGD and RMSprop keep a velocity that includes the learning rate,
    `v = m * v - lr * g`, in which older gradients act with older rates. With the correction, v is multiplied
    by `new_lr / old_lr` whenever the rate changes; the updates become those of
    `u = m * u + g; w = w - lr * u`.

    Source: Goyal et al., Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour (arXiv 1706.02677),
    section 3, "Momentum correction".
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        """Create the callback.

        Args:
            initial_lr: the rate that is multiplied.
            multiplier: a constant, or a function of the epoch; epochs count from 0.
            start_epoch: the first epoch in which the rate is set.
            end_epoch: the first epoch in which it is not set any more; None for never.
            staircase: set the rate once, at the start of each epoch. If False it is set before each step, and
                `multiplier` gets the epoch as a fraction, `epoch + batch / steps_per_epoch`.
            momentum_correction: correct the velocity, in optimizers that have one.
            steps_per_epoch: needed only if not `staircase`; None asks Keras.

        Raises:
            ValueError: if `initial_lr` is None.
        """
        super().__init__()
        if initial_lr is None:
            raise ValueError("Parameter `initial_lr` is required")
        self.initial_lr = initial_lr
        self.multiplier = (
            multiplier if callable(multiplier) else lambda epoch: multiplier ** (epoch - start_epoch)
        )
        self.start_epoch = start_epoch
        self.end_epoch = float("inf") if end_epoch is None else end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch or 0
        self.current_epoch = 0

    def on_train_begin(self, logs: dict | None = None) -> None:
        """Check that the rate can be set, and find the number of steps if it is needed.

        Raises:
            ValueError: if the rate is a schedule, or if not even Keras knows the number of steps.
        """
        self._rate()
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = (self.params or {}).get("steps") or 0
            if not self.steps_per_epoch:
                raise ValueError(
                    "Could not autodetect the number of steps per epoch. Please specify the steps_per_epoch "
                    f"parameter to the {type(self).__name__}()."
                )

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        """Remember which epoch it is."""
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        """Set the rate."""
        if self.start_epoch <= self.current_epoch < self.end_epoch:
            if not self.staircase:
                self._set_rate(self.current_epoch + batch / self.steps_per_epoch)
            elif batch == 0:
                self._set_rate(self.current_epoch)

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Write the rate to the logs, as `lr`."""
        if logs is not None:
            logs["lr"] = float(self._rate().numpy())

    def _rate(self) -> Any:
        optimizer = getattr(self.model, "optimizer", None)
        rate = optimizer_state.learning_rate(optimizer)
        if not hasattr(rate, "assign"):
            raise ValueError(
                f"{type(self).__name__} cannot set the learning rate of {type(optimizer).__name__}, because "
                f"it is a {type(rate).__name__}. Give the optimizer a number as its learning rate."
            )
        return rate

    def _set_rate(self, epoch: float) -> None:
        rate = self._rate()
        old = float(rate.numpy())
        rate.assign(self.initial_lr * self.multiplier(epoch))
        new = float(rate.numpy())
        # Horovod changes the optimizer's `momentum` for one step instead. Since Keras 2.11 that is a Python
        # number, which the traced step does not read again. Scaling v once is the same update,
        # m * (new / old * v) - new * g, and the right one for Nesterov's too, where m acts a second time.
        # With an old rate of 0 there is no ratio, and in v no gradient that it could restore.
        if self.momentum_correction and old not in (0, new):
            for velocity in optimizer_state.velocities(self.model):
                velocity.assign(velocity * (new / old))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from `initial_lr / size` to `initial_lr`, a little before each step.

    The rate is `initial_lr / size * (epoch * (size - 1) / warmup_epochs + 1)`, where size is the number of
    ranks and epoch a fraction that counts the step as done. After the warm-up the rate stays as it is.

    Source: Goyal et al. (arXiv 1706.02677), section 2.2, gradual warmup.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        """Create the callback.

        Args:
            initial_lr: the rate at the end of the warm-up.
            warmup_epochs: how many epochs that takes.
            momentum_correction: as in `LearningRateScheduleCallback`.
            steps_per_epoch: None asks Keras.
            verbose: if above 0, rank 0 prints a line when the warm-up is over.

        Raises:
            ValueError: if `initial_lr` is None.
        """

        def multiplier(epoch: float) -> float:
            done = epoch + 1 / self.steps_per_epoch
            return (done * (hvd.size() - 1) / warmup_epochs + 1) / hvd.size()

        super().__init__(
            initial_lr,
            multiplier,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Write the rate to the logs, as `lr`, and say when the warm-up is over."""
        super().on_epoch_end(epoch, logs)
        if epoch == self.end_epoch - 1 and self.verbose > 0 and hvd.rank() == 0:
            rate = float(self._rate().numpy())
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}.")
