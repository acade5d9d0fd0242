"""What this package's Keras callbacks share."""

from __future__ import annotations

from typing import Any

from tensorflow import keras

from .optimizer_state import distributed_optimizer


class Callback(keras.callbacks.Callback):
    """Base class of the callbacks. A callback for Keras 3 that also has what a `tf_keras` model asks for."""

    # No batch hook here reads its logs, so Keras 2 need not wait for each step's results.
    _supports_tf_logs = True
    _implements_train_batch_hooks = staticmethod(lambda: True)
    _implements_test_batch_hooks = staticmethod(lambda: False)
    _implements_predict_batch_hooks = staticmethod(lambda: False)


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


def begin_epoch(model: Any, epoch: int) -> None:
    """Tells the reducer of the model's optimizer that epoch `epoch`, counted from 0, begins. All ranks call it."""
    optimizer = distributed_optimizer(getattr(model, "optimizer", None))
    if optimizer is not None:
        optimizer._hvdc.reducer.begin_epoch(epoch)


def end_epoch(model: Any) -> None:
    """Tells the reducer of the model's optimizer that the epoch has ended."""
    optimizer = distributed_optimizer(getattr(model, "optimizer", None))
    if optimizer is not None:
        optimizer._hvdc.reducer.end_epoch()
