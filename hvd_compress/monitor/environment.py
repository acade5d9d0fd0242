"""`HVD_COMPRESS_MONITOR=runs/1`: watches a training whose script knows nothing of it.

It records what `hvdc.callbacks.CompressionMonitor` records. The first plan starts a thread, which reads what the steps
record and writes it to the files. If the script has a monitor or a profile of its own, the steps are recorded by that
one's recorder, and both read it. Whatever fails here, training goes on.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from ..common.error_text import error_text
from ..common.verbosity import say
from ..engine.observer import Observer
from ..engine.plan import Plan
from ..engine.reducer import alive, watch_all
from . import end_summary
from .exports import Exports
from .recorder import Loss, Recorder
from .session import Session
from .steps import Steps

VARIABLE = "HVD_COMPRESS_MONITOR"
# Seconds between two looks, and between two writes for TensorBoard.
_LOOK_EVERY, _WRITE_EVERY = 0.2, 10.0


class _Watch:
    """Watches this process, from the first plan to the end."""

    def __init__(self, directory: str) -> None:
        self.loss: Loss | None = None  # of the Keras model that trains
        self._directory = directory
        self._session: Session | None = None
        self._exports: Exports | None = None
        self._start = time.time()
        self._epoch: int | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name=VARIABLE, daemon=True)
        self._has_failed = False

    def recorder(self, plan: Plan) -> Observer:
        """The recorder of a plan's steps."""
        return Recorder(plan, self.loss)

    def begin(self, plan: Plan) -> None:
        """A plan is made; the first one begins the watch."""
        if self._session is not None:
            return
        group = plan.settings.process_set
        is_first = group.rank() == 0
        if group is not hvd.global_process_set:  # another set may write, too
            self._directory = os.path.join(self._directory, f"process-set-{min(group.ranks)}")
        try:
            self._session = Session(alive, self._directory, VARIABLE)
            self._exports = Exports(os.path.join(self._directory, "tensorboard"), VARIABLE, is_first)
        except (OSError, tf.errors.OpError) as error:  # on some ranks perhaps: the others must not wait for this one
            if hvd.local_rank() == 0:
                why = error.strerror if isinstance(error, OSError) else error_text(error)
                say(f"{VARIABLE}: {self._directory} cannot be written to ({why}); training goes on", "warning")
            self._session, self._exports = Session(alive, None, VARIABLE), Exports(None, VARIABLE, is_first)
        self._session.epoch = self._epoch
        end_summary.before.append(self.finish)
        self._thread.start()

    def train_begins(self, loss: Loss) -> None:
        """A Keras model begins to train."""
        self.loss = loss
        if self._session is None:
            self._start = time.time()

    def new_epoch(self, epoch: int) -> None:
        """Steps from now on are of this epoch."""
        self._epoch = epoch
        if self._session is not None and not self._has_failed:
            with self._failing():
                self._session.new_epoch(epoch)

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """An error in it, such as a full disk, ends the watch with one line."""
        try:
            yield
        except Exception as error:
            self._has_failed = True
            self._end.set()
            say(f"{VARIABLE}: nothing more is recorded ({error_text(error)}); training goes on", "warning")

    def _run(self) -> None:
        last = time.monotonic()
        with self._failing():
            while not self._end.wait(_LOOK_EVERY):
                assert self._session is not None
                self._keep(self._session.stepped(least=2))  # at any time, also within a step
                if time.monotonic() - last > _WRITE_EVERY:
                    last = time.monotonic()
                    self._write()

    def _keep(self, steps: Steps | None) -> None:
        session, exports = self._session, self._exports
        assert session is not None and exports is not None
        if steps is not None:
            exports.add(steps)
            if session.first_step_seconds is None:
                session.first_step_seconds = float(steps.done[0]) - self._start
                session.log_first_step()

    def _write(self) -> None:
        if self._exports is not None and self._session is not None:
            self._exports.write(self._session)

    def finish(self) -> None:
        """Writes the rest, at the end of the process."""
        self._end.set()
        self._thread.join()
        assert self._session is not None and self._exports is not None
        if self._has_failed:
            return
        with self._failing():
            self._keep(self._session.read())
            self._session.finish()
            self._write()
            self._exports.close()


_watch: _Watch | None = None


def install() -> None:
    """Watches all plans that are made from now on, if the environment variable is set."""
    global _watch
    directory = "" if _watch is not None else os.environ.get(VARIABLE, "").strip()
    if directory:
        _watch = _Watch(directory)
        watch_all.append(_watch.recorder)


def begin(plan: Plan) -> None:
    """Tells that a plan is made."""
    if _watch is not None:
        _watch.begin(plan)


def train_begins(model: Any) -> None:
    """Tells which Keras model trains."""
    install()
    if _watch is not None:
        known = weakref.ref(model)  # a plan outlives its model until the end's summary
        _watch.train_begins(lambda: running_loss(known()))


def epoch_begins(epoch: int) -> None:
    """Tells which epoch the next steps are of."""
    if _watch is not None:
        _watch.new_epoch(epoch)


def running_loss(model: Any) -> tuple[tf.Tensor, tf.Tensor] | None:
    """Sum and weight of Keras's running mean of the loss, as tensors of the graph; None if the model has none.

    Keras adds a step's loss to them before it computes the gradients.
    """
    for metric in getattr(model, "metrics", ()):
        if metric.name == "loss" and hasattr(metric, "total") and hasattr(metric, "count"):
            return tf.convert_to_tensor(metric.total), tf.convert_to_tensor(metric.count)
    return None
