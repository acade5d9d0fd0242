"""Saves a training after each epoch, and finds the last save."""

from __future__ import annotations

from pathlib import Path

import horovod.tensorflow as hvd
from tensorflow import keras

import hvd_compress as hvdc

WEIGHTS = "epoch-{epoch:04d}.weights.h5"  # the weights and the state of the optimizer
KEEP = 2  # as ResidualCheckpoint does


class Residuals(hvdc.callbacks.ResidualCheckpoint):
    """Ends a run in one line if the saved residuals do not fit it: the error is the same on all workers."""

    def on_train_begin(self, logs: dict | None = None) -> None:
        try:
            super().on_train_begin(logs)
        except ValueError as error:
            raise SystemExit(str(error)) from None


class KeepNewest(keras.callbacks.Callback):
    """Deletes all saves of the weights but the newest."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        for file in saves(self.directory)[:-KEEP]:
            file.unlink()


def saves(directory: Path) -> list[Path]:
    """The saved weights, oldest first."""
    return sorted(directory.glob(WEIGHTS.replace("{epoch:04d}", "*")))


def saving(directory: Path, resume: bool) -> list[keras.callbacks.Callback]:
    """The callbacks that save weights, optimizer and residuals after each epoch, and restore residuals.

    Args:
        directory: Rank 0 writes the weights to it. Each rank writes its residuals to a folder in it.
        resume: Whether to restore residuals.
    """
    # Residuals differ from worker to worker, so each saves its own. They come first: each save of the weights then has
    # its residuals, whenever the job is killed.
    callbacks: list[keras.callbacks.Callback] = [Residuals(directory / "residuals", resume=resume)]
    if hvd.rank() == 0:  # all workers have the same weights
        callbacks.append(keras.callbacks.ModelCheckpoint(str(directory / WEIGHTS), save_weights_only=True))
        callbacks.append(KeepNewest(directory))
    return callbacks


def newest(directory: Path, resume: bool, epochs: int) -> tuple[int, Path | None]:
    """How many epochs were trained, and the weights after them, which rank 0 has; the same on all workers.

    Raises:
        SystemExit: On all workers: rank 0 cannot write to the directory; there are saves, but `resume` is False; or all
            epochs were trained.
    """
    file, error = None, ""
    if hvd.rank() == 0:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            file = (saves(directory) or [None])[-1]
        except OSError as raised:
            error = f"cannot write to --directory {directory}: {raised.strerror}"
    file, error = hvd.broadcast_object((file, error), 0)
    if error:
        raise SystemExit(error)
    if file is None:
        return 0, None
    trained = int(file.name.split("-")[1].split(".")[0])
    if not resume:
        raise SystemExit(f"{directory} has checkpoints of another run: add --resume, or name another directory")
    if trained >= epochs:
        raise SystemExit(f"{directory} has {trained} epochs already: set --epochs to more than that")
    return trained, file


def load(model: keras.Model, file: Path) -> None:
    """Restores the weights and the state of the optimizer on rank 0; the broadcast gives them to the others."""
    error = ""
    if hvd.rank() == 0:
        model.optimizer.build(model.trainable_variables)
        try:
            model.load_weights(file)
        except (OSError, ValueError, KeyError) as raised:
            error = f"{file} is damaged or of another model: {str(raised).splitlines()[0]}"
    error = hvd.broadcast_object(error, 0)
    if error:
        raise SystemExit(error)
