"""What a run reports to `hvd-compress tune`: lines on rank 0's standard output, if an environment variable is set.

Scripts need no change. The optimizer and the tape report the seconds of steps, and the callbacks
`BroadcastGlobalVariablesCallback` and `MetricAverageCallback` report the metrics of epochs.
"""

from __future__ import annotations

import atexit
import json
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from ..engine.observer import Observer, StepMeasurement
from ..engine.settings import Settings
from .tune_protocol import EACH_STEP, MARK, VARIABLE

# Seconds between lines about steps.
_LINE_INTERVAL = 0.2


class _Clock:
    """Measures the time between steps."""

    def __init__(self) -> None:
        self.plan = ""  # the first plan: other plans belong to the same steps
        self.steps_per_tick: Callable[[], int] = lambda: 1  # with local steps, those of a round
        self._last_tick: float | None = None
        self._last_line = 0.0
        self._pending: list[float] = []  # seconds of steps

    def tick(self) -> None:
        now = time.perf_counter()
        if self._last_tick is not None:
            self._pending.append(round((now - self._last_tick) / self.steps_per_tick(), 6))
        self._last_tick = now
        if now - self._last_line > _LINE_INTERVAL:
            self._last_line = now
            self.flush()

    def flush(self) -> None:
        if self._pending:
            report(steps=self._pending)
            self._pending = []


_clock = _Clock()


def is_on() -> bool:
    """Whether the environment variable HVD_COMPRESS_TUNE is set."""
    return bool(os.environ.get(VARIABLE, "").strip())


def report(**facts: Any) -> None:
    """Prints a line for `hvd-compress tune` on rank 0."""
    if hvd.is_initialized() and hvd.rank() == 0:
        # One write, so that other threads cannot print into the line.
        os.write(1, f"\n{MARK}{json.dumps(facts)}\n".encode())


def settings(used: Settings) -> None:
    """Reports the settings of a plan."""
    if is_on():
        exchange = "delay=1" if used.delay else EACH_STEP
        exchange = exchange if used.local_steps is None else f"local_steps={used.local_steps}"
        report(compression=used.compressor.spec, bucket_bytes=used.bucket_bytes, exchange=exchange)


def metrics(logs: Mapping[str, Any] | None) -> None:
    """Reports the metrics in Keras' logs."""
    if is_on() and logs:
        report(metrics={name: float(value) for name, value in logs.items() if _is_number(value)})


class StepClock(Observer):
    """Reports the seconds of steps of the first plan; with local steps, their mean over each round."""

    def __init__(self, plan: str, local_steps: Callable[[], int]) -> None:
        if not _clock.plan:
            _clock.plan, _clock.steps_per_tick = plan, local_steps
            atexit.register(_clock.flush)
        self._plan = plan

    def observe(self, measurement: StepMeasurement) -> None:
        """Adds a tick of the clock to the end of the step, on all ranks: their graphs should be equal."""
        if _clock.plan == self._plan:
            with tf.device("CPU"):
                tf.numpy_function(_clock.tick, [], [])


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True
