"""What a run tells `hvd-compress tune`: lines on rank 0's standard output, where an environment variable asks for them.

Nothing in a script needs to change: the optimizer and the tape say how long steps take, and the callbacks
`BroadcastGlobalVariablesCallback` and `MetricAverageCallback` what the epoch's metrics are.
"""

from __future__ import annotations

import atexit
import json
import os
import time
from collections.abc import Mapping
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from ..engine.observer import Observer, StepMeasurement
from ..engine.settings import Settings
from .tune_protocol import MARK, VARIABLE

# Seconds between lines about steps.
_EVERY = 0.2


class _Clock:
    """The time between the steps of the first plan; others take part in the same step."""

    def __init__(self) -> None:
        self.plan = ""
        self._last: float | None = None
        self._said = 0.0
        self._pending: list[float] = []

    def tick(self) -> None:
        now = time.perf_counter()
        if self._last is not None:
            self._pending.append(round(now - self._last, 6))
        self._last = now
        if now - self._said > _EVERY:
            self._said = now
            self.flush()

    def flush(self) -> None:
        if self._pending:
            tell(steps=self._pending)
            self._pending = []


_clock = _Clock()


def is_on() -> bool:
    """Whether the environment variable HVD_COMPRESS_TUNE is set."""
    return bool(os.environ.get(VARIABLE, "").strip())


def tell(**facts: Any) -> None:
    """Prints a line for `hvd-compress tune` on rank 0."""
    if hvd.is_initialized() and hvd.rank() == 0:
        # In one write, so that nothing that other threads print gets into it.
        os.write(1, f"\n{MARK}{json.dumps(facts)}\n".encode())


def settings(found: Settings) -> None:
    """Says with which settings a plan was made."""
    if is_on():
        tell(compression=found.compressor.spec, bucket_bytes=found.bucket_bytes)


def metrics(logs: Mapping[str, Any] | None) -> None:
    """Says what Keras' logs hold."""
    if is_on() and logs:
        tell(metrics={name: float(value) for name, value in logs.items() if _is_number(value)})


class StepClock(Observer):
    """Tells how long the steps of the first plan take; others take part in the same step."""

    def __init__(self, plan: str) -> None:
        if not _clock.plan:
            _clock.plan = plan
            atexit.register(_clock.flush)
        self._plan = plan

    def observe(self, measurement: StepMeasurement) -> None:
        """Puts the end of the step into the graph, on all ranks, so that their graphs are equal; only one tells."""
        if _clock.plan == self._plan:
            with tf.device("CPU"):
                tf.numpy_function(_clock.tick, [], [])


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True
