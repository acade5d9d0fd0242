"""`hvd-compress horovod`: how the click command reaches hvd_compress.install, which does without click."""

from __future__ import annotations

import click

from ..install import command


@click.command(add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def horovod(arguments: tuple[str, ...]) -> None:
    """Build Horovod for the installed TensorFlow, install it, or check it on two ranks."""
    raise SystemExit(command.main(list(arguments)))
