"""One short training run with one setting, started through horovodrun."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import re
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..monitor.tune_protocol import MARK, VARIABLE

_TAIL = 15
# The first steps wait for what is compiled and connected.
_FIRST_STEPS = 10


@dataclasses.dataclass
class Run:
    """What is known of a run.

    Attributes:
        status: "done", "failed", "late" (it was ended at its time limit), or why else it was ended.
        seconds: That it took.
        steps: Seconds of each step.
        metrics: Of the last epoch that told any.
        printed: What a pattern found last in the output; None for nothing.
        compression: The spec string that the script used.
        bucket_bytes: That the script used.
        tail: The last lines of its workers' output.
        launcher: Those of the launcher's own, which are of interest where no worker has said anything.
    """

    status: str = "running"
    seconds: float = 0.0
    steps: list[float] = dataclasses.field(default_factory=list)
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    printed: float | None = None
    compression: str | None = None
    bucket_bytes: int | None = None
    tail: list[str] = dataclasses.field(default_factory=list)
    launcher: list[str] = dataclasses.field(default_factory=list)

    @property
    def said(self) -> list[str]:
        """Where to look for why it failed."""
        return self.tail or self.launcher

    def hear(self, line: str, pattern: re.Pattern[str] | None) -> None:
        """Takes in a line of output."""
        _, mark, told = line.partition(MARK)
        if not mark:
            text = re.sub(r"^\[\d+\]<std(?:out|err)>:", "", line)
            is_worker, text = text != line, text.rstrip()
            lines = self.tail if is_worker else self.launcher
            lines += [text] if text else []
            del lines[:-_TAIL]
            found = pattern.search(text) if pattern is not None else None
            if found:
                with contextlib.suppress(ValueError, TypeError):  # no number
                    self.printed = float(found.group(1))
            return
        try:
            facts = json.loads(told)
        except ValueError:
            return
        self.steps += facts.get("steps", [])
        self.metrics = facts.get("metrics", self.metrics)
        if self.compression is None:  # of the first optimizer
            self.compression = facts.get("compression")
            self.bucket_bytes = facts.get("bucket_bytes")

    def usual_steps(self) -> list[float]:
        """The steps without the first ones: ten, or a quarter of them."""
        return self.steps[min(_FIRST_STEPS, len(self.steps) // 4) :]


def run(
    command: Sequence[str],
    environment: Mapping[str, str],
    limit: float | None,
    pattern: re.Pattern[str] | None,
    watch: Callable[[Run], str | None] = lambda run: None,
) -> Run:
    """Starts a command and listens to it until it ends.

    Args:
        command: With its arguments.
        environment: Besides this process's.
        limit: Seconds after which it is ended, with all that it started; None for none.
        pattern: Whose first group is a number, looked for in its output.
        watch: Called about five times a second; what it says, if anything, becomes the status, and the run is ended.

    Raises:
        OSError: It cannot be started.
    """
    found, start = Run(), time.monotonic()
    process = subprocess.Popen(
        command, env={**os.environ, **environment, VARIABLE: "1"}, stdout=subprocess.PIPE, text=True,
        stderr=subprocess.STDOUT, errors="replace", start_new_session=True,
    )  # fmt: skip
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_read, args=(process.stdout, lines), daemon=True).start()
    try:
        while True:
            found.seconds = time.monotonic() - start
            why = watch(found)
            if why is not None:
                found.status = why
                return found
            if limit is not None and found.seconds > limit:
                found.status = "late"
                return found
            try:
                line = lines.get(timeout=0.2)
            except queue.Empty:
                if process.poll() is not None:  # what it left behind keeps the pipe open
                    break
                continue
            if line is None:
                break
            found.hear(line, pattern)
        process.wait()
        found.status = "failed" if process.returncode else "done"
        return found
    finally:
        end(process)


def _read(stream: Any, lines: queue.Queue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def end(process: subprocess.Popen[str]) -> None:
    """Ends a process and all that it started: horovodrun puts its workers into sessions of their own."""
    import psutil

    if process.poll() is not None:
        return
    family = psutil.Process(process.pid).children(recursive=True)
    process.terminate()  # horovodrun ends its workers
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    _, alive = psutil.wait_procs(family, timeout=5)
    for survivor in alive:
        survivor.kill()
    psutil.wait_procs(alive, timeout=10)
