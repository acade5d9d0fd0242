"""One monitored run of this process: reads recorded steps and writes them to files. It does not communicate."""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import math
import os
import platform
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import horovod
import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from ..common.verbosity import say
from ..engine.compression_report import AutoReport
from ..engine.plan import Plan
from ..engine.reducer import Reducer
from ..engine.round_log import COLUMNS as ROUND_COLUMNS
from ..engine.round_log import RoundLog
from ..engine.settings import Settings
from ..version import __version__
from . import totals
from .files import RunFiles
from .recorder import HEADER, ROWS, Recorder, WatchedBucket, recorder_of
from .steps import Reader, Steps
from .totals import Totals

# Seconds between two reads, unless the numbers are needed at once, and between two checks of how many steps there are.
# Rows are read when half of them are used: that is enough for 1280 steps a second.
_READ_EVERY = 1.0
_CHECK_EVERY = 0.2
# Seconds between two looks at what `auto` predicts, which take some milliseconds each; also at the end of an epoch.
_AUTO_EVERY = 5.0
_numbers = itertools.count()  # of sessions


class Session:
    """Reads the recorded steps of one plan: of the reducers' plans that take steps, the one with the most gradients.

    If that plan is gone (after an elastic reset, for example), it goes on with another one.

    Args:
        reducers: Returns the reducers.
        directory: The directory of the files, or None to write none.
        what: The name of the user's tool: "profile", for example.
    """

    def __init__(self, reducers: Callable[[], Iterable[Reducer]], directory: str | None, what: str) -> None:
        self.first_step_seconds: float | None = None  # including tracing and compiling; None before it
        # Of steps that have not been read yet, if the graph does not record them: numbers, tensors or None.
        self.losses: list[Any] = []
        self.epoch: int | None = None  # of the steps; None if there are no epochs
        self.auto: AutoReport | None = None  # what `auto` chooses from, as last seen; None without `auto`
        self.last_exchange: dict[str, float] = {}  # of local steps, see `round_log.COLUMNS`; empty without
        self.totals = Totals()
        self._auto_at = -math.inf
        self._name = f"session {next(_numbers)}"
        self._changes = 0  # of the guard, that are written
        self._reducers = reducers
        self._is_first = hvd.rank() == 0  # of the plan's process set, as soon as there is one
        self._files = None if directory is None else RunFiles(directory, hvd.rank())
        self._what = what
        self._plan: Plan | None = None
        self._first: int | None = 0  # is added to the plan's numbers of steps; None: so that they go on
        self._last = 0  # the number of the last step
        self._after = 0  # steps with a number up to this have been read
        self._recorder: Recorder | None = None
        self._reader: Reader | None = None
        self._lock = threading.RLock()  # Keras may call a callback's batch hooks from several threads
        self._read_at = self._check_at = time.monotonic()
        self._started = _now()
        for _, recorder in self._recorded_plans():
            recorder.skip(self._name)  # steps of an earlier session
        for log in self._round_logs():
            log.skip(self._name)

    @property
    def buckets(self) -> list[WatchedBucket]:
        """The buckets of the plan; empty before the first step."""
        return [] if self._recorder is None else self._recorder.buckets

    @property
    def auto_buckets(self) -> Sequence[int]:
        """The positions in `buckets` of those that `auto` decides on."""
        return () if self._plan is None or self._plan.auto is None else self._plan.layout.auto_buckets

    @property
    def has_steps(self) -> bool:
        """Whether a step was recorded."""
        return self._plan is not None

    def stepped(self, seconds: float | None = None, least: int = 1) -> Steps | None:
        """Call it after each step, after the first one with its seconds. It reads if it is time to, see `read`."""
        now = time.monotonic()
        first = self.first_step_seconds is None and seconds is not None
        if now < self._check_at and not first:  # the case of nearly all steps: it must take no time
            return None
        with self._lock:
            self._check_at = now + _CHECK_EVERY
            if first:
                self.first_step_seconds = seconds
            full = self._recorder is not None and self._recorder.pending(self._name) >= ROWS // 2
            return self.read(least) if first or full or now - self._read_at > _READ_EVERY else None

    def read(self, least: int = 1) -> Steps | None:
        """Reads the steps recorded since the last call, and writes them to the files; None if there are none.

        The first call that finds `least` steps of some plan selects the plan. Between two steps, 1 is enough. In the
        middle of a step, perhaps not all plans have taken theirs: with 2, each has taken one.
        """
        with self._lock:
            self._read_at = time.monotonic()
            if (self._plan is None or self._is_outdated()) and not self._start(least) and self._plan is None:
                return None
            assert self._plan is not None and self._recorder is not None and self._reader is not None
            rows = self._recorder.read(self._name)
            self._recorder = recorder_of(self._plan) or self._recorder  # another monitor may have replaced it
            self._look_at_rounds()
            rows = self._new_of(rows)
            if not len(rows):
                return None
            steps = self._with_losses(self._numbered(self._reader.steps(rows)))
            self.totals.add(steps)
            if self._files is not None:
                self._files.write(steps, self.buckets, self.epoch, _memory_mb())
            if self._read_at - self._auto_at > _AUTO_EVERY:
                self._look_at_auto()
            self._look_at_guard()
            return steps

    def _look_at_guard(self) -> None:
        guard = None if self._plan is None else self._plan.guard
        if guard is not None and len(guard.events) > self._changes and self._files is not None and self._is_first:
            self._changes = len(guard.events)
            self._files.write_guard(guard.events)

    def _look_at_rounds(self) -> None:
        for log in self._round_logs():
            exchanges = log.read(self._name)
            if len(exchanges):
                self.last_exchange = dict(zip(ROUND_COLUMNS, exchanges[-1].tolist()))
            if self._files is not None:
                self._files.write_rounds(exchanges)

    def _round_logs(self) -> list[RoundLog]:
        """That of the watched plan's reducer; before a plan is selected, those of all reducers."""
        return [
            reducer.round_log
            for reducer in self._reducers()
            if reducer.round_log is not None and (self._plan is None or self._plan in reducer.plans.values())
        ]

    def _look_at_auto(self) -> None:
        if self._plan is None or self._plan.auto is None:
            return
        self._auto_at = time.monotonic()
        step = int(self._plan.state.step)
        self.auto = self._plan.auto.report(step)[0].auto
        if self.auto is not None and self._first:
            self.auto = dataclasses.replace(self.auto, steps=step + self._first)
        if self._files is not None and self._is_first and self.auto is not None:
            self._files.write_auto(self.auto)

    def _new_of(self, rows: np.ndarray) -> np.ndarray:
        """The rows without those of steps that are made again after a reset."""
        new = rows[rows[:, HEADER.index("step")] + 1 + (self._first or 0) > self._after]
        del self.losses[: len(rows) - len(new)]
        return new

    def _numbered(self, steps: Steps) -> Steps:
        """The steps, with numbers that go on after those of an earlier plan."""
        if self._first is None:
            self._first = max(0, self._last + 1 - int(steps.step[0]))
        steps = dataclasses.replace(steps, step=steps.step + self._first)
        self._last = int(steps.step[-1])
        return steps

    def _with_losses(self, steps: Steps) -> Steps:
        if not self.losses:
            return steps
        count = min(len(steps), len(self.losses))
        loss = steps.loss.copy()
        for i, value in enumerate(self.losses[:count]):
            mean = np.nan if value is None else float(np.mean(np.asarray(value)))
            loss[i] = np.inf if value is not None and np.isnan(mean) else mean
        del self.losses[:count]
        return dataclasses.replace(steps, loss=loss)

    def new_epoch(self, epoch: int) -> None:
        """Steps that are recorded from now on belong to this epoch."""
        with self._lock:
            self.read()
            self._look_at_auto()
            self.epoch = epoch
            if self._reader is not None:
                self._reader.new_epoch()

    def _start(self, least: int) -> bool:
        """Selects the plan; returns whether there is one."""
        watched = [(plan, recorder) for plan, recorder in self._recorded_plans() if recorder.pending(self._name)]
        if not any(recorder.pending(self._name) >= least for _, recorder in watched):
            return False
        before = self._plan
        self._plan, self._recorder = max(watched, key=lambda pair: sum(b.nbytes for b in pair[1].buckets))
        self._reader = Reader(self.buckets, self.auto_buckets)
        # After a reset, the numbers are those of the training, the same on all ranks.
        is_reset = before is not None and before.name == self._plan.name
        self._first, self._after = (self._first, self._last) if before is None or is_reset else (None, 0)
        if before is not None and before.guard is not self._plan.guard:
            self._changes = 0
        self._is_first = self._recorder.is_first
        self._describe()
        return True

    def _is_outdated(self) -> bool:
        """Whether the plan is gone, and all of its steps are read."""
        assert self._recorder is not None
        is_gone = all(plan is not self._plan for plan, _ in self._recorded_plans())
        return is_gone and not self._recorder.pending(self._name)

    def _recorded_plans(self) -> list[tuple[Plan, Recorder]]:
        plans = [plan for reducer in self._reducers() for plan in reducer.plans.values()]
        return [(plan, recorder) for plan in plans if (recorder := recorder_of(plan)) is not None]

    def _describe(self, **more: Any) -> None:
        if self._files is None or not self._is_first or self._plan is None or self._recorder is None:
            return
        settings, shapes, link = self._plan.settings, self._plan.layout.shapes, self._plan.link
        hosts = self._plan.all_hosts
        workers = 1 if hosts is None else hosts.workers  # by which the bytes are divided, see `Plan.bytes_sent`
        run = {
            "what": self._what,
            "started": self._started,
            "ranks": self._recorder.ranks,
            "process_set": self._recorder.members,
            "host": socket.gethostname(),
            "model": {
                "parameters": sum(map(math.prod, shapes)),
                "gradient_bytes": sum(bucket.nbytes for bucket in self.buckets),
                "variables": len(shapes),
            },
            "settings": _settings(settings),
            "link": None if link is None else {"latency_ms": 1e3 * link[0], "ns_per_byte": 1e9 * link[1] * workers},
            "buckets": [bucket._asdict() for bucket in self.buckets],
            "versions": {
                "hvd_compress": __version__,
                "tensorflow": tf.__version__,
                "horovod": horovod.__version__,
                "python": platform.python_version(),
            },
            "memory_total_mb": _memory_total_mb(),
            "first_step_seconds": self.first_step_seconds,
        }
        self._files.describe(run | more)

    def finish(self) -> None:
        """Reads the remaining steps and closes the files."""
        with self._lock:
            while self.read() is not None:  # of this plan, and of the next one
                pass
            self._look_at_auto()
            self._describe(finished=_now())
            if self._files is not None:
                self._files.close()
            if self._plan is not None:
                totals.measured[self._plan.name] = self.totals

    def log_first_step(self) -> None:
        """The first rank prints how long the first step took."""
        self._describe()
        if self._is_first and self.first_step_seconds is not None:
            say(f"the first step took {self.first_step_seconds:.1f} s (tracing and compiling included)")


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def _settings(settings: Settings) -> dict[str, Any]:
    """The settings, converted to types that JSON can represent."""
    values = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    values |= {"op": settings.op_name, "policy": {pattern: compressor.spec for pattern, compressor in settings.policy}}
    del values["compressor"], values["process_set"]
    kept = (str, int, float, dict, type(None))
    converted = {name: value if isinstance(value, kept) else str(value) for name, value in values.items()}
    return {"compression": settings.compressor.spec, **converted}


def _memory_mb() -> float:
    """Memory of the process in MB: resident memory and the GPU memory that TensorFlow has allocated; NaN if unknown."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            megabytes = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    except OSError:
        return float("nan")
    for gpu in tf.config.list_logical_devices("GPU"):
        device = gpu.name.replace("/physical_device:", "")
        megabytes += tf.config.experimental.get_memory_info(device)["current"] / 1e6
    return round(megabytes, 1)


def _memory_total_mb() -> float | None:
    """Memory of the host in MB; None if unknown."""
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e6)
    except (OSError, ValueError):
        return None
