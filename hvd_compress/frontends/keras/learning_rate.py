"""Horovod's callbacks that set the learning rate, for Keras 3, `tf_keras` and the Keras 2 of TensorFlow 2.15."""

from __future__ import annotations

from typing import Any, Callable

import horovod.tensorflow as hvd

from . import optimizer_state
from .callbacks import Callback


class LearningRateScheduleCallback(Callback):
    """Sets the learning rate to `initial_lr * multiplier` in the epochs from `start_epoch` to before `end_epoch`.

    A constant multiplier means exponential decay: `initial_lr * multiplier ** (epoch - start_epoch)`. At the end of
    each epoch, the callback writes the learning rate to the logs as `lr`.

    Momentum correction: the velocity of SGD and RMSprop includes the learning rate, `v = m * v - lr * g`, so older
    gradients act with older rates. With the correction, v is multiplied by `new_lr / old_lr` whenever the rate changes.
    The updates are then those of `u = m * u + g; w = w - lr * u`.

    Source: Goyal et al., Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour (arXiv 1706.02677), section 3,
    "Momentum correction".

    Args:
        initial_lr: The learning rate that is multiplied.
        multiplier: A constant, or a function of the epoch. Epochs count from 0.
        start_epoch: The first epoch in which the rate is set.
        end_epoch: The first epoch in which it is no longer set. None sets it until training ends.
        staircase: Whether to set the rate once, at the start of each epoch. If False, it is set before each step, and
            `multiplier` gets a fractional epoch, `epoch + batch / steps_per_epoch`.
        momentum_correction: Whether to correct the velocity of optimizers that have one.
        steps_per_epoch: Needed if `staircase` is False. None uses the number that Keras knows.

    Raises:
        ValueError: `initial_lr` is None. When training begins: the optimizer's learning rate is a schedule, or Keras
            does not know the number of steps.
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
        super().__init__()
        if initial_lr is None:
            raise ValueError("Parameter `initial_lr` is required")
        self.initial_lr = initial_lr
        self.multiplier = multiplier if callable(multiplier) else lambda epoch: multiplier ** (epoch - start_epoch)
        self.start_epoch = start_epoch
        self.end_epoch = float("inf") if end_epoch is None else end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch or 0
        self.current_epoch = 0

    def on_train_begin(self, logs: dict | None = None) -> None:
        """Checks that the rate can be set, and looks up the number of steps if it is needed."""
        self._rate()
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = (self.params or {}).get("steps") or 0
            if not self.steps_per_epoch:
                raise ValueError(
                    "Could not autodetect the number of steps per epoch. Please specify the steps_per_epoch "
                    f"parameter to the {type(self).__name__}()."
                )

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        """Stores the number of the epoch."""
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        """Sets the rate."""
        if self.start_epoch <= self.current_epoch < self.end_epoch:
            if not self.staircase:
                self._set_rate(self.current_epoch + batch / self.steps_per_epoch)
            elif batch == 0:
                self._set_rate(self.current_epoch)

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Writes the rate to the logs, as `lr`."""
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
        # Horovod changes the optimizer's `momentum` for one step instead. Since Keras 2.11 that is a Python number,
        # which a traced step does not read again. Scaling v once makes the same update, m * (new / old * v) - new * g.
        # It is also correct for Nesterov momentum, which uses m twice. If the old rate is 0, v contains no gradients.
        if self.momentum_correction and old not in (0, new):
            for velocity in optimizer_state.velocities(self.model):
                velocity.assign(velocity * (new / old))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate gradually, from `initial_lr / size` to `initial_lr`.

    Before each step, the rate is set to `initial_lr / size * (epoch * (size - 1) / warmup_epochs + 1)`. Here, size is
    the number of ranks, and epoch is a fraction that includes this step. After the warm-up the rate does not change.

    Source: Goyal et al. (arXiv 1706.02677), section 2.2, gradual warmup.

    Args:
        initial_lr: The learning rate at the end of the warm-up.
        warmup_epochs: The number of epochs of the warm-up.
        momentum_correction: As in `LearningRateScheduleCallback`.
        steps_per_epoch: None uses the number that Keras knows.
        verbose: If above 0, rank 0 prints a line at the end of the warm-up.

    Raises:
        ValueError: As in `LearningRateScheduleCallback`.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            epoch += 1 / self.steps_per_epoch  # as after this step
            return (epoch * (hvd.size() - 1) / warmup_epochs + 1) / hvd.size()

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
        """Writes the rate to the logs, as `lr`, and prints a line at the end of the warm-up."""
        super().on_epoch_end(epoch, logs)
        if epoch == self.end_epoch - 1 and self.verbose > 0 and hvd.rank() == 0:
            rate = float(self._rate().numpy())
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}.")
