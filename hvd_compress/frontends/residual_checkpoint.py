"""`hvdc.callbacks.ResidualCheckpoint`."""

from __future__ import annotations

import os

from ..common import checks
from ..common.elastic import is_elastic
from ..engine import agreement
from . import residuals
from .keras.callbacks import CountingCallback


class ResidualCheckpoint(CountingCallback):
    """Saves each rank's residuals during training, and restores them when training resumes.

    Put it on all ranks, with the same frequency as the callback that saves the model. Put it behind
    BroadcastGlobalVariablesCallback, because it selects the save whose step equals the model's `optimizer.iterations`.
    Put it in front of ModelCheckpoint: each saved model then has its residuals, whenever the job ends. It restores
    once: before the first step of an optimizer that has not trained in this process. See docs/checkpoints.md.

    Args:
        directory: The directory of the saves. All ranks may share it, or each rank may have one of its own.
        save_freq: "epoch", or a number of batches, counted across epochs; in an elastic job, from 0 after each reset.
        max_to_keep: The number of complete saves to keep, at least 1.
        resume: Whether to restore an existing save.

    Raises:
        TypeError: `directory` is not a path.
        ValueError: Another argument is not valid. In `on_train_begin`, on all ranks: they have other arguments, or
            there are saves, but none that fits this model, its step and its settings and is intact on all ranks.
        RuntimeError: On all ranks: a rank cannot write its file.
    """

    def __init__(
        self, directory: str | os.PathLike, save_freq: int | str = "epoch", max_to_keep: int = 2, resume: bool = True
    ) -> None:
        super().__init__()
        if save_freq != "epoch" and (isinstance(save_freq, bool) or not isinstance(save_freq, int) or save_freq < 1):
            raise ValueError(f"save_freq must be 'epoch' or a whole number from 1 on, got {save_freq!r}")
        self.directory = checks.path("directory", directory)
        self.save_freq = save_freq
        self.max_to_keep = checks.integer("max_to_keep", max_to_keep, 1)
        self.resume = resume

    def on_train_begin(self, logs: dict | None = None) -> None:
        """Restores a save, if there is one."""
        if is_elastic():  # a rank that has joined has counted no batches
            self._batches = 0
        if self._group is not None:
            arguments = {"save_freq": self.save_freq, "max_to_keep": self.max_to_keep, "resume": self.resume}
            arguments["model has trained in this process"] = residuals.has_steps(self.model.optimizer)
            agreement.on_arguments(self, arguments, self._group)
        # The residuals of an optimizer that has trained in this process are newer than any file.
        if self.resume and not residuals.has_steps(self.model.optimizer):
            variables = self.model.trainable_variables if self.model.built else None
            residuals.load_residuals(self.model.optimizer, self.directory, variables)

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        """Saves, if `save_freq` batches have been trained since the last save."""
        batches = self._count(batch)
        if self.save_freq != "epoch" and batches >= int(self.save_freq):
            self._save()

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Saves, if `save_freq` is "epoch"."""
        if self.save_freq == "epoch":
            self._save()

    def _save(self) -> None:
        self._batches = 0
        residuals.save_residuals(self.model.optimizer, self.directory, max_to_keep=self.max_to_keep)
