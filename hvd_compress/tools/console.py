"""What all subcommands print with."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..common.verbosity import set_verbosity
from . import units

_PIPE_WIDTH = 160  # Rich would assume 80
_SECONDS_BETWEEN_LINES = 4.0  # of progress

json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON, for scripts.")


def output_file(text: str) -> Path:
    """A file to write; ValueError if it cannot be written, so that this is known before anything is measured.

    Under horovodrun, only rank 0 writes, and so only rank 0 checks.
    """
    path = Path(text)
    if os.environ.get("HOROVOD_RANK", "0") != "0":
        return path
    if path.is_dir():
        raise ValueError(f"{path} is a directory: name a file")
    if not path.parent.is_dir():
        raise ValueError(f"{path} cannot be written: there is no directory {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{path} cannot be written: permission denied")
    return path


OUTPUT_FILE = units.Parsed("path", output_file)


def output() -> Console:
    """The console on standard output; if that is a pipe, it is wide enough for tables, or as wide as `launch` says."""
    console = Console(highlight=False)
    width = os.environ.get("HVD_COMPRESS_COLUMNS", "")
    return (
        console
        if console.is_terminal
        else Console(highlight=False, width=int(width) if width.isdecimal() else _PIPE_WIDTH)
    )


def errors() -> Console:
    """The console on standard error, for progress and notes: standard output holds nothing but the result."""
    return Console(stderr=True, highlight=False)


def working(what: str) -> contextlib.AbstractContextManager[Any]:
    """Shows on standard error that something takes a while."""
    return errors().status(what)


def print_json(result: Any) -> None:
    """Prints a result as JSON, indented; ValueError if it holds a number that JSON has not, such as infinity."""
    click.echo(json.dumps(result, indent=2, allow_nan=False))


def table(title: str, rows: Sequence[Mapping[str, str]]) -> Table:
    """A table of rows, each with all columns by name. The first column is aligned to the left, numbers to the right."""
    result = Table(title=title, title_justify="left")
    for i, column in enumerate(rows[0]):
        result.add_column(column, justify="right" if i else "left", no_wrap=True)
    for row in rows:
        result.add_row(*row.values())
    return result


class Steps(Progress):
    """Progress on standard error: a bar, or a line every few seconds if that is a pipe, as under horovodrun.

    Nothing is shown if `show` is False, as it is on all ranks but one.
    """

    def __init__(self, what: str, total: int, show: bool = True) -> None:
        console = errors()
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        super().__init__(*columns, console=console, transient=True, disable=not (show and console.is_terminal))
        self._what, self._total = what, total
        self._step = -1
        self._last_line = time.monotonic()
        self._prints_lines = show and not console.is_terminal
        self._bar = self.add_task(what, total=total)

    def step(self, name: str = "") -> None:
        """Begins the next step."""
        self._step += 1
        self.say(name)

    def say(self, name: str) -> None:
        """Shows what is being done in this step."""
        self.update(self._bar, completed=self._step, description=f"{self._what} {name}".strip())
        if self._prints_lines and time.monotonic() - self._last_line > _SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            click.echo(f"hvd-compress: {self._what} {self._step}/{self._total} {name}".rstrip(), err=True)


def under_horovodrun(example: str) -> None:
    """Refuses to go on, showing an example, if this process is not one of several that horovodrun has started.

    From then on the package says only what goes wrong: the subcommand shows its own progress.
    """
    if int(os.environ.get("HOROVOD_SIZE", "1")) < 2:
        raise click.UsageError(f"This measures between workers: start at least two, such as `{example}`.")
    set_verbosity("warning")


@contextlib.contextmanager
def usage(option: str) -> Iterator[None]:
    """What a ValueError in here says is wrong with this option: status 2, one line."""
    try:
        yield
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint=f"'{option}'") from None


@contextlib.contextmanager
def needed_by(what: str) -> Iterator[None]:
    """Says in one line, status 1, how to install a package that is imported in here and missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise click.ClickException(f"{what} needs {error.name}: pip install 'hvd_compress[tools]'") from None


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Says in one line, status 1, why this file cannot be written in here."""
    try:
        yield
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise click.ClickException(f"{path} cannot be written: {reason}") from None
