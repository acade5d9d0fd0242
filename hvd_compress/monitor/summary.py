"""Means, spread and percentiles of steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .steps import Steps

_BUCKET = ("bytes", "encode", "wire", "decode", "error", "gradient_norm", "residual_norm")
_NAMES = {"error": "relative_error", "seconds": "step"}
_TIMES = ("seconds", "exchange", "exposed", "encode", "wire", "decode")
_COLUMNS = ("mean", "std", "p50", "p90", "p99", "max")
STEP = (*_TIMES, "loss", "bytes", "ratio", "error", "gradient_norm", "residual_norm")


def series(some: Sequence[Steps]) -> dict[str, np.ndarray]:
    """Each quantity of all steps, [T]; times in ms (`step_ms`, `exchange_ms`, ...)."""
    found = {}
    for name in STEP:
        values = np.concatenate([np.asarray(getattr(steps, name), np.float64) for steps in some])
        found[_name(name)] = 1e3 * values if name in _TIMES else values
    return found


def means(some: Sequence[Steps]) -> dict[str, float]:
    """The means, over the steps where each is known; NaN where none is."""
    found = series(some)
    return dict(zip(found, _means(np.stack(list(found.values()), 1)).tolist()))


def bucket_means(some: Sequence[Steps]) -> list[dict[str, float]]:
    """Of each bucket."""
    tables = {
        name: _means(np.concatenate([getattr(steps.buckets, name) for steps in some]))
        * (1e3 if name in _TIMES else 1.0)
        for name in (*_BUCKET, "plain")
    }
    plain = tables.pop("plain")
    tables["ratio"] = np.divide(
        plain, tables["bytes"], where=tables["bytes"] > 0, out=np.full(len(plain), np.nan)
    )
    rows = zip(*(values.tolist() for values in tables.values()))
    return [dict(zip(map(_name, tables), row)) for row in rows]


def _name(name: str) -> str:
    return _NAMES.get(name, name) + ("_ms" if name in _TIMES else "")


def _means(values: np.ndarray) -> np.ndarray:
    """Over the steps, [T, K] to [K]; as of `means`."""
    known = ~np.isnan(values)
    count = known.sum(0)
    total = np.where(known, values, 0.0).sum(0)
    return np.divide(total, count, where=count > 0, out=np.full(total.shape, np.nan))


def stats(some: Sequence[Steps]) -> dict[str, dict[str, float]]:
    """Mean, standard deviation, percentiles and maximum of each quantity; without the first step, which compiles."""
    found = {}
    for name, values in series(some).items():
        values = values[1:] if len(values) > 1 else values
        known = values[np.isfinite(values)]
        if len(known):
            p50, p90, p99 = np.percentile(known, (50, 90, 99))
            numbers = (known.mean(), known.std(), p50, p90, p99, known.max())
            found[name] = {column: float(number) for column, number in zip(_COLUMNS, numbers)}
    return found


def table(some: Sequence[Steps], first_step_seconds: float | None) -> str:
    """`stats` as text."""
    cells: list[tuple[str, ...]] = [("", *_COLUMNS)]
    for name, row in stats(some).items():
        cells.append((name, *(f"{x:,.4g}" if abs(x) < 1e5 else f"{x:,.0f}" for x in row.values())))
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    first = (
        "" if first_step_seconds is None else f"; the first, which compiles, took {first_step_seconds:.2f} s"
    )
    lines = [f"{sum(map(len, some))} steps{first}"]
    for name, *numbers in cells:
        lines.append("  ".join([name.ljust(widths[0]), *(n.rjust(w) for n, w in zip(numbers, widths[1:]))]))
    return "\n".join(lines)
