"""`hvd-compress plan`: what a step will take, predicted."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click

from ..cost import Calibration, FatTree, Link
from ..cost.model import SHAPES
from . import advice, console, units
from .models import MODELS, of_size
from .network import Network, calibrated
from .prediction import BUCKET_BYTES, Forecast, Workload, forecast, forecast_auto

SPECS = (
    "none", "fp16", "bf16", "int8", "int4", "onebit", "topk:ratio=0.01", "block_topk:ratio=0.01",
    "randomk:ratio=0.01", "hybrid:ratio=0.01,bits=4", "powersgd:rank=2",
)  # fmt: skip
LATENCY = 50e-6
LOCAL_RATE, LOCAL_LATENCY = 100e9, 5e-6
RANKS_PER_LEAF = 32


@click.command(
    epilog="""\b
Examples:
  hvd-compress plan --params 25.6M --ranks 8,16,64 --bandwidth 10gbit --latency 50us --backward 120ms
  hvd-compress plan --model resnet50 --calibration link.json --backward 120ms --plot plan.png
  hvd-compress plan --model bert_base --ranks 512 --bandwidth 25gbit --topology fat-tree --oversubscription 4"""
)
@click.option("--params", type=units.PARAMETERS, help="Parameters of the model, such as 25.6M.")
@click.option("--model", type=click.Choice(sorted(MODELS)), help="The layers of a known model, instead.")
@click.option(
    "--ranks", type=units.RANKS, help="How many workers, such as 8,16,64.  [default: the calibration's]"
)
@click.option("--bandwidth", type=units.RATE, help="Of a link, such as 10gbit.  [default: the calibration's]")
@click.option("--latency", type=units.SECONDS, default=LATENCY, help="Of a message.  [default: 50us]")
@click.option(
    "--backward", type=units.SECONDS, default=0.0, help="The backward pass, such as 120ms.  [default: 0]"
)
@click.option(
    "--forward",
    type=units.SECONDS,
    default=0.0,
    help="Rest of a step: forward, update.  [default: 0]",
)
@click.option(
    "--topology", type=click.Choice([*SHAPES, "fat-tree", "two-level"]), default="ring", show_default=True
)
@click.option(
    "--oversubscription",
    type=float,
    help="With --topology fat-tree: what a leaf's ranks send over what its links to the core carry, such as 4.",
)
@click.option(
    "--ranks-per-leaf",
    type=units.COUNT,
    default=RANKS_PER_LEAF,
    show_default=True,
    help="With --topology fat-tree: ranks at a leaf switch.",
)
@click.option(
    "--workers-per-host", type=units.COUNT, help="With --topology two-level: workers that share a link."
)
@click.option(
    "--hierarchical",
    is_flag=True,
    help="With --topology two-level: sum float32 inside of hosts, compress what crosses between them.",
)
@click.option(
    "--local-bandwidth", type=units.RATE, default=LOCAL_RATE, help="Inside of a host.  [default: 100gbit]"
)
@click.option(
    "--local-latency", type=units.SECONDS, default=LOCAL_LATENCY, help="Inside of a host.  [default: 5us]"
)
@click.option("--calibration", type=click.Path(path_type=Path), help="What `hvd-compress calibrate` wrote.")
@click.option(
    "--compressor", "-c", "specs", type=units.SPEC, multiple=True, help="Instead of all; may be repeated."
)
@click.option(
    "--bucket-bytes",
    type=units.BYTES,
    default=BUCKET_BYTES,
    help="Of a bucket.  [default: 25MiB]",
)
@click.option(
    "--plot",
    type=click.Path(path_type=Path),
    callback=console.plot_file,
    help="Draw step times against bandwidth and ranks.",
)
@console.json_option
def plan(params: int | None, model: str | None, ranks: tuple[int, ...] | None, specs: tuple[str, ...],
         forward: float, backward: float, bucket_bytes: int, plot: Path | None, as_json: bool,
         **network_options: Any) -> None:  # fmt: skip
    """Predict step times and traffic for every compressor, and where compression pays.

    Needs neither TensorFlow nor Horovod nor a network. Gradients become ready while the backward pass goes on, and
    cross in buckets that queue behind it, as `auto` assumes. The last column is the share of white noise's energy
    that a step leaves to later ones; the advice prefers what loses less, at up to 5% more time,
    and leaves out what loses over 95%.
    """
    if (params is None) == (model is None):
        raise click.UsageError("Give either --params, such as --params 25.6M, or --model.")
    shapes = MODELS[model]() if model else of_size(params or 0)
    network, found = network_of(**network_options)
    if ranks is None:
        if found is None:
            raise click.UsageError("Give --ranks, such as --ranks 8,16,64, or --calibration.")
        ranks = (found.ranks,)
    work = Workload(tuple(shapes), backward, forward, bucket_bytes)
    # Always, as what others are compared with.
    specs = tuple(dict.fromkeys(["none", *(specs or SPECS)]))
    with console.usage("--workers-per-host"), console.working("predicting"):
        cases = [case_of(work, network, each, specs) for each in ranks]
    missing = [spec for spec in specs if found is not None and spec != "none" and spec not in found.kernels]
    result = {
        "params": work.numel,
        "backward": work.backward,
        "forward": work.rest,
        "bandwidth": network.rate,
        "latency": network.latency,
        "topology": "measured" if network.measured is not None else network.shape,
        "kernels": str(network_options["calibration"] or "defaults"),
        "kernels_by_default": missing if found is not None else list(specs),
        "cases": [case.as_json() for case in cases],
    }
    if plot is not None:
        from . import plots

        with console.working("drawing"):
            plots.plan(plot, work, network, specs, ranks[0])
    if as_json:
        console.print_json(result)
        return
    out = console.output()
    out.print(_title(work, network))
    for case in cases:
        out.print(_table(case))
        for line in advice.of_case(case, network):
            out.print(line, soft_wrap=True)
        out.print()
    out.print(_source(found is not None, missing, network_options["calibration"]), soft_wrap=True)
    if plot is not None:
        out.print(f"plot: {plot}")


@dataclasses.dataclass(frozen=True)
class Case:
    """All forecasts for a number of ranks.

    Attributes:
        ranks: How many.
        alone: Seconds of a step on a single rank.
        forecasts: By compressor; the first one is without compression.
        auto: What `auto` would do.
        ranges: Up to which rate (bits per second, None: any) which compressor is the best one.
    """

    ranks: int
    alone: float
    forecasts: tuple[Forecast, ...]
    auto: Forecast
    ranges: tuple[tuple[float | None, str], ...]

    @property
    def none(self) -> Forecast:
        """Without compression."""
        return self.forecasts[0]

    @property
    def best(self) -> Forecast:
        """The one to take; see `advice.best_of`."""
        return advice.best_of(self.forecasts)

    def efficiency(self, found: Forecast) -> float:
        """The share of its speed alone that each rank keeps."""
        return self.alone / found.step if found.step else 1.0

    def as_json(self) -> dict[str, Any]:
        """For scripts; seconds, bytes, bits per second."""
        return {
            "ranks": self.ranks,
            "best": self.best.compressor,
            "compressors": [{**_fields(each), **self._ratios(each)} for each in self.forecasts],
            "auto": {
                **_fields(self.auto),
                **self._ratios(self.auto),
                "buckets": [{"bytes": size, "compressor": spec} for size, spec in self.auto.chosen],
            },
            "best_by_bandwidth": [{"up_to": rate, "compressor": spec} for rate, spec in self.ranges],
            "stops_paying": advice.stops_paying(self.ranges),
        }

    def _ratios(self, found: Forecast) -> dict[str, float]:
        return {"speedup": self.none.step / found.step, "efficiency": self.efficiency(found)}


def _fields(found: Forecast) -> dict[str, Any]:
    return {name: value for name, value in dataclasses.asdict(found).items() if name != "chosen"}


def case_of(work: Workload, network: Network, ranks: int, specs: tuple[str, ...]) -> Case:
    """All forecasts for so many ranks.

    Raises:
        ValueError: The network does not fit them.
    """

    def at(rate: float | None = None) -> tuple[Forecast, ...]:
        return tuple(forecast(spec, work, network, ranks, rate) for spec in specs)

    return Case(
        ranks, work.backward + work.rest, at(), forecast_auto(work, network, ranks), advice.ranges(at)
    )


def network_of(
    bandwidth: float | None, latency: float, topology: str, oversubscription: float | None, ranks_per_leaf: int,
    workers_per_host: int | None, hierarchical: bool, local_bandwidth: float, local_latency: float,
    calibration: Path | None,
) -> tuple[Network, Calibration | None]:  # fmt: skip
    """The network that the options describe, and the calibration that they name.

    Raises:
        click.UsageError: They do not go together.
    """
    if (topology == "two-level") != (workers_per_host is not None):
        raise click.UsageError("--topology two-level and --workers-per-host go together.")
    if hierarchical and topology != "two-level":
        raise click.UsageError("--hierarchical needs --topology two-level.")
    if (topology == "fat-tree") != (oversubscription is not None):
        raise click.UsageError("--topology fat-tree and --oversubscription go together.")
    with console.usage("--oversubscription"):
        FatTree(Link(0.0, 0.0), 1, ranks_per_leaf, 1.0 if oversubscription is None else oversubscription)
    found, given = None, None
    if calibration is not None:
        with console.usage("--calibration"):
            found = Calibration.load(calibration)
    if bandwidth is not None:
        local = Link.of_rate(local_bandwidth, local_latency)
        given = Network(
            bandwidth,
            latency,
            topology,
            workers_per_host or 1,
            local,
            hierarchical=hierarchical,
            ranks_per_leaf=ranks_per_leaf,
            oversubscription=oversubscription or 1.0,
        )
    elif found is None:
        raise click.UsageError("Give --bandwidth, such as --bandwidth 10gbit, or --calibration.")
    elif topology != "ring":
        raise click.UsageError(
            "--topology needs --bandwidth: a calibration holds what was measured, as a ring."
        )
    if found is None:
        assert given is not None
        return given, None
    with console.usage("--calibration"):
        return calibrated(found, given), found


def _title(work: Workload, network: Network) -> str:
    link = f"{units.show_rate(network.rate)}, {units.show_seconds(network.latency)} per message"
    shape = "as measured" if network.measured is not None else network.shape
    if network.shape == "two-level" and network.measured is None:
        assert network.local is not None
        inside = f"{units.show_rate(8.0 / network.local.beta)}, {units.show_seconds(network.local.alpha)}"
        shape = f"hosts of {network.workers} workers (inside {inside})"
        shape += ", compressed between them" if network.hierarchical else ""
    if network.shape == "fat-tree":
        leaves = f"leaves of {network.ranks_per_leaf} ranks"
        shape = f"fat tree, {leaves}, oversubscribed {network.oversubscription:g} times"
    times = f"backward pass {units.show_seconds(work.backward)}"
    if work.rest:
        times += f", rest of a step {units.show_seconds(work.rest)}"
    return f"{units.show_count(work.numel)} parameters; {link}; {shape}; {times}"


def _table(case: Case) -> Any:
    rows = [
        [
            each.compressor,
            units.show_seconds(each.step),
            f"{case.none.step / each.step:.2f}x",
            f"{100 * case.efficiency(each):.0f}%" if case.alone else "",
            units.show_seconds(each.exchange),
            units.show_seconds(each.exposed),
            units.show_bytes(each.sent),
            f"{each.plain / each.sent:,.0f}"
            if each.plain > 100 * each.sent
            else f"{each.plain / each.sent:.3g}",
            f"{100 * each.lost:.2g}%" if each.lost else "",
        ]
        for each in (*case.forecasts, case.auto)
    ]
    columns = [
        "compressor", "step", "speedup", "efficiency", "exchange", "not hidden", "sent per rank", "ratio", "loses",
    ]  # fmt: skip
    return console.table(f"{case.ranks} ranks, predicted", columns, rows)


def _source(is_calibrated: bool, missing: list[str], path: Path | None) -> str:
    if not is_calibrated:
        return (
            "Kernels are those of one server core, not yours: measure them and the link with "
            "`horovodrun -np 2 hvd-compress calibrate -o link.json`, then add --calibration link.json."
        )
    rest = f", but those of {', '.join(missing)}, which are of another machine" if missing else ""
    return f"Kernels are those of {path}{rest}."
