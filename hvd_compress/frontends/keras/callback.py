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


class BatchCounter:
    """Counts batches. With `steps_per_execution`, Keras calls a batch hook once for several batches.

    Attributes:
        count: Batches since the counter was made, or since the caller set it to 0.
    """

    def __init__(self) -> None:
        self.count = 0
        self._last = -1  # index, in its epoch, of the last batch that was counted

    def new_epoch(self) -> None:
        """Keras numbers batches from 0 again."""
        self._last = -1

    def add(self, batch: int) -> int:
        """Counts all batches up to this one, and returns `count`."""
        # Keras 3 may call batch hooks from several threads, and so in another order.
        self.count += max(0, batch - self._last)
        self._last = max(batch, self._last)
        return self.count


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
