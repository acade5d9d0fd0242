"""Runs commands as a user does, each as a process of its own that cannot hang for ever."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Callable

import pytest

from hvd_compress.tools.trial import end

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent  # not resolved: in a virtual environment it is a link

Runner = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def horovodrun() -> Runner:
    """`horovodrun(np, args, timeout=300, env=None)` runs `horovodrun -np NP python ARGS...`.

    It runs in the project's folder and returns a CompletedProcess, whose stdout has lines such as
    `[0]<stdout>:text`, from rank 0. If it takes longer than `timeout` seconds, all its processes are ended
    and the test fails.
    """

    def run(
        np: int, args: list[str], timeout: float = 300, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        return _run([str(BIN / "horovodrun"), "--gloo", "-np", str(np), "python", *args], timeout, env)

    return run


@pytest.fixture
def python() -> Runner:
    """`python(args, timeout=300, env=None)`: likewise, one process without horovodrun."""

    def run(
        args: list[str], timeout: float = 300, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        return _run(["python", *args], timeout, env)

    return run


class Job:
    """A command that runs in the background, its output in files."""

    # Files, not pipes: no process that is left over can keep us waiting for the end of a pipe.
    def __init__(self, command: list[str], env: dict[str, str] | None) -> None:
        environment = {
            "HOROVOD_GLOO_TIMEOUT_SECONDS": "120",  # between the starts of two ranks, on a busy machine
            **os.environ,
            "PATH": os.pathsep.join([str(BIN), os.environ.get("PATH", "")]),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
            "TF_CPP_MIN_LOG_LEVEL": "2",
            **(env or {}),
        }
        if "HVD_COMPRESS" not in (env or {}):
            environment.pop("HVD_COMPRESS", None)
        self._command = command
        self._out = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._err = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=self._out, stderr=self._err, start_new_session=True
        )

    def alive(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None

    def output(self) -> subprocess.CompletedProcess[str]:
        """What it has written; once it has ended, as it writes where the files' positions are."""
        texts = []
        for file in (self._out, self._err):
            file.seek(0)
            texts.append(file.read())
        return subprocess.CompletedProcess(self._command, self._process.returncode, *texts)

    def wait(self, timeout: float) -> subprocess.CompletedProcess[str]:
        """Its output and status; if it takes longer, all its processes are ended and the test fails."""
        try:
            self._process.wait(timeout)
            late = False
        except subprocess.TimeoutExpired:
            late = True
        finally:
            end(self._process)
        result = self.output()
        if late:
            pytest.fail(f"{' '.join(self._command)} was still running after {timeout:.0f} s\n{_tail(result)}")
        if result.returncode:
            print(_tail(result))  # pytest shows it if the test fails
        return result

    def end(self) -> subprocess.CompletedProcess[str]:
        """Ends it, if it still runs, and returns its output."""
        end(self._process)
        return self.output()

    def close(self) -> None:
        """Ends it, if it still runs, and lets go of its output."""
        if self.alive():
            print(_tail(self.end()))
        self._out.close()
        self._err.close()


@pytest.fixture
def background() -> Iterator[Callable[..., Job]]:
    """`background(args, env=None)` starts `horovodrun --gloo ARGS...` and returns it as a `Job`."""
    jobs: list[Job] = []

    def start(args: list[str], env: dict[str, str] | None = None) -> Job:
        jobs.append(Job([str(BIN / "horovodrun"), "--gloo", *args], env))
        return jobs[-1]

    yield start
    for job in jobs:
        job.close()


def _run(command: list[str], timeout: float, env: dict[str, str] | None) -> subprocess.CompletedProcess[str]:
    job = Job(command, env)
    try:
        return job.wait(timeout)
    finally:
        job.close()


def _tail(result: subprocess.CompletedProcess[str]) -> str:
    return f"-- stdout --\n{result.stdout[-5000:]}\n-- stderr --\n{result.stderr[-10000:]}"
