"""`hvd-compress plan`: what a step will take, predicted."""

from __future__ import annotations

import click

from . import console


@click.command()
@console.json_option
def plan(as_json: bool) -> None:
    """Predict step times and traffic for every compressor."""
    raise click.ClickException("not there yet")
