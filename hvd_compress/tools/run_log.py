"""Reads what `hvdc.callbacks.CompressionMonitor` and `hvdc.profile` wrote; see docs/monitor.md."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

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


class NoRun(ValueError):
    """The directory holds no run that can be read."""


@dataclasses.dataclass(frozen=True)
class Rank:
    """What one rank wrote.

    Attributes:
        number: The rank.
        steps: The columns of rank-R.csv, float64 [steps]; NaN for empty cells.
        buckets: Those of rank-R-buckets.csv by bucket, float64 [steps], but for `compressor`, which is text.
    """

    number: int
    steps: Columns
    buckets: dict[str, Columns]


@dataclasses.dataclass(frozen=True)
class Run:
    """A run's directory.

    Attributes:
        path: The directory.
        meta: run.json.
        ranks: Those that have files, in their order; at least one.
    """

    path: str
    meta: dict[str, Any]
    ranks: Sequence[Rank]

    @property
    def settings(self) -> dict[str, Any]:
        """What the optimizer or tape was told."""
        found: dict[str, Any] = self.meta.get("settings", {})
        return found

    @property
    def first(self) -> Rank:
        """The first rank that has files, usually rank 0."""
        return self.ranks[0]

    @property
    def losses(self) -> np.ndarray:
        """The mean over ranks of each step's loss, [steps] of the first rank; as long as ranks have the step."""
        return _mean(self.of_all("loss"))

    def of_all(self, column: str) -> np.ndarray:
        """A column on all ranks, [ranks, steps], for the steps that all of them have."""
        own = [rank.steps["step"] for rank in self.ranks]
        common = own[0]
        for other in own[1:]:
            common = common[np.isin(common, other)]
        return np.stack([rank.steps[column][np.isin(steps, common)] for rank, steps in zip(self.ranks, own)])

    def fastest(self, column: str) -> np.ndarray:
        """The least over the ranks of each step's value, [steps]; of a time on the wire: that of the last rank.

        What others measure besides is waiting for that rank, not the network.
        """
        return _quiet(np.nanmin, self.of_all(column))


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
    meta = _meta(file)
    found = [_rank(directory, r) for r in _written(directory) if r < meta["ranks"]]
    found = [rank for rank in found if len(rank.steps["step"])]
    if not found:
        raise NoRun(f"{path} holds no steps: there is no rank-0.csv, or it has no lines")
    common = set(found[0].steps["step"]).intersection(*(rank.steps["step"] for rank in found[1:]))
    if not common:
        raise NoRun(
            f"{path} is damaged: its ranks' files have no step in common; were they copied from other runs?"
        )
    return Run(str(path), meta, found)


def _meta(file: Path) -> dict[str, Any]:
    try:
        meta = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise NoRun(f"{file} cannot be read: {error}") from None
    if not isinstance(meta, dict) or "format" not in meta:
        raise NoRun(
            f"{file} is not of hvd_compress: it has no format; give the log_dir of CompressionMonitor"
        )
    if meta["format"] != FORMAT:
        raise NoRun(
            f"{file} has format {meta['format']!r}, this version reads {FORMAT}: use the hvd_compress that wrote it"
        )
    # What is looked at; anything else is only error_text.
    buckets, link = meta.get("buckets", []), meta.get("link")
    right = {
        "ranks": isinstance(meta.get("ranks"), int),
        "settings": isinstance(meta.get("settings", {}), dict),
        "buckets": isinstance(buckets, list)
        and all(isinstance(b, dict) and "name" in b and _is_number(b.get("nbytes")) for b in buckets),
        "link": not link
        or (
            isinstance(link, dict) and all(_is_number(link.get(key)) for key in ("latency_ms", "ns_per_byte"))
        ),
        "memory_total_mb": _is_number(meta.get("memory_total_mb") or 0),
        "first_step_seconds": _is_number(meta.get("first_step_seconds") or 0),
    }
    for key, is_right in right.items():
        if not is_right:
            raise NoRun(f"{file} is damaged: {key!r} is {json.dumps(meta.get(key))[:80]}")
    return meta


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _written(directory: Path) -> list[int]:
    """The ranks whose files have lines: a run that has just begun has files without any."""
    names = (re.fullmatch(r"rank-(\d+)\.csv", path.name) for path in directory.glob("rank-*.csv"))
    ranks = sorted(int(name.group(1)) for name in names if name)
    return [r for r in ranks if (directory / f"rank-{r}.csv").stat().st_size]


def _rank(directory: Path, number: int) -> Rank:
    steps = _columns(directory / f"rank-{number}.csv", STEP_COLUMNS)
    path = directory / f"rank-{number}-buckets.csv"
    table = _columns(path, BUCKET_COLUMNS) if path.exists() and path.stat().st_size else {}
    buckets = {}
    if table:
        for name in dict.fromkeys(table["bucket"].tolist()):
            mine = table["bucket"] == name
            buckets[name] = {column: values[mine] for column, values in table.items() if column != "bucket"}
    return Rank(number, steps, buckets)


def _columns(path: Path, needed: Sequence[str]) -> Columns:
    try:
        with open(path, encoding="utf-8", newline="") as file:
            lines = csv.reader(file)
            header = next(lines, [])
            # The last line of a run that still goes on may be half a line.
            rows = [row for row in lines if len(row) == len(header)]
    except (OSError, ValueError, csv.Error) as error:
        raise NoRun(f"{path} cannot be read: {error}") from None
    missing = [name for name in needed if name not in header]
    if missing:
        raise NoRun(f"{path} is damaged: it has no column {missing[0]!r}")
    found: Columns = {}
    for name, cells in zip(header, zip(*rows) if rows else [()] * len(header)):
        if name in ("bucket", "compressor"):
            found[name] = np.array(cells, dtype=str)
            continue
        try:
            found[name] = np.array([float(cell) if cell else math.nan for cell in cells])
        except ValueError as error:
            raise NoRun(f"{path} is damaged: column {name!r}: {error}") from None
    return found


def _mean(values: np.ndarray) -> np.ndarray:
    """Over the ranks; infinite or NaN where it is on one that has a value at all."""
    known = ~np.isnan(values).all(1)
    return values[known].mean(0) if known.any() else np.full(values.shape[1], math.nan)


def _quiet(function: Any, values: np.ndarray) -> np.ndarray:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # NaN on all ranks
        return np.asarray(function(values, 0))
