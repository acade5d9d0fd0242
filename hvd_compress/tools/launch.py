"""Starts a subcommand on several workers, and shows what they print without horovodrun's `[0]<stdout>:`."""

from __future__ import annotations

import functools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, TextIO

import click

from . import units
from .trial import end

_MARK = re.compile(r"^\[0\]<std(out|err)>:")


def _launcher(text: str) -> list[str]:
    words = shlex.split(text)
    if not words:
        raise ValueError("it is empty: leave it out, or name the program, such as horovodrun")
    # The program of this environment comes first, also where the environment is not activated.
    program = shutil.which(words[0], path=str(Path(sys.executable).parent)) or shutil.which(words[0])
    if program is None:
        raise click.ClickException(f"{words[0]} was not found: install Horovod, or name it with --launcher")
    return [program, *words[1:]]


hosts = click.option("-H", "hosts", help="Hosts and their slots, as horovodrun's.")
launcher = click.option(
    "--launcher", type=units.Parsed("text", _launcher), default="horovodrun", show_default=True,
    help="With other options of its, such as --gloo.",
)  # fmt: skip


def command(launcher: list[str], ranks: int, hosts: str | None) -> list[str]:
    """The beginning of a command that starts workers."""
    return [*launcher, "-np", str(ranks), *(["-H", hosts] if hosts else [])]


def workers(function: Callable[..., None]) -> Callable[..., None]:
    """Adds `-np`, `-H` and `--launcher` to a subcommand that runs on several workers: it then starts them itself."""

    @click.option("-np", "ranks", type=click.IntRange(2), help="Start so many workers, with horovodrun.")
    @hosts
    @launcher
    @functools.wraps(function)
    def with_workers(ranks: int | None, hosts: str | None, launcher: list[str], **others: Any) -> None:
        if ranks is None or "HOROVOD_RANK" in os.environ:  # a worker has the same arguments
            function(**others)
        else:
            program = [sys.executable, "-m", "hvd_compress.tools.cli", *sys.argv[1:]]
            sys.exit(run([*command(launcher, ranks, hosts), *program]))

    return with_workers


def run(command: list[str]) -> int:
    """Runs a command of workers, and passes on what it prints; returns its status."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    environment = dict(os.environ)
    if sys.stdout.isatty():
        environment["HVD_COMPRESS_COLUMNS"] = str(shutil.get_terminal_size().columns)
    try:
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
            start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise click.ClickException(f"{command[0]} cannot be started: {error.strerror}") from None
    assert process.stdout is not None and process.stderr is not None
    pairs = (process.stdout, sys.stdout), (process.stderr, sys.stderr)
    threads = [threading.Thread(target=_pass_on, args=pair, daemon=True) for pair in pairs]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return process.wait()
    finally:
        end(process)


def _pass_on(source: IO[str], target: TextIO) -> None:
    for line in source:
        target.write(_MARK.sub("", line))
        target.flush()
