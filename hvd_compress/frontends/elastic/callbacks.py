"""The callbacks of `horovod.tensorflow.keras.elastic`, for every Keras."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd

from ...common import checks
from ...engine import agreement
from ..keras.callbacks import Callback, CountingCallback, RoundsCallback


class CommitStateCallback(CountingCallback):
    """Commits the elastic state every `batches_per_commit` batches, and at the end of each epoch.

    Put it last in the list of callbacks, so that it commits what the others write into the state. A commit copies
    model, optimizer and residuals to host memory, and sends the residuals to another rank. So do not commit every
    batch.

    Args:
        state: An elastic state, such as `hvdc.elastic.KerasState`.
        batches_per_commit: The number of batches between commits, at least 1.

    Raises:
        ValueError: `batches_per_commit` is not a whole number from 1 on. In `on_train_begin`, on all ranks: it differs.
    """

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state = state
        self.batches_per_commit = checks.integer("batches_per_commit", batches_per_commit, 1)

    def on_train_begin(self, logs: dict | None = None) -> None:
        """Counts from 0, so that all ranks commit after the same batches."""
        self._batches = 0
        if hvd.is_initialized() and hvd.size() > 1:
            arguments = {"batches_per_commit": self.batches_per_commit}
            agreement.on_arguments(self, arguments, hvd.global_process_set)

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        """Commits, if `batches_per_commit` batches have been trained since the last commit."""
        if self._count(batch) >= self.batches_per_commit:
            self._commit()

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Commits."""
        self._commit()

    def _commit(self) -> None:
        self._batches = 0
        self.state.commit()


class UpdateBatchStateCallback(Callback):
    """Keeps the number of completed batches of the epoch in `state.batch`, also across a reset; 0 between epochs.

    If Keras knows how many steps an epoch has, the first epoch after a reset trains only the remaining batches.

    Args:
        state: An elastic state with an attribute `batch`.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self._before_reset = 0  # batches of this epoch that were trained before a reset
        # A true value of `model.stop_training` that ends only the epoch: `on_epoch_end` recognizes and removes it.
        self._stop_epoch = object()

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        """Reads how many batches were trained before a reset."""
        self._before_reset = self.state.batch

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        """Counts the batch, and ends the epoch if it was the last one."""
        self.state.batch = self._before_reset + batch + 1
        steps = self._known_batches()
        if steps and self._before_reset and self.state.batch >= steps and not self.model.stop_training:
            self.model.stop_training = self._stop_epoch

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Sets the number to 0 for the next epoch."""
        self.state.batch = 0
        # Not if another callback set it, such as EarlyStopping.
        if self.model.stop_training is self._stop_epoch:
            self.model.stop_training = False


class UpdateEpochStateCallback(RoundsCallback):
    """Keeps the number of completed epochs in `state.epoch`, also across a reset.

    Train the remaining ones with `fit(epochs=epochs - state.epoch)`.

    Args:
        state: An elastic state with an attribute `epoch`.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def on_train_begin(self, logs: dict | None = None) -> None:
        """Checks that the ranks are about to train alike.

        Raises:
            ValueError: On all ranks: they disagree on settings or on the variables that they train.
        """
        if self._group is not None:
            self._agree(self._group, {})

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        """Tells the optimizer which epoch it is, on which `schedule` and the warm-up of `dgc` may depend."""
        super().on_epoch_begin(epoch, logs)
        epochs = (self.params or {}).get("epochs")
        # Keras counts from 0 again after a reset.
        self._begin_epoch(self.state.epoch, epochs and self.state.epoch + epochs - epoch)

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Counts the epoch."""
        super().on_epoch_end(epoch, logs)
        self.state.epoch += 1
