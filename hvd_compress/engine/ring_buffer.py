"""Rows of numbers that steps write inside the graph, and the host reads later."""

from __future__ import annotations

import threading
from collections.abc import Hashable

import numpy as np
import tensorflow as tf

from ..common import tracing


class RingBuffer:
    """Keeps the newest rows on the host, float64. The training loop never waits for a reader.

    Args:
        rows: How many rows are kept.
        width: The numbers of a row.
        name: Of the variable with the rows; that of the variable with their number begins with it.
    """

    def __init__(self, rows: int, width: int, name: str) -> None:
        self._length, self._width = rows, width
        self._lock = threading.Lock()  # Keras may call callbacks from another thread
        self._num_read: dict[Hashable, int] = {}  # by reader
        with tf.init_scope(), tf.device("CPU"):
            self._rows = tracing.variable(tf.zeros([rows, width], tf.float64), name)
            self._count = tracing.variable(tf.constant(0, tf.int64), f"{name}_count")

    # In the graph

    def written(self) -> tf.Tensor:
        """The number of rows so far, an int64 scalar."""
        return self._count.read_value()

    def write(self, row: tf.Tensor) -> None:
        """Adds a row, float64 [width]. Call it on the CPU's device."""
        index = tf.cast(self.written() % self._length, tf.int32)
        written = self._rows.scatter_nd_update([[index]], row[None])
        with tf.control_dependencies([written]):
            self._count.assign_add(1)

    # On the host

    @property
    def count(self) -> int:
        """The number of rows so far."""
        with tf.init_scope():  # a watch that begins with the first plan asks while a step is traced
            return int(self._count)

    def pending(self, reader: Hashable = None) -> int:
        """The number of rows since the last `read` of this reader."""
        return self.count - self._num_read.get(reader, 0)

    def skip(self, reader: Hashable = None) -> None:
        """Rows so far are not read."""
        with self._lock:
            self._num_read[reader] = self.count

    def read(self, reader: Hashable = None) -> np.ndarray:
        """The rows since the reader's last call, as far as they are kept: float64 [rows, width].

        Several readers may each read all rows.
        """
        with self._lock:
            count = self.count
            new = np.arange(max(self._num_read.get(reader, 0), count - self._length), count)
            self._num_read[reader] = count
            return self._at(new)

    def newest(self) -> np.ndarray:
        """The newest row, float64 [1, width], whoever has read it; [0, width] before the first one."""
        count = self.count
        return self._at(np.arange(max(count - 1, 0), count))

    def _at(self, numbers: np.ndarray) -> np.ndarray:
        if not len(numbers):
            return np.empty([0, self._width])
        with tf.device("CPU"):
            rows: np.ndarray = self._rows.sparse_read(numbers % self._length).numpy()
        return rows
