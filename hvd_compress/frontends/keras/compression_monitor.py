"""`hvdc.callbacks.CompressionMonitor`."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from ...common import checks
from ...monitor import events
from ...monitor.recorder import Recorder
from ...monitor.session import Session
from ...monitor.steps import Steps
from ...monitor.summary import bucket_means, means
from .callback import Callback


class CompressionMonitor(Callback):
    """Writes down what each step's exchange takes, sends and loses: for TensorBoard, as CSV, in the progress bar.

    Put it on all ranks: each writes what it has measured to files of its own in `log_dir`, without communicating,
    and rank 0 besides writes for TensorBoard. `hvd-compress doctor log_dir` says what is wrong with the run,
    `hvd-compress report log_dir` makes a page of it; see docs/monitor.md. Where only some ranks have it, only their
    numbers are there, and training is the same.

    Times are taken in the graph; the training loop does not wait for them. Training with it is the same, to the bit, as
    without. In `logs`, and so in the progress bar and the history, there are `ratio` (bytes that no compression would
    send, over those sent) and `comm_ms` (the exchange of a step).

    A directory holds one run: what is in its files is replaced.

    Raises:
        ValueError: an argument is not valid.
        TypeError: from `on_train_begin`: the model's optimizer is no hvdc.DistributedOptimizer.
        OSError: from `on_train_begin`: `log_dir` cannot be written to.
    """

    # Keras 3 then calls the batch hooks from threads of their own, and does not wait for a step's results.
    async_safe = True

    def __init__(self, log_dir: str | os.PathLike, update_freq: int | str = "epoch") -> None:
        """Create the callback.

        Args:
            log_dir: a directory for this run; made if it is not there.
            update_freq: when to write for TensorBoard, as of Keras's TensorBoard callback: "batch", "epoch", or after
                how many batches. Each time the means over the steps since the last time. The CSV files have
                every step in any case.

        Raises:
            TypeError: `log_dir` is no path.
            ValueError: `update_freq` is none of these.
        """
        super().__init__()
        whole = isinstance(update_freq, int) and not isinstance(update_freq, bool) and update_freq >= 1
        if update_freq not in ("epoch", "batch") and not whole:
            raise ValueError(
                f"update_freq must be 'batch', 'epoch' or a whole number from 1 on, got {update_freq!r}"
            )
        self.log_dir = checks.path("log_dir", log_dir)
        self.update_freq = 1 if update_freq == "batch" else update_freq
        self._session: Session | None = None
        self._writer: Any = None
        self._unwritten: list[Steps] = []
        self._epoch: list[Steps] = []
        self._batches = 0  # since TensorBoard was written
        self._last = -1
        self._begun = 0.0
        self._shown: dict[str, float] = {}  # of the steps that were read last
        self._compressors: dict[str, str] = {}

    def on_train_begin(self, logs: dict | None = None) -> None:
        """Have the steps record what they measure."""
        reducer = _reducer(self.model)
        anew = reducer.watch(lambda plan: Recorder(plan, lambda: _running_loss(self.model)))
        if anew and getattr(self.model, "train_function", None) is not None:
            self.model.make_train_function(force=True)  # traced before, without recording
        if self._session is None:
            self._session = Session(lambda: [reducer], self.log_dir, type(self).__name__)
        if self._writer is None and hvd.rank() == 0:
            self._writer = tf.summary.create_file_writer(os.path.join(self.log_dir, "tensorboard"))

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        """Count batches from 0 again."""
        self._last = -1
        assert self._session is not None
        self._session.new_epoch(epoch)

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        """Take the time of the first step."""
        if not self._begun:
            self._begun = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        """Read and write, if it is time to."""
        session = self._session
        assert session is not None
        first = session.first_step_seconds is None
        self._keep(session.stepped(time.perf_counter() - self._begun if first else None))
        if first:
            session.log_first_step()
            if not session.known and hvd.rank() == 0:
                print(
                    "hvd_compress: CompressionMonitor has nothing to show: a single rank exchanges nothing",
                    file=sys.stderr, flush=True,
                )  # fmt: skip
        self._batches += max(0, batch - self._last)  # more than 1 with steps_per_execution
        self._last = max(batch, self._last)
        if self.update_freq != "epoch" and self._batches >= int(self.update_freq):
            self._keep(session.read())
            self._write()
        if logs is not None:
            logs.update(self._shown)

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Read, write, and put the epoch's means into the logs."""
        assert self._session is not None
        self._keep(self._session.read())
        if self.update_freq == "epoch":
            self._write()
        if logs is not None and self._epoch:
            logs.update(_shown(self._epoch))
        self._epoch = []

    def on_train_end(self, logs: dict | None = None) -> None:
        """Write the rest."""
        assert self._session is not None
        self._keep(self._session.read())
        self._write()
        self._session.finish()
        if self._writer is not None:
            self._writer.close()
        self._session = self._writer = None
        self._begun, self._shown = 0.0, {}

    def _keep(self, steps: Steps | None) -> None:
        if steps is not None:
            self._shown = _shown([steps])
            self._epoch.append(steps)
            if self._writer is not None:
                self._unwritten.append(steps)

    def _write(self) -> None:
        """The means since the last time, for TensorBoard."""
        self._batches = 0
        if self._writer is None or not self._unwritten:
            return
        assert self._session is not None
        some, self._unwritten = self._unwritten, []
        values: dict[str, Any] = {
            f"hvd_compress/{name}": x for name, x in means(some).items() if not np.isnan(x)
        }
        for bucket, row in zip(self._session.buckets, bucket_means(some)):
            tag = f"hvd_compress/bucket_{bucket.name}"
            values |= {f"{tag}/{name}": x for name, x in row.items() if not np.isnan(x)}
        for b, bucket in enumerate(self._session.buckets):
            spec = bucket.compressors[some[-1].buckets.compressor[-1, b]]
            if self._compressors.get(bucket.name) != spec:
                self._compressors[bucket.name] = spec
                values[f"hvd_compress/bucket_{bucket.name}/compressor"] = spec
        events.write(self._writer, int(some[-1].step[-1]), values)
        self._writer.flush()


def _shown(some: list[Steps]) -> dict[str, float]:
    found = means(some)
    return {"ratio": found["ratio"], "comm_ms": found["exchange_ms"]}


def _reducer(model: Any) -> Any:
    optimizer: Any = getattr(model, "optimizer", None)
    while not hasattr(optimizer, "_hvdc") and hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    if not hasattr(optimizer, "_hvdc"):
        raise TypeError(
            f"CompressionMonitor watches hvdc.DistributedOptimizer, and the model was compiled with {optimizer!r}: "
            "wrap its optimizer"
        )
    return optimizer._hvdc.reducer


def _running_loss(model: Any) -> tuple[tf.Tensor, tf.Tensor] | None:
    """Sum and weight of Keras's running mean of the loss, read where the graph is traced; None if there is none.

    Keras adds a step's loss to it before it takes the gradients.
    """
    for metric in getattr(model, "metrics", ()):
        if metric.name == "loss" and hasattr(metric, "total") and hasattr(metric, "count"):
            return tf.convert_to_tensor(metric.total), tf.convert_to_tensor(metric.count)
    return None
