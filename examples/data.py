"""The images that the examples train on.

`keras.datasets` downloads MNIST and CIFAR-10 once. If that fails, the examples use scikit-learn's handwritten digits:
1,797 real scans of 8x8 pixels that need no download. 1,437 of them are for training and 360 for testing, always the
same ones.
"""

from __future__ import annotations

import contextlib
import io
import math
import socket
import threading
import time
from typing import Any, Callable, NamedTuple

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from tensorflow import keras

SERVER_TIMEOUT = 20.0  # seconds
TEST_DIGITS = 360


class Data(NamedTuple):
    """Images, float32 [count, height, width, channels] from 0 to 1, and their labels, int64 [count]."""

    name: str
    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray


def load(name: str, shape: tuple[int, int, int]) -> Data:
    """Loads a data set. Call it on all workers.

    Args:
        name: "mnist", "cifar10" or "digits".
        shape: Height, width and channels of the model's input. Digits are resized to it.
    """
    if name == "digits":
        return digits(shape)
    module = {"mnist": keras.datasets.mnist, "cifar10": keras.datasets.cifar10}[name]
    arrays, error = _in_turns(module.load_data)
    if error:
        if hvd.rank() == 0:
            print(f"{name} cannot be had ({error}): training on scikit-learn's digits instead", flush=True)
        return digits(shape)
    (x_train, y_train), (x_test, y_test) = arrays
    images = [np.reshape(x, [-1, *shape]).astype(np.float32) / 255.0 for x in (x_train, x_test)]
    labels = [np.reshape(y, [-1]).astype(np.int64) for y in (y_train, y_test)]
    return Data(name, images[0], labels[0], images[1], labels[1])


def digits(shape: tuple[int, int, int]) -> Data:
    """scikit-learn's handwritten digits, resized to `shape`. Both parts have the same proportions of digits."""
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError:
        raise SystemExit("the handwritten digits come with scikit-learn: pip install scikit-learn") from None
    x, y = load_digits(return_X_y=True)
    x = tf.image.resize(x.reshape(-1, 8, 8, 1).astype(np.float32) / 16.0, shape[:2]).numpy()
    x = np.repeat(x, shape[2], axis=-1)
    split = train_test_split(x, y.astype(np.int64), test_size=TEST_DIGITS, stratify=y, random_state=0)
    x_train, x_test, y_train, y_test = split
    return Data("digits", x_train, y_train, x_test, y_test)


def share(data: Data) -> tuple[np.ndarray, np.ndarray]:
    """The part of the training images that belongs to this worker only.

    All parts have the same size. If one worker had a step more than the others, it would wait for them for ever.
    """
    count = len(data.x_train) // hvd.size() * hvd.size()
    part = slice(hvd.rank(), count, hvd.size())
    return data.x_train[part], data.y_train[part]


def _in_turns(load_data: Callable[[], Any]) -> tuple[Any, str]:
    """Loads on the workers of each machine one after the other, so that only the first one downloads.

    Returns:
        The loaded arrays, and an error message, which is the same on all workers, or empty.
    """
    arrays = None
    for turn in range(max(hvd.allgather_object(hvd.local_size()))):
        error = ""
        if hvd.local_rank() == turn:
            try:
                arrays = _with_time_limit(load_data)
            except Exception as exception:
                error = " ".join(str(exception).split()) or type(exception).__name__
        # All workers get the error, and continue or give up together.
        error = next(filter(None, hvd.allgather_object(error)), "")
        if error:
            return None, error
    return arrays, ""


def _with_time_limit(load_data: Callable[[], Any]) -> Any:
    """Calls `load_data` without output, and gives up if a download does not start.

    Keras itself would wait for minutes. It prints a line when it starts to download, and then the progress.
    """

    class Output(io.StringIO):
        request_time = math.inf  # of a download that has not started yet

        def write(self, text: str) -> int:
            if text.strip():
                self.request_time = time.monotonic() if "Downloading" in text else math.inf
            return len(text)

    result: list[Any] = []

    def load() -> None:
        try:
            result.append(load_data())
        except Exception as exception:
            result.append(exception)

    output = Output()
    default = socket.getdefaulttimeout()
    socket.setdefaulttimeout(SERVER_TIMEOUT)  # limits each wait after the first answer
    try:
        with contextlib.redirect_stdout(output):
            thread = threading.Thread(target=load, daemon=True)
            thread.start()
            while thread.is_alive() and time.monotonic() - output.request_time < SERVER_TIMEOUT:
                thread.join(0.1)
    finally:
        socket.setdefaulttimeout(default)
    if not result:
        raise TimeoutError(f"no answer in {SERVER_TIMEOUT:g} s")
    if isinstance(result[0], Exception):
        raise result[0]
    return result[0]
