"""What the benchmarks share: timing in turns, medians with their spread, tables, JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

try:
    from rich.console import Console
    from rich.table import Table
    from tqdm import tqdm
except ImportError as error:
    sys.exit(f"the benchmarks need {error.name}: pip install -e .[bench]")


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The arguments of a benchmark that runs under horovodrun, with those that all of them have."""
    parser.add_argument("--label", default="", help="what the table is called, for example the link's rate")
    parser.add_argument("--json", metavar="FILE", help="write the result there")
    args = parser.parse_args()
    if "HOROVOD_RANK" not in os.environ:
        parser.error("run it under horovodrun, or with benchmarks/netlab.py (see --help)")
    return args


def interleave(
    functions: Mapping[str, Callable[[], Any]],
    rounds: int,
    before: Callable[[], Any] = lambda: None,
    show: bool = True,
) -> dict[str, list[float]]:
    """Seconds of each call, all functions in turn in every round, so that drift hits them alike.

    Args:
        functions: By name; each must wait for its own results.
        rounds: How often each is timed.
        before: Called before each timing, for example a barrier.
        show: Whether to draw a progress bar.
    """
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in progress(range(rounds), "rounds", show):
        for name, function in functions.items():
            before()
            start = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - start)
    return times


def barrier() -> None:
    """Waits for all workers."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.allreduce(tf.zeros([1]), name="barrier").numpy()


def progress(items: Iterable[Any], what: str, show: bool = True) -> Iterable[Any]:
    """The items, with a progress bar on standard error."""
    return tqdm(items, desc=what, disable=not show, leave=False, mininterval=1.0, file=sys.stderr)


def summary(times: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
    if len(times) < 2:
        return {"median": times[0], "low": times[0], "high": times[0]}
    low, median, high = statistics.quantiles(times, n=4, method="inclusive")
    return {"median": median, "low": low, "high": high}


def milliseconds(stats: Mapping[str, float]) -> str:
    """Median and quartiles as text."""
    return f"{stats['median'] * 1e3:,.1f} ({stats['low'] * 1e3:,.1f} to {stats['high'] * 1e3:,.1f})"


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints a table, the first column to the left, numbers to the right."""
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console = Console()
    # Under horovodrun the output is a pipe, whose width rich takes for 80.
    Console(width=console.width if console.is_terminal else 160).print(table)


def save(path: str | None, result: Mapping[str, Any]) -> None:
    """Writes the result as JSON, with what it was measured on."""
    if path is None:
        return
    packages = {name: version(name) for name in ("horovod", "numpy", "hvd_compress")}
    import tensorflow as tf

    measured_on = {"tensorflow": tf.__version__, "python": platform.python_version(), **packages}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps({**result, "versions": measured_on}, indent=1) + "\n", encoding="utf-8")
    print(f"written to {path}")
