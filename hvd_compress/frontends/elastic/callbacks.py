"""The elastic callbacks of `horovod.tensorflow.keras.elastic`, for every Keras."""

from __future__ import annotations

from typing import Any

from ..keras import epochs
from ..keras.callback import Callback


class CommitStateCallback(Callback):
    """Commits the state every `batches_per_commit` batches, and at the end of each epoch.

    The last one in the list of callbacks, so that what the others put into the state is committed, too. A commit copies
    model, optimizer and residuals to the host's memory, and residuals to another rank: not every batch.
    """

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        """Create the callback.

        Args:
            state: an elastic state, such as `hvdc.elastic.KerasState`.
            batches_per_commit: after how many batches it is committed.

        Raises:
            ValueError: if `batches_per_commit` is no whole number from 1 on.
        """
        super().__init__()
        if (
            isinstance(batches_per_commit, bool)
            or not isinstance(batches_per_commit, int)
            or batches_per_commit < 1
        ):
            raise ValueError(
                f"batches_per_commit must be a whole number from 1 on, got {batches_per_commit!r}"
            )
        self.state = state
        self.batches_per_commit = batches_per_commit
        self._batches = 0  # since the last commit
        self._last = -1  # number, in its epoch, of the last batch that ended

    def on_train_begin(self, logs: dict | None = None) -> None:
        """Count anew, so that all ranks commit after the same batches."""
        self._batches = 0

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        """Count batches from 0 again."""
        self._last = -1

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        """Commit, if it is time to."""
        self._batches += batch - self._last  # more than 1 with steps_per_execution
        self._last = batch
        if self._batches >= self.batches_per_commit:
            self._batches = 0
            self.state.commit()

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Commit."""
        self._batches = 0
        self.state.commit()


class UpdateBatchStateCallback(Callback):
    """Keeps in `state.batch` how many batches of the epoch are done, also before a reset; 0 between epochs.

    The first epoch after a reset is cut short by them, where Keras knows how many steps an epoch has.
    """

    def __init__(self, state: Any) -> None:
        """Create the callback.

        Args:
            state: an elastic state with an attribute `batch`.
        """
        super().__init__()
        self.state = state
        self._before = 0  # batches of this epoch that were done before a reset
        self._cut = _Cut()

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        """See where the epoch begins."""
        self._before = self.state.batch

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        """Count the batch, and end the epoch if it was the last one."""
        self.state.batch = self._before + batch + 1
        steps = (self.params or {}).get("steps")
        if steps and self._before and self.state.batch >= steps and not self.model.stop_training:
            self.model.stop_training = self._cut

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Begin the next epoch at 0."""
        self.state.batch = 0
        if self.model.stop_training is self._cut:  # and not what EarlyStopping, say, has put there since
            self.model.stop_training = False


class UpdateEpochStateCallback(Callback):
    """Keeps in `state.epoch` how many epochs are done, also before a reset: `fit(epochs=epochs - state.epoch)`."""

    def __init__(self, state: Any) -> None:
        """Create the callback.

        Args:
            state: an elastic state with an attribute `epoch`.
        """
        super().__init__()
        self.state = state

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        """Tell the optimizer which epoch it is, which counts in the warm-up of `dgc`."""
        epochs.begin(self.model, self.state.epoch)

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Count the epoch."""
        epochs.end(self.model)
        self.state.epoch += 1


class _Cut:
    """Ends an epoch, in the place of the True that ends training."""

    def __bool__(self) -> bool:
        return True
