"""`hvdc.record_gradients`: the gradients of a model, in a file for `hvdc.compare`."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from ..common import checks, gradient_file
from ..common.names import path_of
from .evaluation import Objective, batches_of, restored

_WHO = "record_gradients"


def record_gradients(
    path: str | os.PathLike, model: Any, data: Any, loss: Any = None, *, steps: int = 8, batch_size: int = 32
) -> None:
    """Writes the gradients of a Keras model to a file for `hvdc.compare`. One process is enough, without `hvd.init()`.

    They are the gradients of so many batches at the model's present weights, with training=True. Record them after some
    training: the first gradients of fresh weights are unlike those that follow. To record while a model trains on
    several ranks, use `hvdc.callbacks.CompressionMonitor(..., gradients=100)`, or `hvdc.profile` in a custom loop.

    The file has one float32 array "STEP/VARIABLE" for each step, from 0 on, and variable, such as
    "0/sequential/dense/kernel". Gradients of embeddings are dense, as with `sparse_as_dense=True`.

    Example:
        hvdc.record_gradients("gradients.npz", model, dataset)
        print(hvdc.compare("gradients.npz"))

    Args:
        path: The file; its name ends in .npz. An existing file is replaced.
        model: A model of Keras 3, of `tf_keras`, or of `tf.keras` in TensorFlow 2.15. Its weights and metrics are
            restored at the end. Its optimizer is not used.
        data: Batches (x, y) or (x, y, sample_weight), or a tuple of such arrays, as in `hvdc.sensitivity`.
        loss: A Keras loss, its name, or a function of (y, y_pred). None uses the loss that the model was compiled with.
        steps: Number of batches; if there are fewer, all are used.
        batch_size: Samples per batch, if `data` is a tuple of arrays.

    Raises:
        TypeError: `path` is not a path.
        ValueError: An argument is not valid; the model has no loss or no trainable weights; or data is empty.
        OSError: The file cannot be written.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"{_WHO}: path must be the path of a file, got {type(path).__name__}")
    if Path(os.fsdecode(path)).suffix != ".npz":
        raise ValueError(f"{_WHO}: {os.fsdecode(path)} does not end in .npz")
    checks.integer(f"{_WHO}: steps", steps, 1)
    checks.integer(f"{_WHO}: batch_size", batch_size, 1)
    batches = batches_of(data, steps, batch_size, _WHO)
    if not batches:
        raise ValueError(f"{_WHO}: data is empty")
    objective = Objective(model, loss, batches[0], _WHO, training=True)
    names = [path_of(variable) for variable in objective.variables]
    with contextlib.suppress(FileNotFoundError):
        os.remove(path)
    with restored(model):
        for step, batch in enumerate(batches):
            gradient_file.append(path, step, names, [gradient.numpy() for gradient in objective.gradient(batch)])
