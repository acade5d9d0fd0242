"""What all subcommands print with."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

# Under horovodrun, and in scripts, the output is a pipe, whose width rich takes for 80.
_PIPE_WIDTH = 140

json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON, for scripts.")


def output() -> Console:
    """The console on standard output, wide enough for tables where that is a pipe."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_PIPE_WIDTH)


def errors() -> Console:
    """The console on standard error: progress and notes, so that standard output holds the result alone."""
    return Console(stderr=True, highlight=False)


def print_json(result: Any) -> None:
    """Prints a result as JSON, indented.

    Raises:
        ValueError: It holds a number that JSON has not, such as infinity.
    """
    click.echo(json.dumps(result, indent=2, allow_nan=False))


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table with its first column to the left and the others, numbers, to the right."""
    found = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        found.add_column(column, justify="right" if i else "left", no_wrap=True)
    for row in rows:
        found.add_row(*row)
    return found


def progress(show: bool = True) -> Progress:
    """A progress bar on standard error, with the time so far; nothing where it is not to `show`."""
    return Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(), console=errors(), transient=True, disable=not show,
    )  # fmt: skip


@contextlib.contextmanager
def usage(option: str) -> Iterator[None]:
    """What a ValueError in here says is wrong with this option: status 2, one line."""
    try:
        yield
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint=f"'{option}'") from None


@contextlib.contextmanager
def working(what: str) -> Iterator[None]:
    """Shows on standard error that something takes a while."""
    with errors().status(what):
        yield
