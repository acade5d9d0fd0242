"""Reads what `hvdc.callbacks.CompressionMonitor` and `hvdc.profile` wrote; see docs/monitor.md."""

from __future__ import annotations

import csv
import dataclasses
import functools
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from ..common.error_text import error_text

FORMAT = 1
Columns = dict[str, np.ndarray]
STEP_COLUMNS = (
    "step", "loss", "step_ms", "exchange_ms", "exposed_ms", "encode_ms", "wire_ms", "decode_ms", "bytes", "ratio",
    "gradient_norm", "residual_norm", "finite", "memory_mb",
)  # fmt: skip
BUCKET_COLUMNS = (
    "step", "bucket", "compressor", "bytes", "ratio", "encode_ms", "wire_ms", "decode_ms", "relative_error",
    "residual_norm",
)  # fmt: skip

AUTO_COLUMNS = ("step", "compressor", "step_ms", "progress", "ms_per_progress")
GUARD_COLUMNS = ("step", "compressor", "reason")
ROUND_COLUMNS = ("step", "movement", "drift", "outer_step", "weights", "statistics_drift")
# More ranks than any job has.
_MOST_RANKS = 10**9
_TEXTS = ("bucket", "compressor", "reason")  # columns that hold no numbers


class NoRun(click.UsageError):
    """The directory holds no run that can be read."""


@dataclasses.dataclass(frozen=True)
class Rank:
    """What one rank wrote."""

    number: int
    steps: Columns  # of rank-R.csv, float64 [steps]; NaN for empty cells
    buckets: dict[str, Columns]  # of rank-R-buckets.csv by bucket, likewise, but for `compressor`, which is text
    # rank-R-rounds.csv, the exchanges of local steps, likewise; empty without local steps.
    rounds: Columns = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Run:
    """A run's directory."""

    path: str
    meta: dict[str, Any]  # run.json
    ranks: Sequence[Rank]  # those that have files, in their order; at least one
    # auto.csv by compressor, likewise; "auto" is the choice in use. Empty without `auto`.
    auto: dict[str, Columns] = dataclasses.field(default_factory=dict)
    # guard.csv, the changes of `CompressionGuard`, likewise; `compressor` and `reason` are text. Empty without changes.
    guard: Columns = dataclasses.field(default_factory=dict)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the optimizer or tape."""
        return self.meta.get("settings", {})

    @property
    def first(self) -> Rank:
        """The first rank that has files, usually rank 0."""
        return self.ranks[0]

    @property
    def num_steps(self) -> int:
        """The steps of the first rank."""
        return len(self.first.steps["step"])

    @functools.cached_property
    def rounds(self) -> Columns:
        """The exchanges of local steps that all ranks have: root mean squares over the ranks, [exchanges].

        Empty without local steps. That of `drift` is the spread of the movements, if compression loses nothing.
        """
        each = [rank.rounds for rank in self.ranks if rank.rounds]
        if not each:
            return {}
        common = functools.reduce(np.intersect1d, [rounds["step"] for rounds in each])
        rows = [{name: rounds[name][np.isin(rounds["step"], common)] for name in ROUND_COLUMNS} for rounds in each]
        return {name: np.sqrt(np.mean([one[name] ** 2 for one in rows], 0)) for name in ROUND_COLUMNS}

    @property
    def local_steps(self) -> int:
        """The steps of a round; 1 without local steps."""
        steps = self.settings.get("local_steps")
        return steps if type(steps) is int and steps > 0 else 1

    @property
    def trial(self) -> np.ndarray:
        """Which steps of the first rank were trials of `auto`, bool [steps]."""
        return np.asarray(self.first.steps.get("trial", np.zeros(self.num_steps)) == 1.0)

    @property
    def losses(self) -> np.ndarray:
        """The mean over the ranks of each step's loss, [steps], for the steps that all of them have.

        It is infinite or NaN if that of a rank is, unless the rank has no losses at all.
        """
        losses = self.of_all("loss")
        known = ~np.isnan(losses).all(1)
        return losses[known].mean(0) if known.any() else np.full(losses.shape[1], math.nan)

    def of_all(self, column: str) -> np.ndarray:
        """A column on all ranks, [ranks, steps], for the steps that all of them have."""
        common = functools.reduce(np.intersect1d, [rank.steps["step"] for rank in self.ranks])
        return np.stack([rank.steps[column][np.isin(rank.steps["step"], common)] for rank in self.ranks])

    def fastest(self, column: str) -> np.ndarray:
        """The least over the ranks of each step's value, [steps]; NaN where no rank has one.

        A time on the wire is that of the last rank: the times of the others include waiting for that rank.
        """
        return np.fmin.reduce(self.of_all(column), 0)


def load(path: str) -> Run:
    """The run in a directory.

    Raises:
        NoRun: There is none, or one that cannot be read; says what is wrong in one line.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise NoRun(f"{path}: no such directory")
    file = directory / "run.json"
    if not file.exists():
        raise NoRun(
            f"{path} holds no run: it has no run.json, which rank 0 writes after the first step; give the log_dir of "
            "CompressionMonitor or hvdc.profile"
        )
    try:
        meta = _meta(file)
        members = meta.get("process_set")
        if not isinstance(members, list):  # of an earlier version
            members = range(meta["ranks"])
        ranks = [_rank(directory, r) for r in _written(directory) if r in members]
        auto = _by(directory / "auto.csv", "compressor", AUTO_COLUMNS)
        guard = _once(_table(directory / "guard.csv", GUARD_COLUMNS))
    except OSError as error:
        raise NoRun(f"{path} cannot be read: {error}") from None
    run = Run(str(path), meta, [rank for rank in ranks if len(rank.steps["step"])], auto, guard)
    if not run.ranks:
        raise NoRun(f"{path} holds no steps: there is no rank-0.csv, or it has no lines")
    if not run.of_all("step").size:
        raise NoRun(f"{path} is damaged: its ranks' files have no step in common; were they copied from other runs?")
    return run


def _meta(file: Path) -> dict[str, Any]:
    try:
        meta = _printable(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, RecursionError) as error:
        raise NoRun(f"{file} cannot be read: {error}") from None
    if not isinstance(meta, dict) or "format" not in meta:
        raise NoRun(f"{file} is not of hvd_compress: it has no format; give the log_dir of CompressionMonitor")
    if meta["format"] != FORMAT:
        raise NoRun(
            f"{file} has format {error_text(meta['format'])}, this version reads {FORMAT}: use the hvd_compress that "
            "wrote it"
        )
    # The fields that are used; others are only shown.
    buckets, link = meta.get("buckets", []), meta.get("link") or {"latency_ms": 0, "ns_per_byte": 0}
    is_valid = {
        "ranks": type(meta.get("ranks")) is int and 1 <= meta["ranks"] <= _MOST_RANKS,
        "settings": isinstance(meta.get("settings", {}), dict),
        "buckets": isinstance(buckets, list) and all(map(_is_bucket, buckets)),
        "link": isinstance(link, dict) and all(_is_number(link.get(key)) for key in ("latency_ms", "ns_per_byte")),
        **{key: meta.get(key) is None or _is_number(meta[key]) for key in ("memory_total_mb", "first_step_seconds")},
    }
    for key, valid in is_valid.items():
        if not valid:
            raise NoRun(f"{file} is damaged: {key!r} is {json.dumps(meta.get(key))[:80]}")
    return meta


def _printable(value: Any) -> Any:
    """A value of JSON in which characters that control a terminal are replaced."""
    if isinstance(value, dict):
        return {_printable(key): _printable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_printable(item) for item in value]
    return "".join(c if c.isprintable() else "\ufffd" for c in value) if isinstance(value, str) else value


def _is_bucket(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("name"), str) and _is_number(value.get("nbytes"))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and abs(value) < 1e300


def _written(directory: Path) -> list[int]:
    """The ranks whose files have lines: a run that has just begun has files without any."""
    files = [path for path in directory.glob("rank-*.csv") if path.stat().st_size]
    names = (re.fullmatch(r"rank-(0|[1-9]\d{0,9})\.csv", path.name) for path in files)
    return sorted(int(name.group(1)) for name in names if name)


def _rank(directory: Path, number: int) -> Rank:
    steps = _once(_columns(directory / f"rank-{number}.csv", STEP_COLUMNS))
    buckets = _by(directory / f"rank-{number}-buckets.csv", "bucket", BUCKET_COLUMNS)
    return Rank(number, steps, buckets, _once(_table(directory / f"rank-{number}-rounds.csv", ROUND_COLUMNS)))


def _table(path: Path, needed: Sequence[str]) -> Columns:
    """The columns of a file; empty if there is no such file."""
    return _columns(path, needed) if path.exists() and path.stat().st_size else {}


def _by(path: Path, key: str, needed: Sequence[str]) -> dict[str, Columns]:
    """The rows of a file by the names in a column; empty if there is no such file."""
    table = _table(path, needed)
    if not table:
        return {}
    names = table.pop(key)
    return {
        name: _once({column: values[names == name] for column, values in table.items()})
        for name in dict.fromkeys(names.tolist())
    }


def _once(columns: Columns) -> Columns:
    """The first row of each step: files may have been written twice, or two compressors have one name."""
    if not columns:
        return {}
    known = np.flatnonzero(np.isfinite(columns["step"]))
    _, first = np.unique(columns["step"][known], return_index=True)
    rows = known[np.sort(first)]
    return {name: values[rows] for name, values in columns.items()}


def _columns(path: Path, needed: Sequence[str]) -> Columns:
    try:
        with open(path, encoding="utf-8", newline="") as file:
            lines = csv.reader(file)
            header = next(lines, [])
            # The last line of a run that still goes on may be half a line.
            rows = [row for row in lines if len(row) == len(header)]
    except (ValueError, csv.Error) as error:
        raise NoRun(f"{path} cannot be read: {error}") from None
    if len(set(header)) < len(header):
        raise NoRun(f"{path} is damaged: a column stands twice in {_printable(', '.join(header))[:200]}")
    missing = [name for name in needed if name not in header]
    if missing:
        raise NoRun(f"{path} is damaged: it has no column {missing[0]!r}")
    columns: Columns = {}
    for name, cells in zip(header, zip(*rows) if rows else [()] * len(header)):
        if name in _TEXTS:
            columns[name] = np.array([_printable(cell) for cell in cells], dtype=str)
            continue
        try:
            columns[name] = np.array([float(cell) if cell else math.nan for cell in cells])
        except ValueError as error:
            raise NoRun(_printable(f"{path} is damaged: column {name!r}: {error}")[:300]) from None
    return columns
