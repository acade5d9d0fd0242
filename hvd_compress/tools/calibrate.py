"""`hvd-compress calibrate`: what the link and this machine's kernels cost, measured."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..cost import Calibration
from ..cost.calibration import COLLECTIVES
from ..engine.layout import LARGEST
from . import console, options, units

if TYPE_CHECKING:
    from rich.table import Table

EXAMPLE = "horovodrun -np 2 hvd-compress calibrate -o link.json"


@click.command(
    epilog=f"\b\nExample:\n  {EXAMPLE} --rate 1gbit\n  HVD_COMPRESS_CALIBRATION=link.json horovodrun ..."
)
@click.option(
    "--output", "-o", type=click.Path(path_type=Path), callback=console.output_file, help="Where to write it."
)
@click.option("--rate", type=units.RATE, help="The link's nominal rate, such as 1gbit, to compare with.")
@options.compressors
@click.option(
    "--elements",
    type=units.COUNT,
    default=LARGEST,
    help="Of a chunk of gradient.  [default: 1M]",
)
@console.json_option
def calibrate(
    output: Path | None, rate: float | None, specs: tuple[str, ...], elements: int, as_json: bool
) -> None:
    """Measure the link between the workers and the compressors' kernels.

    Runs under horovodrun; rank 0 prints and writes. `hvd-compress plan --calibration` reads the file, and so does
    `compression="auto"` where the environment variable HVD_COMPRESS_CALIBRATION names it.
    """
    console.under_horovodrun(EXAMPLE)
    import horovod.tensorflow as hvd

    from ..cost.calibrate import calibrate as measure
    from ..exchange import hosts

    hosts.init()
    with console.Steps("measuring", len(COLLECTIVES) + len(specs), hvd.rank() == 0) as steps:
        found = measure(specs, elements=elements, watch=steps.step)
    if hvd.rank() != 0:
        return
    if output is not None:
        try:
            found.save(output)
        except OSError as error:
            raise click.ClickException(f"{output} cannot be written: {error.strerror}") from None
    if as_json:
        console.print_json(as_fields(found, rate))
        return
    out = console.output()
    out.print(_links(found, rate))
    out.print(_kernels(found))
    out.print(_advice(found, rate), soft_wrap=True)
    if output is not None:
        out.print(
            f"written to {output}: HVD_COMPRESS_CALIBRATION={output} makes auto read it.", soft_wrap=True
        )


def as_fields(found: Calibration, rate: float | None) -> dict[str, Any]:
    """For scripts: seconds, bits per second, and shares."""
    links = {
        name: {
            "alpha": link.alpha,
            "beta": link.beta,
            "burst": link.burst,
            "rate": 8.0 / link.beta if link.beta else None,
            "residual": found.residuals[name],
            "efficiency": 8.0 / link.beta / rate if rate and link.beta else None,
        }
        for name, link in found.links.items()
    }
    kernels = {
        spec: {
            "call": cost.call,
            "encode": cost.encode,
            "decode": cost.decode,
            "decode_rank": cost.decode_rank,
        }
        for spec, cost in found.kernels.items()
    }
    levels = None if found.levels is None else dataclasses.asdict(found.levels)
    return {"ranks": found.ranks, "links": links, "kernels": kernels, "levels": levels}


def _links(found: Calibration, rate: float | None) -> Table:
    rows = []
    for name, link in found.links.items():
        reached = 8.0 / link.beta if link.beta else None
        rows.append(
            [
                name,
                units.show_seconds(link.alpha),
                f"{1e9 * link.beta:.3g} ns",
                units.show_bytes(link.burst) if link.burst else "",
                units.show_rate(reached) if reached else "no limit seen",
                f"{100 * found.residuals[name]:.0f}%",
                *([f"{100 * reached / rate:.0f}%" if reached else ""] if rate else []),
            ]
        )
    if found.levels is not None:
        for where, links in (("inside", found.levels.inside), ("across", found.levels.across)):
            for name, link in links.items():
                rows.append(
                    [
                        f"{name} {where} hosts",
                        units.show_seconds(link.alpha),
                        f"{1e9 * link.beta:.3g} ns",
                        units.show_bytes(link.burst) if link.burst else "",
                        units.show_rate(8.0 / link.beta) if link.beta else "no limit seen",
                        "",
                        *([""] if rate else []),
                    ]
                )
    columns = ["collective", "alpha, per message", "beta, per byte", "burst", "rate", "residual of the fit"]
    nominal = [f"of {units.show_rate(rate)}"] if rate else []
    return console.table(f"link between {found.ranks} ranks", [*columns, *nominal], rows)


def _kernels(found: Calibration) -> Table:
    rows = [
        [spec, *(units.show_seconds(x) for x in (cost.encoding(1e6), cost.decoding(1e6, found.ranks)))]
        for spec, cost in found.kernels.items()
    ]
    return console.table("kernels, 1 MB of gradient", ["compressor", "encode", "decode"], rows)


def _advice(found: Calibration, rate: float | None) -> str:
    link = found.links["allreduce"]
    worst = max(found.residuals, key=lambda name: found.residuals[name])
    if found.residuals[worst] > 0.3:
        return (
            f"The times of {worst} do not lie on a line (residual {100 * found.residuals[worst]:.0f}%): "
            "was the network or the machine busy? Measure again."
        )
    if rate and link.beta and 8.0 / link.beta < 0.5 * rate:
        return (
            f"Allreduce reaches {100 * 8.0 / link.beta / rate:.0f}% of {units.show_rate(rate)}: look at the network "
            "interface that Horovod uses (horovodrun --network-interfaces)."
        )
    return "The fit is good: plan and auto can rely on it."
