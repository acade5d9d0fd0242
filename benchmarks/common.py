"""What the benchmarks share: interleaved timing, medians with quartiles, tables, JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
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

from hvd_compress.tools import timing
from hvd_compress.tools.timing import summary as summary


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parses the arguments of a benchmark that runs under horovodrun; adds those that all benchmarks have."""
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
    """As `timing.interleave`, with a progress bar if `show` is True."""
    bar = iter(progress(range(rounds), "rounds", show))
    seconds = timing.interleave(functions, rounds, before, lambda: next(bar))
    next(bar, None)  # ends the progress bar
    return seconds


def progress(items: Iterable[Any], what: str, show: bool = True) -> Iterable[Any]:
    """The items, with a progress bar on standard error."""
    return tqdm(items, desc=what, disable=not show, leave=False, mininterval=1.0, file=sys.stderr)


def milliseconds(stats: Mapping[str, float]) -> str:
    """Median and quartiles in milliseconds, as text."""
    return f"{stats['median'] * 1e3:,.1f} ({stats['low'] * 1e3:,.1f} to {stats['high'] * 1e3:,.1f})"


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints a table. The first column is aligned left, the others right."""
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console = Console()
    # Under horovodrun the output is a pipe, for which rich assumes a width of 80.
    Console(width=console.width if console.is_terminal else 160).print(table)


def save(path: str | Path | None, result: Mapping[str, Any], show: bool = True) -> None:
    """Writes the result as JSON, with the versions of the packages, and says so if `show` is True."""
    if path is None:
        return
    packages = {name: version(name) for name in ("horovod", "numpy", "hvd_compress")}
    import tensorflow as tf

    measured_on = {"tensorflow": tf.__version__, "python": platform.python_version(), **packages}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps({**result, "versions": measured_on}, indent=1) + "\n", encoding="utf-8")
    if show:
        print(f"written to {path}")
