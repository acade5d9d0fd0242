"""What is measured of a step while somebody watches, kept in the graph until the host asks for it.

A row per step in a ring of rows on the host: the training loop never waits for it. Only this rank's numbers; no
collective is added, and none gets another name or place, so that some ranks may be watched and others not.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from ..common import tracing
from ..engine.clock import Timestamps
from ..engine.norms import NORMS
from ..engine.observer import Observer, StepMeasurement
from ..engine.plan import Plan
from ..exchange import uncompressed

# Steps that are kept until they are read.
ROWS = 512
# Norms are taken in each of the first so many steps, and in every so-manieth from then on: they read gradients
# and residuals once more, which takes some tens of milliseconds for 25M elements on one core.
NORMS_EVERY = 20
# On which the link is measured; the largest is left out where it would take longer than so many seconds.
_LINK_BYTES = (64, 2**18, 2**22)
_REPEATS, _PATIENCE = 4, 0.3
HEADER = ("step", "committed", "ready", "loss_total", "loss_count")
TIMES = Timestamps._fields
# Bytes of IndexedSlices, which differ from step to step, as in `WatchedBucket`; NaN for other buckets.
BYTES = ("sent_bytes", "plain_bytes")
COLUMNS = (*TIMES, *NORMS, "choice", *BYTES)

# The running sum of the loss and the weight that it stands for (of Keras's metric), as tensors.
Loss = Callable[[], "tuple[tf.Tensor, tf.Tensor] | None"]


class WatchedBucket(NamedTuple):
    """What is known of a bucket before the first step.

    Attributes:
        name: "0", "1", ... in the order in which they cross; "dense-0", ... of uncompressed gradients; "sparse-0",
            ... of IndexedSlices.
        nbytes: Of its gradients; 0 for IndexedSlices, which differ from step to step.
        plain: Bytes that a rank sends if it is not compressed; 0 for IndexedSlices.
        compressors: Spec strings of what it may be compressed with.
        sent: Bytes that a rank sends with each of these; 0 for IndexedSlices.
    """

    name: str
    nbytes: int
    plain: int
    compressors: tuple[str, ...]
    sent: tuple[int, ...]


class Recorder(Observer):
    """Records the steps of one plan.

    Attributes:
        buckets: Those of the plan, then the uncompressed ones, then IndexedSlices.
    """

    records_steps = True

    def __init__(self, plan: Plan, loss: Loss | None = None) -> None:
        self.buckets = watched_buckets(plan)
        self._loss = loss
        self._lock = threading.Lock()  # Keras may call callbacks from another thread
        self._seen = 0
        self._order = _order(len(self.buckets))
        width = len(self._order)
        with tf.init_scope(), tf.device("CPU"):
            self._rows = tracing.variable(tf.zeros([ROWS, width], tf.float64), f"{plan.name}_watched")
            self._count = tracing.variable(tf.constant(0, tf.int64), f"{plan.name}_watched_steps")

    # In the graph

    def wants_times(self, bucket: int) -> bool:
        """For all buckets."""
        return True

    def sample_norms(self) -> tf.Tensor:
        """Whether norms are taken in this step; a bool scalar."""
        with tf.device("CPU"):
            count = self._count.read_value()
            return (count < NORMS_EVERY) | (count % NORMS_EVERY == 0)

    def observe(self, measurement: StepMeasurement) -> None:
        """Keeps one step."""
        rows = [bucket for bucket in measurement.buckets if bucket is not None] + measurement.others
        with tf.device("CPU"):
            nan = tf.constant(math.nan, tf.float64)
            loss = (self._loss() if self._loss is not None else None) or (nan, nan)
            head = (measurement.step, measurement.committed, measurement.ready, *loss)
            times = (time for bucket in rows for time in bucket.timestamps)
            # Few operations, each on all buckets: in another order than that of a row, see `_order`.
            embedding_bytes = measurement.embedding_bytes
            unknown = tf.fill([len(rows) - embedding_bytes.shape[0], len(BYTES)], nan)
            row = [
                tf.stack([*map(_double, head), *times]),
                _double(tf.concat([bucket.norms for bucket in rows], 0)),
                _double(tf.stack([bucket.choice for bucket in rows])),
                tf.reshape(tf.concat([unknown, embedding_bytes], 0), [-1]),
            ]
            index = tf.cast(self._count.read_value() % ROWS, tf.int32)
            written = self._rows.scatter_nd_update([[index]], tf.concat(row, 0)[None])
            with tf.control_dependencies([written]):
                self._count.assign_add(1)

    # On the host

    def pending(self) -> int:
        """How many steps were made since the last `read`."""
        return int(self._count) - self._seen

    def read(self) -> np.ndarray:
        """The steps since the last call, float64 [steps, HEADER + COLUMNS of each bucket]; the newest 512 of them."""
        with self._lock:
            count = int(self._count)
            new = np.arange(max(self._seen, count - ROWS), count)
            self._seen = count
            if not len(new):
                return np.empty([0, len(self._order)])
            with tf.device("CPU"):
                rows: np.ndarray = self._rows.sparse_read(new % ROWS).numpy()
        return rows[:, self._order]


def _order(buckets: int) -> np.ndarray:
    """Where what is read is in what is recorded, int [HEADER + COLUMNS of each bucket].

    Recorded is the header, and then all buckets' stamps, all their norms, all choices, all bytes.
    """
    header = np.arange(len(HEADER))
    cells, begin = [], len(HEADER)
    for width in (len(TIMES), len(NORMS), 1, len(BYTES)):
        cells.append(begin + np.arange(buckets * width).reshape(buckets, width))
        begin += buckets * width
    return np.concatenate([header, np.concatenate(cells, 1).ravel()])


def measure_link(process_set: Any) -> tuple[float, float] | None:
    """Seconds that an allreduce takes, and that each byte which a rank sends in it takes; the same on all ranks.

    A collective call of the process set, once for each plan if anybody watches: a tenth of a second at 1 Gbit/s.
    What it tells cannot be seen later, when only compressed bytes cross. None in TensorFlow 1's graphs.
    """
    if not tf.executing_eagerly():
        return None
    with tf.device("CPU"):

        def fastest(nbytes: int) -> float:
            times = []
            for _ in range(_REPEATS):
                begin = time.perf_counter()
                hvd.allreduce(
                    tf.zeros([nbytes // 4]), op=hvd.Sum, name="hvdc_link", process_set=process_set
                ).numpy()
                times.append(time.perf_counter() - begin)
            # The slowest rank's, so that all go on alike.
            return float(
                hvd.allreduce(
                    tf.constant(min(times)), op=hvd.Max, name="hvdc_link_time", process_set=process_set
                )
            )

        few, *more = _LINK_BYTES
        latency = per_byte = fastest(few)
        for nbytes in more:
            per_byte = max(fastest(nbytes) - latency, 0.0) / uncompressed.bytes_sent(
                nbytes, process_set.size()
            )
            if per_byte * max(more) > _PATIENCE:
                break
        return latency, per_byte


def _double(value: Any) -> tf.Tensor:
    return tf.cast(value, tf.float64)


def recorder_of(plan: Plan) -> Recorder | None:
    """The recorder of a plan; None while nobody watches."""
    return next((observer for observer in plan.observers if isinstance(observer, Recorder)), None)


def watched_buckets(plan: Plan) -> list[WatchedBucket]:
    """The plan's buckets, in the order of a row."""
    layout, ranks = plan.layout, plan.settings.process_set.size()
    buckets = []
    for b, bucket in enumerate(layout.buckets):
        group = layout.param_groups[bucket.group]
        compressors = group.compressor.candidates if group.compressor.automatic else group.compressor.stages
        shapes = [plan.shapes_of(b, c) for c in compressors]
        sent = tuple(plan.collective(c, s).bytes_sent(c, s, ranks) for c, s in zip(compressors, shapes))
        # Without the padding of chunks.
        elements = group.layout.elements_in(bucket.chunks)
        nbytes = sum(count * layout.dtypes[i].size for i, count in elements.items())
        plain = uncompressed.bytes_sent(nbytes, ranks)
        buckets.append(WatchedBucket(str(b), nbytes, plain, tuple(c.spec for c in compressors), sent))
    for d, tensors in enumerate(layout.uncompressed):
        nbytes = sum(size * layout.dtypes[i].size for i, size in zip(tensors.members, tensors.sizes))
        plain = uncompressed.bytes_sent(nbytes, ranks)
        buckets.append(WatchedBucket(f"dense-{d}", nbytes, plain, ("none",), (plain,)))
    for s, table in enumerate(layout.embeddings):
        buckets.append(WatchedBucket(f"sparse-{s}", 0, 0, (table.compressor.spec,), (0,)))
    return buckets
