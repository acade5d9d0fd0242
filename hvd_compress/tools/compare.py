"""`hvd-compress compare`: every compressor on recorded gradients, in one process."""

from __future__ import annotations

import os
from pathlib import Path

import click

from ..engine.layout import MIN_COMPRESS_SIZE
from . import console, options, plots, units


@click.command(
    epilog="""\b
Examples:
  hvd-compress compare logs/run-1/gradients.npz --plot compare.png
  hvd-compress compare gradients.npz -c int8 -c int4 -c topk:ratio=0.01 --max-error 0.1"""
)
@click.argument("file", type=click.Path())
@click.option(
    "--compressor", "-c", "specs", type=units.SPEC, multiple=True,
    help="Instead of usual settings of all; may be repeated.",
)  # fmt: skip
@click.option("--steps", type=click.IntRange(1), help="Of the error with residual.  [default: those of FILE, or 8]")
@click.option("--max-error", type=click.FloatRange(0.0), help="Name the compressor with the fewest bytes within this.")
@click.option(
    "--min-ratio", type=click.FloatRange(0.0), help="Name the one with the smallest error from this ratio on."
)
@click.option(
    "--min-compress-size", type=click.IntRange(0), default=MIN_COMPRESS_SIZE, show_default=True,
    help="Elements of a matrix that is compressed; 0 compresses all arrays.",
)  # fmt: skip
@options.output("Write it there as JSON.")
@click.option("--plot", type=plots.PLOT_FILE, help="Draw the errors against the bytes.")
@console.json_option
def compare(
    file: str, specs: tuple[str, ...], steps: int | None, max_error: float | None, min_ratio: float | None,
    min_compress_size: int, output: Path | None, plot: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Measure bytes, times and errors of every compressor on recorded gradients.

    FILE is the gradients.npz that hvdc.callbacks.CompressionMonitor(..., gradients=100) or hvdc.profile writes into its
    log_dir, or the file of hvdc.record_gradients or numpy.savez. No horovodrun and no network. The last column is the
    error of the mean of what several steps send, with residuals; the limits are for it. The exit status is 1 if no
    compressor is within the limits.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    with console.working("loading"):
        from ..analysis.compare import SPECS
        from ..analysis.compare import compare as measure

    names = list(dict.fromkeys(specs or SPECS))
    with console.Steps("measuring", len(names)) as progress, console.usage("FILE"):
        result = measure(file, names, steps, min_compress_size=min_compress_size, watch=progress.step)
    if output is not None:
        with console.writing(output):
            result.to_json(output)
    if plot is not None:
        with console.writing(plot):
            result.plot(plot)
    if not as_json:
        click.echo(str(result))
        if plot is not None:
            click.echo(f"plot: {plot}")
    best = None
    if max_error is not None or min_ratio is not None:
        try:
            best = result.best(max_error, min_ratio)
        except ValueError as error:
            raise click.ClickException(str(error)) from None
    if as_json:
        console.print_json({**result.as_json(), "best": best})
    elif best is not None:
        click.echo(f"best: {best}")
