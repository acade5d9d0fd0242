"""One short training run with one setting, started through horovodrun."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..monitor.tune_protocol import EACH_STEP, MARK, VARIABLE

_KEPT_LINES = 15
_FIRST_STEPS = 10  # These wait for compilation and connections.
_INTERVAL = 0.2  # seconds between two calls of `watch`
_LAST_LINES = 5.0  # seconds for reading what an ended process has printed


@dataclasses.dataclass
class Run:
    """What a run has reported."""

    status: str = "running"  # then "done", "failed", "late" (it reached its time limit), or why else it was stopped
    seconds: float = 0.0  # how long it took
    steps: list[float] = dataclasses.field(default_factory=list)  # seconds of each step
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)  # of the last epoch that reported any
    printed: float | None = None  # the last number in the output that matches a pattern
    compression: str | None = None  # the spec string that the script used
    bucket_bytes: int | None = None  # the bucket size that the script used
    exchange: str = EACH_STEP  # when the script exchanged
    worker_lines: list[str] = dataclasses.field(default_factory=list)  # the last ones of the workers' output
    launcher_lines: list[str] = dataclasses.field(default_factory=list)  # the last ones of the launcher's own output

    @property
    def last_lines(self) -> list[str]:
        """The output that may show why a run failed."""
        return self.worker_lines or self.launcher_lines

    @property
    def step(self) -> float:
        """The median of `usual_steps`, in seconds."""
        return statistics.median(self.usual_steps())

    def usual_steps(self) -> list[float]:
        """The steps without the first ten, or without the first quarter if that is less."""
        return self.steps[min(_FIRST_STEPS, len(self.steps) // 4) :]

    def read(self, line: str, pattern: re.Pattern[str] | None) -> None:
        """Reads a line of output."""
        _, mark, report = line.partition(MARK)
        if mark:
            with contextlib.suppress(ValueError, AttributeError, TypeError):  # a torn line: not JSON, or no object
                self._read_report(json.loads(report))
            return
        text = re.sub(r"^\[\d+\]<std(?:out|err)>:", "", line)
        lines = self.launcher_lines if text == line else self.worker_lines
        text = text.rstrip()
        if text:
            lines.append(text)
            del lines[:-_KEPT_LINES]
        match = pattern.search(text) if pattern is not None else None
        if match:
            with contextlib.suppress(ValueError, TypeError):  # not a number
                self.printed = float(match.group(1))

    def _read_report(self, facts: dict[str, Any]) -> None:
        self.steps += facts.get("steps", [])
        self.metrics = facts.get("metrics", self.metrics)
        if self.compression is None:  # The first optimizer counts.
            self.compression = facts.get("compression")
            self.bucket_bytes = facts.get("bucket_bytes")
            self.exchange = facts.get("exchange", EACH_STEP)


def run(
    command: Sequence[str],
    environment: Mapping[str, str],
    limit: float | None,
    pattern: re.Pattern[str] | None,
    watch: Callable[[Run], str | None] = lambda run: None,
) -> Run:
    """Starts a command and reads its output until it ends.

    Args:
        command: The program and its arguments.
        environment: Variables in addition to those of this process.
        limit: Seconds after which the command is stopped, with all that it started; None for no limit.
        pattern: Its first group is a number to look for in the output.
        watch: Called about five times a second. If it returns a status, the command is stopped with this status.

    Raises:
        OSError: The command cannot be started.
    """
    result, start = Run(), time.monotonic()
    process = subprocess.Popen(
        command, env={**os.environ, **environment, VARIABLE: "1"}, stdout=subprocess.PIPE, text=True,
        stderr=subprocess.STDOUT, errors="replace", start_new_session=True,
    )  # fmt: skip

    def read() -> None:
        for line in process.stdout or ():
            result.read(line, pattern)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        has_ended = False
        while not has_ended:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_INTERVAL)
                has_ended = True
                reader.join(_LAST_LINES)  # Processes that it left behind may keep the pipe open.
            result.seconds = time.monotonic() - start
            is_late = limit is not None and result.seconds > limit
            reason = watch(result) or ("late" if is_late else None)
            if reason is not None:
                result.status = reason
                return result
        result.status = "failed" if process.wait() else "done"
        return result
    finally:
        end(process)


def end(process: subprocess.Popen[str]) -> None:
    """Ends a process and all that it started: horovodrun puts its workers into sessions of their own."""
    import psutil

    if process.poll() is not None:
        return
    descendants = psutil.Process(process.pid).children(recursive=True)
    try:
        process.terminate()  # horovodrun ends its workers.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
            psutil.wait_procs(descendants, timeout=5)
    finally:  # also if a signal interrupts the wait
        process.kill()
        process.wait()
        for descendant in descendants:
            with contextlib.suppress(psutil.NoSuchProcess):
                descendant.kill()
        psutil.wait_procs(descendants, timeout=10)
