"""`hvd-compress calibrate`: what the link and this machine's kernels cost, measured."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from ..cost import Calibration, Link
from ..cost.calibration import COLLECTIVES
from ..formats.auto import CANDIDATES
from . import console, launch, options, units

EXAMPLE = "hvd-compress calibrate -np 2 -o link.json"


@click.command(epilog=f"\b\nExample:\n  {EXAMPLE} --rate 1gbit\n  HVD_COMPRESS_CALIBRATION=link.json horovodrun ...")
@options.output("Where to write it.")
@click.option("--rate", type=units.RATE, help="The link's nominal rate, such as 1gbit, to compare with.")
@options.compressors
@click.option("--elements", type=units.COUNT, help="Of a chunk of gradient.  [default: 1M, on a GPU 6.55M]")
@console.json_option
@launch.workers
def calibrate(
    output: Path | None, rate: float | None, specs: tuple[str, ...], elements: int | None, as_json: bool
) -> None:
    """Measure the link between the workers and the compressors' kernels.

    -np starts the workers, and so does horovodrun in front of the command; rank 0 prints and writes.
    `hvd-compress plan --calibration` reads the file, and so does `compression="auto"` where the environment variable
    HVD_COMPRESS_CALIBRATION names it.
    """
    console.under_horovodrun(EXAMPLE)
    import horovod.tensorflow as hvd

    from ..cost.calibrate import calibrate as measure
    from ..exchange import hosts

    hosts.init()
    with console.Steps("measuring", len(COLLECTIVES) + len(specs), hvd.rank() == 0) as steps:
        calibration = measure(specs, elements=elements, watch=steps.step)
    if hvd.rank() != 0:
        return
    if output is not None:
        with console.writing(output):
            calibration.save(output)
    if as_json:
        console.print_json(_as_json(calibration, rate))
        return
    out = console.output()
    out.print(_links(calibration, rate))
    out.print(_kernels(calibration))
    out.print(_advice(calibration, rate), soft_wrap=True)
    if output is not None:
        out.print(f"written to {output}{use_of(calibration, output)}", soft_wrap=True)


def use_of(calibration: Calibration, output: Path) -> str:
    """What the file is good for."""
    unmeasured = calibration.unmeasured(CANDIDATES)
    if not unmeasured:
        return f": HVD_COMPRESS_CALIBRATION={output} makes auto read it."
    return f", for plan. auto reads it only if all of its candidates are measured; left out: {', '.join(unmeasured)}"


def _as_json(calibration: Calibration, nominal: float | None) -> dict[str, Any]:
    """For scripts: seconds, bits per second, and shares."""
    links = {
        name: {
            "alpha": link.alpha,
            "beta": link.beta,
            "burst": link.burst,
            "rate": _rate(link),
            "residual": calibration.residuals[name],
            "efficiency": 8.0 / link.beta / nominal if nominal and link.beta else None,
        }
        for name, link in calibration.links.items()
    }
    kernels = {spec: dataclasses.asdict(cost) for spec, cost in calibration.kernels.items()}
    levels = None if calibration.levels is None else dataclasses.asdict(calibration.levels)
    return {"ranks": calibration.ranks, "links": links, "kernels": kernels, "levels": levels}


def _rate(link: Link) -> float | None:
    """Bits per second; None if the link has no limit."""
    return 8.0 / link.beta if link.beta else None


def _links(calibration: Calibration, nominal: float | None) -> Table:
    def row(name: str, link: Link, residual: float | None = None) -> dict[str, str]:
        rate = _rate(link)
        cells = {
            "collective": name,
            "alpha, per message": units.show_seconds(link.alpha),
            "beta, per byte": f"{1e9 * link.beta:.3g} ns",
            "burst": units.show_bytes(link.burst) if link.burst else "",
            "rate": units.show_rate(rate) if rate else "no limit seen",
            "residual of the fit": "" if residual is None else f"{residual:.0%}",
        }
        if nominal:  # the rate of the link between all ranks
            cells[f"of {units.show_rate(nominal)}"] = f"{rate / nominal:.0%}" if rate and residual is not None else ""
        return cells

    rows = [row(name, link, calibration.residuals[name]) for name, link in calibration.links.items()]
    if calibration.levels is not None:
        for where, links in (("inside", calibration.levels.inside), ("across", calibration.levels.across)):
            rows += [row(f"{name} {where} hosts", link) for name, link in links.items()]
    return console.table(f"link between {calibration.ranks} ranks", rows)


def _kernels(calibration: Calibration) -> Table:
    rows = [
        {
            "compressor": spec,
            "encode": units.show_seconds(cost.encoding(1e6)),
            "decode": units.show_seconds(cost.decoding(1e6, calibration.ranks)),
        }
        for spec, cost in calibration.kernels.items()
    ]
    return console.table("kernels, 1 MB of gradient", rows)


def _advice(calibration: Calibration, nominal: float | None) -> str:
    worst, residual = max(calibration.residuals.items(), key=lambda item: item[1])
    if residual > 0.3:
        return (
            f"The times of {worst} do not lie on a line (residual {residual:.0%}): "
            "was the network or the machine busy? Measure again."
        )
    rate = _rate(calibration.links["allreduce"])
    if nominal and rate and rate < 0.5 * nominal:
        return (
            f"Allreduce reaches {rate / nominal:.0%} of {units.show_rate(nominal)}: look at the network "
            "interface that Horovod uses (horovodrun --network-interfaces)."
        )
    return "The fit is good: plan and auto can rely on it."
