"""`hvdc.callbacks.CompressionMonitor`."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Sequence

import horovod.tensorflow as hvd

from ...common import checks
from ...common.error_text import error_text
from ...common.verbosity import say
from ...monitor.environment import running_loss
from ...monitor.exports import Exports, Log
from ...monitor.gradients import checked_every, make_recorder, stop_recording
from ...monitor.recorder import WatchedBucket
from ...monitor.session import Session
from ...monitor.steps import Steps
from ...monitor.summary import means, of_buckets
from .callbacks import CountingCallback
from .optimizer_state import innermost


class CompressionMonitor(CountingCallback):
    """Records what each step's exchange takes, sends and loses: for TensorBoard, as CSV, and in the progress bar.

    Put it on all ranks. Each rank writes its own measurements to files of its own in `log_dir`, without communicating;
    rank 0 also writes for TensorBoard. `hvd-compress doctor log_dir` names problems of the run, and
    `hvd-compress report log_dir` makes a page of it; see docs/monitor.md. If only some ranks have the callback, only
    their measurements are written.

    Times are taken in the graph, and the training loop does not wait for them. Training is the same, bit for bit, as
    without the callback. It adds two values to `logs`, and so to the progress bar and the history: `ratio`, the bytes
    of an exchange without compression divided by the bytes sent, and `comm_ms`, the milliseconds of a step's exchange.
    Steps in which `auto` tries another candidate do not count; rank 0 prints how many there were.

    A directory holds one run; existing files are replaced.

    Args:
        log_dir: The directory of this run. It is created if it does not exist.
        update_freq: When to write for TensorBoard, as in Keras's TensorBoard callback: "batch", "epoch", or a number of
            batches. It writes the means over the steps since the last time. The CSV files contain every step in any
            case.
        gradients: For `hvdc.compare`, rank 0 writes its gradients of every so many steps, before they are compressed,
            to `gradients.npz` in `log_dir`: of 8 steps at most, and of fewer if the file would be larger than 256 MiB,
            but of at least one. IndexedSlices are left out. None records no gradients, and costs nothing.
        log: A function that rank 0 calls, whenever means are written for TensorBoard, with the step and a dictionary of
            the same numbers: `hvd_compress/ratio`, `hvd_compress/bucket_0/wire_ms`. If it has a method `close`, that is
            called at the end of training. If it raises, rank 0 says so, and does not call it again. Ready ones are
            `hvdc.loggers.MLflow()`, `hvdc.loggers.WandB()` and `hvdc.loggers.Prometheus(path)`.

    Raises:
        TypeError: `log_dir` is not a path, or `log` no function. In `on_train_begin`: the model's optimizer is not a
            `hvdc.DistributedOptimizer`.
        ValueError: `update_freq` or `gradients` is not valid.
        OSError: In `on_train_begin`: `log_dir` cannot be written to.
    """

    # Keras 3 then calls the batch hooks from other threads, and does not wait for a step's results.
    async_safe = True

    def __init__(
        self,
        log_dir: str | os.PathLike,
        update_freq: int | str = "epoch",
        gradients: int | None = None,
        log: Log | None = None,
    ) -> None:
        super().__init__()
        whole = isinstance(update_freq, int) and not isinstance(update_freq, bool) and update_freq >= 1
        if update_freq not in ("epoch", "batch") and not whole:
            raise ValueError(f"update_freq must be 'batch', 'epoch' or a whole number from 1 on, got {update_freq!r}")
        self.log_dir = checks.path("log_dir", log_dir)
        self.update_freq = 1 if update_freq == "batch" else update_freq
        self.gradients = checked_every("gradients", gradients)
        if log is not None and not callable(log):
            raise TypeError(f"log must be a function of the step and a dictionary of numbers, got {error_text(log)}")
        self.log = log
        self._session: Session | None = None
        self._exports: Exports | None = None
        self._epoch: list[Steps] = []  # of this epoch
        self._start = 0.0  # time of the first step's start
        self._logs: dict[str, float] = {}  # of the steps that were read last

    def on_train_begin(self, logs: dict | None = None) -> None:
        """Makes the training step record measurements."""
        reducer = self._reducer
        if reducer is None:
            raise TypeError(
                "CompressionMonitor watches hvdc.DistributedOptimizer, and the model was compiled with "
                f"{innermost(getattr(self.model, 'optimizer', None))!r}: wrap its optimizer"
            )
        model = weakref.ref(self.model)  # plans outlive reducers until the end's summary, and would keep it
        make = make_recorder(self.log_dir, self.gradients, lambda: running_loss(model()))
        must_retrace = reducer.watch(make, anew=self.gradients is not None)
        if must_retrace and getattr(self.model, "train_function", None) is not None:
            self.model.make_train_function(force=True)
        if self._session is None:
            self._session = Session(lambda: [reducer], self.log_dir, type(self).__name__)
        if self._exports is None:
            tensorboard, group = os.path.join(self.log_dir, "tensorboard"), reducer.settings.process_set
            is_first = group.included() and group.rank() == 0
            self._exports = Exports(tensorboard, type(self).__name__, is_first, self.log)

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        """Counts the epoch's batches from 0."""
        super().on_epoch_begin(epoch)
        assert self._session is not None
        self._session.new_epoch(epoch)

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        """Takes the time of the first step."""
        if not self._start:
            self._start = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        """Reads and writes, if it is time to."""
        session = self._session
        assert session is not None
        first = session.first_step_seconds is None
        self._keep(session.stepped(time.perf_counter() - self._start if first else None))
        if first:
            session.log_first_step()
            if not session.has_steps and hvd.rank() == 0 and self._rounds is None:
                say("CompressionMonitor has nothing to show: a single rank exchanges nothing", "warning")
        batches = self._count(batch)
        if self.update_freq != "epoch" and batches >= int(self.update_freq):
            self._write()
        if logs is not None:
            logs.update(self._logs)

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Reads and writes, and puts the epoch's means into the logs."""
        assert self._session is not None
        if self.update_freq == "epoch":
            self._write()
        else:
            self._keep(self._session.read())
        if self._epoch:
            buckets = self._session.buckets
            _log_trials(epoch, of_buckets(self._epoch, len(buckets)), buckets, self._session.auto_buckets)
        if logs is not None and self._epoch:
            logs.update(_logs_of(self._epoch))
        self._epoch = []

    def on_train_end(self, logs: dict | None = None) -> None:
        """Writes the remaining measurements."""
        assert self._session is not None
        self._write()
        self._session.finish()
        if self.gradients is not None and self._reducer is not None:
            stop_recording(list(self._reducer.plans.values()))
        assert self._exports is not None
        self._exports.close()
        self._session = self._exports = None
        self._start, self._logs = 0.0, {}

    def _keep(self, steps: Steps | None) -> None:
        if steps is not None:
            self._logs = _logs_of([steps])
            self._epoch.append(steps)
            assert self._exports is not None
            self._exports.add(steps)

    def _write(self) -> None:
        """Passes the means over the steps since the last call to TensorBoard and to `log`."""
        assert self._session is not None
        self._keep(self._session.read())
        self._batches = 0
        assert self._exports is not None
        self._exports.write(self._session)


def _log_trials(epoch: int, steps: list[Steps], buckets: list[WatchedBucket], of_auto: Sequence[int]) -> None:
    """Rank 0 prints which candidates `auto` tried in an epoch."""
    count = sum(int(part.trial.sum()) for part in steps)
    if not count or hvd.rank() != 0:
        return
    tried = {
        buckets[b].compressors[row[b]]: None
        for part in steps
        for row in part.buckets.compressor[part.trial]
        for b in of_auto
    }
    say(
        f"epoch {epoch + 1}: auto tried {', '.join(tried)} in {count} of {sum(map(len, steps))} steps, "
        "without choosing them; ratio and comm_ms are those of the other steps"
    )


def _logs_of(steps: list[Steps]) -> dict[str, float]:
    by_name = means(steps)
    return {"ratio": by_name["ratio"], "comm_ms": by_name["exchange_ms"]}
