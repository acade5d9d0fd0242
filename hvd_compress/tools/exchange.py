"""A step's exchange of gradients, as training makes it, ready to be timed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from ..auto import clock
from ..auto.chooser import Stamps
from ..buckets import Shape
from ..compression import Compression
from ..exchange.common import Group
from ..plan import LayoutState, Plan
from ..reducer import Reducer
from ..settings import Settings
from ..step import Crossed, Step


def gradients(shapes: Sequence[Shape], rank: int) -> list[np.ndarray]:
    """Heavy-tailed values of another magnitude in each layer, as gradients are; others on each rank."""
    random = np.random.default_rng(rank)
    return [
        (random.standard_t(4, shape) * 10 ** random.uniform(-4, -2)).astype(np.float32) for shape in shapes
    ]


def barrier() -> None:
    """Waits for all ranks."""
    hvd.allreduce(tf.zeros([1]), name="barrier").numpy()


def slowest(seconds: Any, name: str) -> np.ndarray:
    """Of each number that of the rank where it is largest."""
    values = tf.constant(np.asarray(seconds), tf.float64)
    return np.asarray(hvd.allreduce(values, op=hvd.Max, name=name))


class Method:
    """The exchange with one compressor.

    Attributes:
        run: One step's exchange, residuals updated; returns the averaged gradients.
        timed: The same; returns float64 [3] on the host, this rank's seconds of encoding, of what was on its way,
            and of decoding.
    """

    def __init__(self, spec: str, variables: Sequence[tf.Variable], bucket_bytes: int | None = None) -> None:
        sizes = {} if bucket_bytes is None else {"bucket_bytes": bucket_bytes}
        self._reducer = Reducer(Settings(Compression.parse(spec), **sizes))
        self.run = tf.function(
            lambda: self._reducer([v.value() for v in variables], variables), autograph=False
        )
        self.timed = tf.function(
            lambda: _TimedStep(self.plan, [v.value() for v in variables]).parts(), autograph=False
        )

    @property
    def plan(self) -> Plan:
        """There after the first `run`."""
        return self._reducer.last_plan("the plan")


class _TimedStep(Step):
    """A step that takes the time of what happens to each compressed bucket."""

    def parts(self) -> tf.Tensor:
        self._stamps: list[Stamps] = []
        reduced = [tensor for tensor in self.run() if tensor is not None]
        zeros = tf.zeros([3], tf.float64)
        with tf.device("CPU"), tf.control_dependencies(reduced):
            found = [zeros]
            free = tf.constant(0.0, tf.float64)  # when the wire is free
            for stamp in self._stamps:
                begin = tf.maximum(stamp.sent, free)
                parts = [stamp.sent - stamp.begun, stamp.arrived - begin, stamp.done - stamp.arrived]
                found.append(tf.maximum(tf.stack(parts), 0.0))
                free = tf.maximum(free, stamp.arrived)
            return tf.add_n(found)

    def _exchange(self, compressor: Any, pieces: Any, state: LayoutState, index: int) -> tuple[Crossed, Any]:
        begun = clock.stamp(pieces)
        with tf.control_dependencies([begun]):
            pieces = [tf.identity(piece) for piece in pieces]
        found, incoming = super()._exchange(compressor, pieces, state, index)
        stamps = [clock.stamp([found.outgoing]), clock.stamp([incoming]), clock.stamp(found.pieces)]
        self._stamps.append(Stamps(begun, *stamps))
        return found, incoming

    def _group(self, what: str) -> Group:
        return super()._group(f"timed_{what}")


def relative_error(reduced: Sequence[tf.Tensor], exact: Sequence[tf.Tensor]) -> float:
    """||reduced - exact|| / ||exact||."""
    lost = sum(
        float(np.sum(np.square(a.numpy() - b.numpy(), dtype=np.float64))) for a, b in zip(reduced, exact)
    )
    whole = sum(float(np.sum(np.square(b.numpy(), dtype=np.float64))) for b in exact)
    return float(np.sqrt(lost / whole)) if whole else 0.0
