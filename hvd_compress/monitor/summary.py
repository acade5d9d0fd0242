"""Means, standard deviations and percentiles over steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..common.text_table import aligned
from .steps import Steps

_BUCKET = ("bytes", "encode", "wire", "decode", "error", "gradient_norm", "residual_norm")
_NAMES = {"error": "relative_error", "seconds": "step"}
_TIMES = ("seconds", "exchange", "exposed", "encode", "wire", "decode")
_COLUMNS = ("mean", "std", "p50", "p90", "p99", "max")
STEP = (*_TIMES, "loss", "bytes", "ratio", "error", "gradient_norm", "residual_norm")


def of_buckets(steps: Sequence[Steps], count: int) -> list[Steps]:
    """Those with so many buckets: the steps of an earlier plan may have others."""
    return [part for part in steps if part.buckets.bytes.shape[1] == count]


def series(steps: Sequence[Steps]) -> dict[str, np.ndarray]:
    """Each quantity of all steps, [T]; times are in ms (`step_ms`, `exchange_ms`, ...)."""
    return {_name(name): _unit(name) * np.concatenate([getattr(part, name) for part in steps]) for name in STEP}


def means(steps: Sequence[Steps]) -> dict[str, float]:
    """The mean of each quantity, over the steps in which it is known, without trials; NaN if it is known in none."""
    by_name = series(steps)
    return dict(zip(by_name, _means(np.stack(list(by_name.values()), 1)[_usual(steps)]).tolist()))


def _usual(steps: Sequence[Steps]) -> np.ndarray:
    """The steps that are no trials of `auto`, or all if there are no others, bool [T]."""
    trial = np.concatenate([part.trial for part in steps])
    return trial if trial.all() else ~trial


def bucket_means(steps: Sequence[Steps]) -> list[dict[str, float]]:
    """As `means`, for each bucket."""
    tables = {
        name: _unit(name) * _means(np.concatenate([getattr(part.buckets, name) for part in steps])[_usual(steps)])
        for name in (*_BUCKET, "uncompressed_bytes")
    }
    uncompressed = tables.pop("uncompressed_bytes")
    tables["ratio"] = np.divide(
        uncompressed, tables["bytes"], where=tables["bytes"] > 0, out=np.full(len(uncompressed), np.nan)
    )
    rows = zip(*(values.tolist() for values in tables.values()))
    return [dict(zip(map(_name, tables), row)) for row in rows]


def _name(name: str) -> str:
    return _NAMES.get(name, name) + ("_ms" if name in _TIMES else "")


def _unit(name: str) -> float:
    return 1e3 if name in _TIMES else 1.0


def _means(values: np.ndarray) -> np.ndarray:
    """The means over the steps, [T, K] to [K]. NaN values are left out."""
    known = ~np.isnan(values)
    count = known.sum(0)
    total = np.where(known, values, 0.0).sum(0)
    return np.divide(total, count, where=count > 0, out=np.full(total.shape, np.nan))


def stats(steps: Sequence[Steps]) -> dict[str, dict[str, float]]:
    """Mean, standard deviation, percentiles and maximum of each quantity.

    Without the first step, which compiles, and without trials of `auto`.
    """
    rows, counted = {}, _usual(steps)
    counted[0] = counted.sum() <= 1
    for name, values in series(steps).items():
        values = values[counted]
        known = values[np.isfinite(values)]
        if len(known):
            p50, p90, p99 = np.percentile(known, (50, 90, 99))
            numbers = (known.mean(), known.std(), p50, p90, p99, known.max())
            rows[name] = {column: float(number) for column, number in zip(_COLUMNS, numbers)}
    return rows


def table(steps: Sequence[Steps], first_step_seconds: float | None) -> str:
    """The numbers of `stats` as a table."""
    cells: list[tuple[str, ...]] = [("", *_COLUMNS)]
    for name, row in stats(steps).items():
        cells.append((name, *(f"{x:,.4g}" if abs(x) < 1e5 else f"{x:,.0f}" for x in row.values())))
    first = "" if first_step_seconds is None else f"; the first, which compiles, took {first_step_seconds:.2f} s"
    return "\n".join([f"{sum(map(len, steps))} steps{first}", *aligned(cells)])
