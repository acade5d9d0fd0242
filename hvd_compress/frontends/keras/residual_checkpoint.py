"""`hvdc.callbacks.ResidualCheckpoint`."""

from __future__ import annotations

import os

from ...common import checks
from .. import residuals
from .callback import Callback


class ResidualCheckpoint(Callback):
    """Saves each rank's residuals during training, and restores them when a restored model trains on.

    Put it on all ranks, next to what saves the model (ModelCheckpoint, BackupAndRestore) and with the same frequency;
    behind BackupAndRestore and BroadcastGlobalVariablesCallback, because it compares the model's
    `optimizer.iterations` with those of the saves. It restores once, before the first step of an optimizer
    that has not trained in this process. See docs/checkpoints.md.

    Raises:
        ValueError: From `on_train_begin`, on all ranks: there are saves, but none that fits this model, its
            step and its settings and is whole on all ranks.
        RuntimeError: On all ranks, when a rank cannot write.
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        save_freq: int | str = "epoch",
        max_to_keep: int = 2,
        resume: bool = True,
    ) -> None:
        """Create the callback.

        Args:
            directory: where to save; shared by all ranks, or each rank's own.
            save_freq: "epoch", or after how many batches, counted over epochs.
            max_to_keep: how many complete saves are kept, at least 1.
            resume: whether to restore what is there.

        Raises:
            ValueError: if an argument is not valid.
        """
        super().__init__()
        if save_freq != "epoch" and (
            isinstance(save_freq, bool) or not isinstance(save_freq, int) or save_freq < 1
        ):
            raise ValueError(f"save_freq must be 'epoch' or a whole number from 1 on, got {save_freq!r}")
        if isinstance(max_to_keep, bool) or not isinstance(max_to_keep, int) or max_to_keep < 1:
            raise ValueError(f"max_to_keep must be a whole number from 1 on, got {max_to_keep!r}")
        self.directory = checks.path("directory", directory)
        self.save_freq = save_freq
        self.max_to_keep = max_to_keep
        self.resume = resume
        self._batches = 0  # since the last save
        self._last = -1  # number, in its epoch, of the last batch that ended

    def on_train_begin(self, logs: dict | None = None) -> None:
        """Restore, if there is something to restore."""
        # An optimizer that has trained here has its residuals, newer than any file.
        if self.resume and not residuals.has_steps(self.model.optimizer):
            variables = self.model.trainable_variables if self.model.built else None
            residuals.load_residuals(self.model.optimizer, self.directory, variables)

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        """Count batches from 0 again."""
        self._last = -1

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        """Save, if it is time to."""
        self._batches += batch - self._last  # more than 1 with steps_per_execution
        self._last = batch
        if self.save_freq != "epoch" and self._batches >= int(self.save_freq):
            self._save()

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Save, if it is time to."""
        if self.save_freq == "epoch":
            self._save()

    def _save(self) -> None:
        self._batches = 0
        residuals.save_residuals(self.model.optimizer, self.directory, max_to_keep=self.max_to_keep)
