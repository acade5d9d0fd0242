"""Writes the files of a run's directory; see docs/monitor.md for their contents."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Literal, TextIO

import numpy as np

from ..common.verbosity import say
from ..engine.compression_report import AutoReport
from ..engine.guard import GuardEvent
from ..engine.round_log import COLUMNS as ROUND_COLUMNS
from .recorder import WatchedBucket
from .steps import Steps

FORMAT = 1
STEP_COLUMNS = (
    "step", "epoch", "time", "loss", "step_ms", "exchange_ms", "exposed_ms", "encode_ms", "wire_ms", "decode_ms",
    "bytes", "ratio", "relative_error", "gradient_norm", "residual_norm", "finite", "memory_mb", "trial",
)  # fmt: skip
BUCKET_COLUMNS = (
    "step", "bucket", "compressor", "bytes", "ratio", "encode_ms", "wire_ms", "decode_ms", "relative_error",
    "gradient_norm", "residual_norm",
)  # fmt: skip
GUARD_COLUMNS = ("step", "compressor", "reason")
AUTO_COLUMNS = ("step", "compressor", "step_ms", "progress", "ms_per_progress")

_locks: dict[Path, IO[bytes]] = {}  # held by this process, by file


class RunFiles:
    """Writes one rank's files. If the disk is full, it stops writing, and training continues.

    Args:
        directory: The directory of the run. It is created if it does not exist.
        rank: This rank.

    Raises:
        OSError: The directory cannot be created or written to.
    """

    def __init__(self, directory: str, rank: int) -> None:
        self.directory = Path(directory)
        self.rank = rank
        self.directory.mkdir(parents=True, exist_ok=True)
        self._files: dict[str, TextIO] = {}  # by name
        self._is_closed = False
        self._steps, self._buckets, self._rounds = f"rank-{rank}", f"rank-{rank}-buckets", f"rank-{rank}-rounds"
        if not self._is_ours():
            return
        self._open(self._steps, STEP_COLUMNS)
        self._open(self._buckets, BUCKET_COLUMNS)
        for name in (self._rounds, *(["auto", "guard"] if rank == 0 else [])):  # of an earlier run
            (self.directory / f"{name}.csv").unlink(missing_ok=True)

    def _is_ours(self) -> bool:
        """Whether no other process writes this rank's files; keeps others from it until `close`.

        A worker that joins an elastic job may have the number that another one had before, which still writes.
        """
        path = self.directory / f"{self._steps}.csv"
        if path not in _locks:  # a training that an error has ended may have left it there
            _locks[path] = open(path, "ab")  # noqa: SIM115 (see `close`)
            try:
                fcntl.flock(_locks[path], fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"rank {self.rank} writes no files in {self.directory}: another process writes {path}", "warning")
                self._is_closed = True
                _locks.pop(path).close()
            except OSError:  # a file system without locks
                pass
        return not self._is_closed

    def _open(self, name: str, columns: tuple[str, ...]) -> TextIO:
        if name not in self._files:
            path = self.directory / f"{name}.csv"
            # Of `auto`, another rank may have written before an elastic reset, the first one then.
            mode: Literal["a", "w"] = "a" if name == "auto" else "w"
            self._files[name] = open(path, mode, encoding="utf-8", newline="")  # noqa: SIM115 (see `close`)
            if self._files[name].tell() == 0:
                self._files[name].write(",".join(columns) + "\n")
                self._files[name].flush()
        return self._files[name]

    def write(self, steps: Steps, buckets: list[WatchedBucket], epoch: int | None, memory: float) -> None:
        """Appends steps of an epoch (None without epochs) to the CSV files; `memory` is that of the process in MB."""
        self._append(self._steps, STEP_COLUMNS, step_lines(steps, epoch, memory))
        self._append(self._buckets, BUCKET_COLUMNS, bucket_lines(steps, buckets))

    def write_auto(self, report: AutoReport) -> None:
        """Appends what `auto` chooses from to auto.csv, a line for each compressor."""
        self._append("auto", AUTO_COLUMNS, auto_lines(report))

    def write_rounds(self, exchanges: np.ndarray) -> None:
        """Appends exchanges of local steps, [exchanges, ROUND_COLUMNS], to the rank's file of rounds."""
        if len(exchanges):
            text = "".join(_lines("%.0f" + ",%.7g" * (len(ROUND_COLUMNS) - 1), list(exchanges.T)))
            self._append(self._rounds, ROUND_COLUMNS, text)

    def write_guard(self, events: Sequence[GuardEvent]) -> None:
        """Writes guard.csv anew: all changes of a `CompressionGuard`, a line each."""
        lines = [",".join(GUARD_COLUMNS), *(f"{e.step},{_quoted(e.compressor)},{_quoted(e.reason)}" for e in events)]
        try:
            (self.directory / "guard.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
        except OSError as error:
            say(f"cannot write {self.directory / 'guard.csv'} ({error})", "warning")

    def _append(self, name: str, columns: tuple[str, ...], text: str) -> None:
        if self._is_closed:
            return
        try:
            file = self._open(name, columns)
            file.write(text)
            file.flush()
        except OSError as error:
            text = f"rank {self.rank} stops writing {self.directory} ({error}); training goes on"
            say(text, "warning")
            self.close()

    def describe(self, run: dict[str, Any]) -> None:
        """Writes run.json: under a temporary name first, so that the file is always complete."""
        path = self.directory / "run.json"
        temporary = path.with_suffix(".json.new")
        try:
            temporary.write_text(json.dumps({"format": FORMAT, **run}, indent=2) + "\n", encoding="utf-8")
            os.replace(temporary, path)
        except OSError as error:
            say(f"cannot write {path} ({error})", "warning")

    def close(self) -> None:
        """Closes the files; later calls of `write` do nothing."""
        for file in self._files.values():
            file.close()
        if not self._is_closed:
            self._is_closed = True
            lock = _locks.pop(self.directory / f"{self._steps}.csv", None)
            if lock is not None:
                lock.close()


def step_lines(steps: Steps, epoch: int | None, memory: float) -> str:
    """The lines of CSV for these steps, one each."""
    times = (steps.seconds, steps.exchange, steps.exposed, steps.encode, steps.wire, steps.decode)
    columns = [
        steps.step, steps.done, steps.loss, *(1e3 * x for x in times), steps.bytes, steps.ratio, steps.error,
        steps.gradient_norm, steps.residual_norm, steps.finite, np.full(len(steps), memory), steps.trial,
    ]  # fmt: skip
    template = f"%d,{'' if epoch is None else epoch},%.6f," + "%.7g," * 7 + "%.0f," + "%.7g," * 4 + "%d,%.7g,%d"
    return "".join(_lines(template, columns))


def auto_lines(report: AutoReport) -> str:
    """The lines of CSV for the choice, "auto", and for each fixed compressor."""
    template = f"{report.steps},%s,%.7g,%.7g,%.7g\n"
    rows = (report.choice, *report.fixed)
    return "".join(
        template % (_quoted(one.compressor), 1e3 * one.step, one.progress, 1e3 * one.per_progress) for one in rows
    )


def bucket_lines(steps: Steps, buckets: list[WatchedBucket]) -> str:
    """The lines of CSV for these steps, one for each step and bucket."""
    b = steps.buckets
    names = [[f"{bucket.name},{_quoted(c)}," for c in bucket.compressors] for bucket in buckets]
    starts = [
        f"{step},{of_bucket[c]}"
        for step, row in zip(steps.step.tolist(), b.compressor.tolist())
        for of_bucket, c in zip(names, row)
    ]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(b.bytes > 0, b.uncompressed_bytes / b.bytes, np.nan)
    times = (1e3 * x for x in (b.encode, b.wire, b.decode))
    columns = [b.bytes, ratio, *times, b.error, b.gradient_norm, b.residual_norm]
    lines = _lines("%.0f" + ",%.7g" * 7, [column.ravel() for column in columns])
    return "".join(map("".join, zip(starts, lines)))


def _lines(template: str, columns: Sequence[np.ndarray]) -> list[str]:
    """A line for each row of numbers, formatted by a printf template; NaN becomes an empty cell."""
    cells = np.stack([np.asarray(column, np.float64) for column in columns], 1)
    # One formatting operation for all rows: with one per cell, this would be most of the monitor's cost on the host.
    text = (template + "\n") * len(cells) % tuple(cells.ravel().tolist())
    return text.replace("nan", "").splitlines(keepends=True)


def _quoted(text: str) -> str:
    return f'"{text}"' if "," in text or '"' in text else text
