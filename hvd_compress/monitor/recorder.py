"""What is measured of a step while somebody watches, kept in the graph until the host asks for it.

A row per step in a ring of rows on the host: the training loop never waits for it. Only this rank's numbers; no
collective is added, and none gets another name or place, so that some ranks may be watched and others not.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from ..common import tracing
from ..compressors import Compressor
from ..exchange import uncompressed
from ..exchange.local_input import LocalInput

if TYPE_CHECKING:
    from ..engine.clock import Stamps
    from ..engine.plan import Plan

# Steps that are kept until they are read.
ROWS = 512
# Norms are taken in each of the first so many steps, and in every so-manieth from then on: they read gradients
# and residuals once more, which takes some tens of milliseconds for 25M elements on one core.
NORMS_EVERY = 20
# On which the link is measured; the largest is left out where it would take longer than so many seconds.
_LINK_BYTES = (64, 2**18, 2**22)
_REPEATS, _PATIENCE = 4, 0.3
HEADER = ("step", "committed", "ready", "loss_total", "loss_count")
STAMPS = ("begun", "sent", "arrived", "done")
NORMS = ("gradient_norm", "norm", "lost_norm", "residual_norm")
# Bytes of IndexedSlices, which differ from step to step, as in `WatchedBucket`; NaN for other buckets.
BYTES = ("sent_bytes", "plain_bytes")
COLUMNS = (*STAMPS, *NORMS, "choice", *BYTES)

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


class Recorder:
    """Records the steps of one plan.

    Attributes:
        buckets: Those of the plan, then the uncompressed ones, then IndexedSlices.
    """

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

    def due(self) -> tf.Tensor:
        """Whether norms are to be taken in this step; a bool scalar."""
        with tf.device("CPU"):
            count = self._count.read_value()
            return (count < NORMS_EVERY) | (count % NORMS_EVERY == 0)

    def record(
        self,
        step: tf.Tensor,
        committed: tf.Tensor,
        ready: tf.Tensor,
        stamps: Sequence[Stamps],
        norms: Sequence[tf.Tensor],
        choices: Sequence[tf.Tensor],
        sparse: tf.Tensor,
    ) -> None:
        """Keeps one step; everything in the order of `buckets`.

        Args:
            step: int64 scalar, how many steps were made before it.
            committed: Whether all gradients were finite.
            ready: When the last gradient was there, float64.
            stamps: Of each bucket.
            norms: float32 [4] each, see `norms_of`.
            choices: Which of the bucket's compressors was used, scalars.
            sparse: `BYTES` of the last buckets, those of IndexedSlices, float64 [number of them, 2].
        """
        with tf.device("CPU"):
            nan = tf.constant(math.nan, tf.float64)
            loss = (self._loss() if self._loss is not None else None) or (nan, nan)
            # Few operations, each on all buckets: in another order than that of a row, see `_order`.
            unknown = tf.fill([len(self.buckets) - sparse.shape[0], len(BYTES)], nan)
            row = [
                tf.stack(
                    [*(_double(x) for x in (step, committed, ready, *loss)), *(t for s in stamps for t in s)]
                ),
                _double(tf.concat(list(norms), 0)),
                _double(tf.stack(list(choices))),
                tf.reshape(tf.concat([unknown, sparse], 0), [-1]),
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
    for width in (len(STAMPS), len(NORMS), 1, len(BYTES)):
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


def not_measured() -> tf.Tensor:
    """In place of norms."""
    return tf.fill([len(NORMS)], tf.constant(math.nan))


def nothing_lost(due: tf.Tensor) -> tf.Tensor:
    """The norms of a bucket that crosses as it is: those of its gradients are not taken."""
    with tf.device("CPU"):
        return tf.where(due, tf.constant([math.nan, math.nan, 0.0, 0.0]), not_measured())


def norms_of(
    due: tf.Tensor,
    compressor: Compressor,
    fresh: Sequence[tf.Tensor],
    share: LocalInput,
    left: Sequence[tf.Tensor] | None,
) -> tf.Tensor:
    """Norms (2-norms over all chunks) of a bucket, float32 [4] as in `NORMS`; NaN where they are not `due`.

    The gradient (the velocity, with momentum correction), gradient + decay * residual, what compression loses of that
    sum, and the new residual. Of what is lost, that is all where a residual is kept; else it is encoded once more.

    Args:
        due: Whether they are to be taken, a bool scalar.
        compressor: Of the bucket.
        fresh: The gradients, in chunks.
        share: What was encoded.
        left: The new residuals, or None where none are kept.
    """

    def lost() -> tf.Tensor:
        if compressor.uncompressed:
            return tf.constant(0.0)
        if not compressor.pure:  # may keep something from call to call
            return tf.constant(math.nan)
        again = share._replace(keep=True)
        return norm_of([again.encode(compressor, i).residual for i in range(len(share.chunks))])

    def take() -> tf.Tensor:
        summed = [share.sum(i) for i in range(len(share.chunks))]
        residual = tf.constant(0.0) if left is None else norm_of(left)
        return tf.stack([norm_of(fresh), norm_of(summed), lost() if left is None else residual, residual])

    return tf.cond(due, take, not_measured)


def norm_of(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """The 2-norm over all of these tensors; 0 where there are none."""
    return tf.sqrt(
        2.0 * tf.add_n([tf.constant(0.0), *(tf.nn.l2_loss(tf.cast(t, tf.float32)) for t in tensors)])
    )


def _double(value: Any) -> tf.Tensor:
    return tf.cast(value, tf.float64)


def watched_buckets(plan: Plan) -> list[WatchedBucket]:
    """The plan's buckets, in the order of a row."""
    ranks = plan.settings.process_set.size()
    found = []
    for b, (param_group, chunks) in enumerate(plan.buckets):
        auto = param_group.compressor
        compressors = auto.candidates if auto.automatic else auto.stages
        shapes = [plan.shapes_of(b, c) for c in compressors]
        sent = tuple(plan.pattern(c, s).bytes_sent(c, s, ranks) for c, s in zip(compressors, shapes))
        # Without what chunks are filled up with.
        nbytes = sum(
            elements * plan.dtypes[i].size for i, elements in param_group.layout.elements_in(chunks).items()
        )
        plain = uncompressed.bytes_sent(nbytes, ranks)
        found.append(WatchedBucket(str(b), nbytes, plain, tuple(c.spec for c in compressors), sent))
    for d, bucket in enumerate(plan.dense):
        nbytes = sum(size * plan.dtypes[i].size for i, size in zip(bucket.members, bucket.sizes))
        plain = uncompressed.bytes_sent(nbytes, ranks)
        found.append(WatchedBucket(f"dense-{d}", nbytes, plain, ("none",), (plain,)))
    for s, param_group in enumerate(plan.embeddings):
        found.append(WatchedBucket(f"sparse-{s}", 0, 0, (param_group.compressor.spec,), (0,)))
    return found
