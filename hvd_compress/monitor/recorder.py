"""Records what each step measures, inside the graph, until the host reads it.

Each step writes a row into a ring buffer on the host, and the training loop never waits for it. The rows hold the
numbers of this rank only. Recording adds no collective, and changes no collective's name or order: so some ranks may
record while others do not.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from ..engine.clock import Timestamps
from ..engine.guard import GuardedSelector
from ..engine.norms import NORMS
from ..engine.observer import Observer, StepMeasurement
from ..engine.plan import Plan
from ..engine.ring_buffer import RingBuffer
from ..exchange import uncompressed

# The length of the ring buffer: so many steps are kept until they are read.
ROWS = 512
# Norms are taken in each of the first 20 steps, and then in every 20th step: they read gradients and residuals once
# more, which takes some tens of milliseconds for 25M elements on one core.
NORMS_EVERY = 20
# The sizes of the allreduces that measure the link. The largest is left out if it would take more than _MAX_SECONDS.
_LINK_BYTES = (64, 2**18, 2**22)
_REPEATS, _MAX_SECONDS = 4, 0.3
HEADER = ("step", "committed", "ready", "loss_total", "loss_count")
TIMES = Timestamps._fields
# Bytes of IndexedSlices, sent by this rank and by stock Horovod: they differ from step to step. NaN for other buckets.
BYTES = ("sent_bytes", "plain_bytes")
COLUMNS = (*TIMES, *NORMS, "choice", *BYTES)

# Returns the running sum and the total weight of Keras's loss metric, as tensors.
Loss = Callable[[], "tuple[tf.Tensor, tf.Tensor] | None"]


class WatchedBucket(NamedTuple):
    """What is known of a bucket before the first step. Bytes of IndexedSlices are 0, as they differ in each step."""

    name: str  # "0", "1", ... in the order of sending; "dense-0", ...: uncompressed gradients; "sparse-0", ...: slices
    nbytes: int  # bytes of its gradients
    plain: int  # bytes that a rank sends without compression
    compressors: tuple[str, ...]  # spec strings of the compressors that it may use
    sent: tuple[int, ...]  # bytes that a rank sends with each of these


class Recorder(Observer):
    """Records the steps of one plan."""

    records_steps = True

    def __init__(self, plan: Plan, loss: Loss | None = None) -> None:
        self.buckets = watched_buckets(plan)  # compressed ones, then uncompressed gradients, then IndexedSlices
        # Horovod may have been shut down when somebody asks.
        group = plan.settings.process_set
        self.ranks, self.members, self.is_first = group.size(), list(group.ranks), group.rank() == 0
        self._loss = loss
        self._column_order = _column_order(len(self.buckets))
        self._rows = RingBuffer(ROWS, len(self._column_order), f"{plan.name}_watched")

    # In the graph

    def wants_times(self, bucket: int) -> bool:
        """Always True: all buckets are timed."""
        return True

    def sample_norms(self) -> tf.Tensor:
        """Whether norms are taken in this step; a bool scalar."""
        with tf.device("CPU"):
            count = self._rows.written()
            return (count < NORMS_EVERY) | (count % NORMS_EVERY == 0)

    def observe(self, measurement: StepMeasurement) -> None:
        """Writes one step into the ring buffer."""
        rows = [bucket for bucket in measurement.buckets if bucket is not None] + measurement.others
        with tf.device("CPU"):
            nan = tf.constant(math.nan, tf.float64)
            loss = (self._loss() if self._loss is not None else None) or (nan, nan)
            head = (measurement.step, measurement.committed, measurement.ready, *loss)
            times = (time for bucket in rows for time in bucket.timestamps)
            # Few operations, each on all buckets: so the columns have another order than a row, see `_column_order`.
            embedding_bytes = measurement.embedding_bytes
            unknown = tf.fill([len(rows) - embedding_bytes.shape[0], len(BYTES)], nan)
            row = [
                tf.stack([*map(_double, head), *times]),
                _double(tf.concat([bucket.norms for bucket in rows], 0)),
                _double(tf.stack([bucket.choice for bucket in rows])),
                tf.reshape(tf.concat([unknown, embedding_bytes], 0), [-1]),
            ]
            self._rows.write(tf.concat(row, 0))

    # On the host

    def pending(self, reader: Hashable = None) -> int:
        """The number of steps since the last `read` of this reader."""
        return self._rows.pending(reader)

    def skip(self, reader: Hashable = None) -> None:
        """Steps taken so far are not read."""
        self._rows.skip(reader)

    def read(self, reader: Hashable = None) -> np.ndarray:
        """The steps since the reader's last call, at most 512: float64 [steps, HEADER + COLUMNS of each bucket].

        Several readers may each read all steps.
        """
        return self._rows.read(reader)[:, self._column_order]


def _column_order(buckets: int) -> np.ndarray:
    """The recorded column of each column of a row: recorded are the header, all timestamps, norms, choices, bytes."""
    cells, begin = [], len(HEADER)
    for width in (len(TIMES), len(NORMS), 1, len(BYTES)):
        cells.append(begin + np.arange(buckets * width).reshape(buckets, width))
        begin += buckets * width
    return np.concatenate([np.arange(len(HEADER)), np.concatenate(cells, 1).ravel()])


def measure_link(process_set: Any) -> tuple[float, float] | None:
    """The seconds of an allreduce, and the seconds of each byte that a rank sends in it; None in TensorFlow 1's graphs.

    All ranks of the process set call it together and get the same result. It is called once for each plan that any rank
    records, and takes a tenth of a second at 1 Gbit/s. Later steps cannot show these numbers, as they send compressed
    bytes.
    """
    if not tf.executing_eagerly():
        return None

    def fastest(nbytes: int) -> float:
        times = []
        for _ in range(_REPEATS):
            begin = time.perf_counter()
            hvd.allreduce(tf.zeros([nbytes // 4]), op=hvd.Sum, name="hvdc_link", process_set=process_set).numpy()
            times.append(time.perf_counter() - begin)
        # The time of the slowest rank: all ranks must make the same calls.
        return float(hvd.allreduce(tf.constant(min(times)), op=hvd.Max, name="hvdc_link_time", process_set=process_set))

    with tf.device("CPU"):
        smallest, *larger = _LINK_BYTES
        latency = per_byte = fastest(smallest)
        for nbytes in larger:
            per_byte = max(fastest(nbytes) - latency, 0.0) / uncompressed.bytes_sent(nbytes, process_set.size())
            if per_byte * max(larger) > _MAX_SECONDS:
                break
        return latency, per_byte


def _double(value: Any) -> tf.Tensor:
    return tf.cast(value, tf.float64)


def recorder_of(plan: Plan) -> Recorder | None:
    """The recorder of a plan; None if it has none."""
    return next((observer for observer in plan.observers if isinstance(observer, Recorder)), None)


def watched_buckets(plan: Plan) -> list[WatchedBucket]:
    """The plan's buckets, in the order of a row's columns."""
    layout = plan.layout
    buckets = []
    for b, bucket in enumerate(layout.buckets):
        group = layout.param_groups[bucket.group]
        compressors = group.compressor.candidates if group.compressor.automatic else group.compressor.stages
        if b < len(plan.selectors) and isinstance(selector := plan.selectors[b], GuardedSelector):
            compressors = (*compressors, *selector.milder)
        # The padding of chunks does not count.
        elements = group.layout.elements_in(bucket.chunks)
        nbytes = sum(count * layout.dtypes[i].size for i, count in elements.items())
        plain = plan.bytes_in_ring(nbytes)
        # Where `auto` compresses nothing, it sends no padding.
        bare = plan.bytes_in_ring(sum(n * uncompressed.size_sent(layout.dtypes[i]) for i, n in elements.items()))
        sent = (
            bare if group.compressor.automatic and c.uncompressed else plan.bytes_of_bucket(b, c) for c in compressors
        )
        buckets.append(WatchedBucket(str(b), nbytes, plain, tuple(c.spec for c in compressors), tuple(sent)))
    for d, tensors in enumerate(layout.uncompressed):
        sizes = [(layout.dtypes[i], size) for i, size in zip(tensors.members, tensors.sizes)]
        nbytes = sum(size * dtype.size for dtype, size in sizes)
        sent_bytes = plan.bytes_in_ring(sum(size * uncompressed.size_sent(dtype) for dtype, size in sizes))
        buckets.append(WatchedBucket(f"dense-{d}", nbytes, plan.bytes_in_ring(nbytes), ("none",), (sent_bytes,)))
    for s, table in enumerate(layout.embeddings):
        may_change = table.automatic or plan.guard is not None
        compressors = (table, table.uncompressed) if may_change else (table,)
        specs = tuple(t.compressor.spec for t in compressors)
        buckets.append(WatchedBucket(f"sparse-{s}", 0, 0, specs, (0,) * len(specs)))
    return buckets
