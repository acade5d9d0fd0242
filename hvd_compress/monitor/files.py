"""The files of a run's directory; see docs/monitor.md."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from .recorder import WatchedBucket
from .steps import Steps

FORMAT = 1
STEP_COLUMNS = (
    "step", "epoch", "time", "loss", "step_ms", "exchange_ms", "exposed_ms", "encode_ms", "wire_ms", "decode_ms",
    "bytes", "ratio", "relative_error", "gradient_norm", "residual_norm", "finite", "memory_mb",
)  # fmt: skip
BUCKET_COLUMNS = (
    "step", "bucket", "compressor", "bytes", "ratio", "encode_ms", "wire_ms", "decode_ms", "relative_error",
    "gradient_norm", "residual_norm",
)  # fmt: skip


class RunFiles:
    """Writes one rank's files; a full disk stops the writing, not the training.

    Raises:
        OSError: The directory cannot be made or written to.
    """

    def __init__(self, directory: str, rank: int) -> None:
        self.directory = Path(directory)
        self.rank = rank
        self.directory.mkdir(parents=True, exist_ok=True)
        self._steps: TextIO | None = self._open(f"rank-{rank}.csv", STEP_COLUMNS)
        self._buckets: TextIO | None = self._open(f"rank-{rank}-buckets.csv", BUCKET_COLUMNS)

    def _open(self, name: str, columns: tuple[str, ...]) -> TextIO:
        file = open(self.directory / name, "w", encoding="utf-8", newline="")  # noqa: SIM115 (closed in `close`)
        file.write(",".join(columns) + "\n")
        file.flush()
        return file

    def write(self, steps: Steps, buckets: list[WatchedBucket], epoch: int | None, memory: float) -> None:
        """Appends steps; memory in MB."""
        if self._steps is None or self._buckets is None:
            return
        try:
            self._steps.write(step_lines(steps, epoch, memory))
            self._buckets.write(bucket_lines(steps, buckets))
            self._steps.flush()
            self._buckets.flush()
        except OSError as error:
            print(
                f"hvd_compress: rank {self.rank} stops writing {self.directory} ({error}); training goes on",
                file=sys.stderr, flush=True,
            )  # fmt: skip
            self.close()

    def describe(self, run: dict[str, Any]) -> None:
        """Writes run.json; by a new name first, so that it is always whole."""
        path = self.directory / "run.json"
        new = path.with_suffix(".json.new")
        try:
            new.write_text(json.dumps({"format": FORMAT, **run}, indent=2) + "\n", encoding="utf-8")
            os.replace(new, path)
        except OSError as error:
            print(f"hvd_compress: cannot write {path} ({error})", file=sys.stderr, flush=True)

    def close(self) -> None:
        """No more is written."""
        for file in (self._steps, self._buckets):
            if file is not None:
                file.close()
        self._steps = self._buckets = None


def step_lines(steps: Steps, epoch: int | None, memory: float) -> str:
    """A line of CSV for each step."""
    milli = [
        1e3 * x
        for x in (steps.seconds, steps.exchange, steps.exposed, steps.encode, steps.wire, steps.decode)
    ]
    columns: list[Any] = [
        steps.step, ["" if epoch is None else epoch] * len(steps), [f"{t:.6f}" for t in steps.done], steps.loss,
        *milli, steps.bytes, steps.ratio, steps.error, steps.gradient_norm, steps.residual_norm,
        steps.finite.astype(np.int64), [memory] * len(steps),
    ]  # fmt: skip
    return _lines(columns)


def bucket_lines(steps: Steps, buckets: list[WatchedBucket]) -> str:
    """A line of CSV for each step and bucket."""
    b = steps.buckets
    count = len(buckets)
    compressors = [_quoted(bucket.compressors[c]) for row in b.compressor for bucket, c in zip(buckets, row)]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(b.bytes > 0, b.plain / b.bytes, np.nan)
    columns: list[Any] = [
        np.repeat(steps.step, count), [bucket.name for bucket in buckets] * len(steps), compressors, b.bytes.ravel(),
        ratio.ravel(), *(1e3 * x.ravel() for x in (b.encode, b.wire, b.decode)), b.error.ravel(),
        b.gradient_norm.ravel(), b.residual_norm.ravel(),
    ]  # fmt: skip
    return _lines(columns)


def _lines(columns: list[Any]) -> str:
    texts = [
        list(map(_text, column.tolist() if isinstance(column, np.ndarray) else column)) for column in columns
    ]
    return "".join(",".join(row) + "\n" for row in zip(*texts))


def _text(value: Any) -> str:
    """A number in seven digits, nothing for NaN."""
    if isinstance(value, float):
        return "" if value != value else f"{value:.7g}" if abs(value) < 1e6 or value % 1 else f"{value:.0f}"
    return str(value)


def _quoted(text: str) -> str:
    return f'"{text}"' if "," in text or '"' in text else text
