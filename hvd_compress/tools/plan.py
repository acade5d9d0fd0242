"""`hvd-compress plan`: what a step will take, predicted."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from ..common.link import LATENCY
from ..cost import Calibration, FatTree, Link
from ..cost.model import SHAPES
from . import console, options, plots, units
from .advice import Case, Ranges, case_of, stops_paying
from .models import MODELS, of_size
from .network import Network, calibrated
from .other_steps import OtherStep, other_steps
from .workload import Workload

# Of the compressors, the one that is compared besides the best ones: it is meant for long rounds.
_STRONG = "hybrid:ratio=0.01,bits=4"
_OTHER_PROGRESS = (
    "Their progress is that of one language model: such steps are another algorithm, so compare the loss after equal "
    "steps."
)


@click.command(
    context_settings={"show_default": True},
    epilog="""\b
Examples:
  hvd-compress plan --params 25.6M --ranks 8,16,64 --bandwidth 10gbit --latency 50us --backward 120ms
  hvd-compress plan --model resnet50 --calibration link.json --backward 120ms --plot plan.png
  hvd-compress plan --params 1M --ranks 2 --bandwidth 20mbit --latency 60ms --backward 70ms --local-steps 8,30
  hvd-compress plan --model bert_base --ranks 512 --bandwidth 25gbit --topology fat-tree --oversubscription 4""",
)
@click.option("--params", type=units.PARAMETERS, help="Parameters of the model, such as 25.6M.")
@click.option("--model", type=click.Choice(sorted(MODELS)), help="The layers of a known model, instead.")
@click.option("--ranks", type=units.RANKS, help="How many workers, such as 8,16,64.  [default: the calibration's]")
@click.option("--bandwidth", type=units.RATE, help="Of a link, such as 10gbit.  [default: the calibration's]")
@click.option(
    "--latency", type=units.SECONDS, default=LATENCY, show_default=False, help="Of a message.  [default: 50us]"
)
@options.backward
@options.forward
@click.option("--topology", type=click.Choice([*SHAPES, "fat-tree", "two-level"]), default="ring")
@click.option(
    "--oversubscription", type=float,
    help="With --topology fat-tree: what a leaf's ranks send over what its links to the core carry, such as 4.",
)  # fmt: skip
@click.option(
    "--ranks-per-leaf", type=units.COUNT, default=32, help="With --topology fat-tree: ranks at a leaf switch."
)
@click.option("--workers-per-host", type=units.COUNT, help="With --topology two-level: workers that share a link.")
@click.option(
    "--hierarchical", is_flag=True,
    help="With --topology two-level: sum float32 inside of hosts, compress what crosses between them.",
)  # fmt: skip
@click.option("--local-bandwidth", type=units.RATE, default="100gbit", help="Inside of a host.")
@click.option("--local-latency", type=units.SECONDS, default="5us", help="Inside of a host.")
@click.option("--calibration", type=click.Path(path_type=Path), help="What `hvd-compress calibrate` wrote.")
@options.compressors
@options.bucket_bytes
@click.option(
    "--local-steps", type=units.LOCAL_STEPS,
    help="Also predict steps that exchange once in so many, such as 8,30, and with delay=1.",
)  # fmt: skip
@click.option("--delay", is_flag=True, help="Also predict steps with delay=1.")
@click.option("--plot", type=plots.PLOT_FILE, help="Draw step times against bandwidth and ranks.")
@console.json_option
def plan(params: int | None, model: str | None, ranks: tuple[int, ...] | None, specs: tuple[str, ...],
         forward: float, backward: float, bucket_bytes: int, local_steps: tuple[int, ...] | None, delay: bool,
         plot: Path | None, as_json: bool, **network_options: Any) -> None:  # fmt: skip
    """Predict how fast training is with every compressor, and where compression pays.

    Needs neither TensorFlow nor Horovod nor a network. Gradients become ready while the backward pass goes on, and
    cross in buckets that queue behind it, as `auto` assumes. `speedup` is that of a step, `training` that of the
    progress: a compressed step makes less of it. The advice is the compressor with which training is the fastest, by
    the rule of `auto`.
    """
    _check_given(params, model, ranks, network_options["bandwidth"], network_options["calibration"])
    shapes = MODELS[model]() if model else of_size(params or 0)
    if (local_steps or delay) and not forward + backward:
        option = "--local-steps" if local_steps else "--delay"
        raise click.UsageError(f"{option} needs --backward or --forward: what a step does beside its exchange.")
    network, calibration = network_of(**network_options)
    if ranks is None:
        assert calibration is not None
        ranks = (calibration.ranks,)
    work = Workload(tuple(shapes), backward, forward, bucket_bytes)
    is_choice, specs = specs != options.SPECS, options.with_none(specs)
    with console.usage("--workers-per-host"), console.working("predicting"):
        cases = [case_of(work, network, count, specs) for count in ranks]
    others: dict[int, list[OtherStep]] = {}  # by the number of ranks
    if local_steps or delay:
        for case in cases:
            usual = dict.fromkeys([case.best.compressor, case.best_per_bucket.compressor, _STRONG])
            others[case.ranks] = other_steps(
                work, network, case.ranks, specs if is_choice else tuple(usual), local_steps or ()
            )
    if plot is not None:
        with console.working("drawing"):
            plots.plan(plot, work, network, specs, ranks[0])
    measured_kernels = ("none", *calibration.kernels) if calibration else ()
    by_default = [spec for spec in specs if spec not in measured_kernels]
    if as_json:
        console.print_json({
            "params": work.numel,
            "backward": work.backward,
            "forward": work.rest,
            "bandwidth": network.rate,
            "latency": network.latency,
            "topology": "measured" if network.measured is not None else network.shape,
            "kernels": str(network_options["calibration"] or "defaults"),
            "kernels_by_default": by_default,
            "cases": [case.as_json() for case in cases],
            **({"other_steps": [list(map(dataclasses.asdict, others[count])) for count in ranks]} if others else {}),
        })  # fmt: skip
        return
    out = console.output()
    out.print(_title(work, network))
    for line in _unknown(work, network_options["calibration"], by_default):
        out.print(line, soft_wrap=True)
    for case in cases:
        out.print(_table(case))
        for sentence in _advice(case, network, is_choice=is_choice):
            out.print(sentence, soft_wrap=True)
        if others:
            out.print(_other_table(case, others[case.ranks]))
            out.print(_OTHER_PROGRESS, soft_wrap=True)
        out.print()
    if plot is not None:
        out.print(f"plot: {plot}")


def _check_given(
    params: int | None, model: str | None, ranks: object, bandwidth: float | None, calibration: Path | None
) -> None:
    """Raises a UsageError that names all missing options at once."""
    if params is not None and model is not None:
        raise click.UsageError("Give either --params or --model.")
    missing = [] if params is not None or model is not None else ["--params (25.6M) or --model (resnet50)"]
    if calibration is None:
        needed = {"--ranks (8,16,64)": ranks, "--bandwidth (10gbit)": bandwidth}
        names = [name for name, value in needed.items() if value is None]
        missing += [f"{' and '.join(names)}, or --calibration (link.json)"] if names else []
    if missing:
        raise click.UsageError(f"Give {', and '.join(missing)}.")


def network_of(
    bandwidth: float | None, latency: float, topology: str, oversubscription: float | None, ranks_per_leaf: int,
    workers_per_host: int | None, hierarchical: bool, local_bandwidth: float, local_latency: float,
    calibration: Path | None,
) -> tuple[Network, Calibration | None]:  # fmt: skip
    """The network that the options describe, and the calibration that they name."""
    if (topology == "two-level") != (workers_per_host is not None):
        raise click.UsageError("--topology two-level and --workers-per-host go together.")
    if hierarchical and topology != "two-level":
        raise click.UsageError("--hierarchical needs --topology two-level.")
    if (topology == "fat-tree") != (oversubscription is not None):
        raise click.UsageError("--topology fat-tree and --oversubscription go together.")
    if oversubscription is not None:
        with console.usage("--oversubscription"):
            FatTree(Link(0.0, 0.0), 1, ranks_per_leaf, oversubscription)
    with console.usage("--calibration"):
        measured = Calibration.load(calibration) if calibration else None
        if bandwidth is None:
            assert measured is not None  # see `_check_given`
            if topology != "ring":
                raise click.UsageError(
                    "--topology needs --bandwidth: a calibration holds what was measured, as a ring."
                )
            return calibrated(measured, None), measured
        network = Network(
            bandwidth, latency, topology, workers=workers_per_host or 1, hierarchical=hierarchical,
            local=Link.of_rate(local_bandwidth, local_latency), ranks_per_leaf=ranks_per_leaf,
            oversubscription=oversubscription or 1.0,
        )  # fmt: skip
        return (calibrated(measured, network) if measured else network), measured


def _title(work: Workload, network: Network) -> str:
    """What is predicted: the model, the network and the times of a step."""
    link = f"{units.show_rate(network.rate)}, {units.show_seconds(network.latency)} per message"
    shape = "as measured" if network.measured is not None else network.shape
    if shape == "two-level":
        inside = f"{units.show_rate(8.0 / network.local.beta)}, {units.show_seconds(network.local.alpha)}"
        shape = f"hosts of {network.workers} workers (inside {inside})"
        shape += ", compressed between them" if network.hierarchical else ""
    elif shape == "fat-tree":
        leaves = f"leaves of {network.ranks_per_leaf} ranks"
        shape = f"fat tree, {leaves}, oversubscribed {network.oversubscription:g} times"
    times = f"backward pass {units.show_seconds(work.backward)}"
    if work.rest:
        times += f", rest of a step {units.show_seconds(work.rest)}"
    return f"{units.show_count(work.numel)} parameters; {link}; {shape}; {times}"


def _table(case: Case) -> Table:
    """A row per compressor, and one for `auto`."""
    rows = []
    for forecast in (*case.forecasts, case.auto):
        ratio = forecast.plain / forecast.sent
        rows.append({
            "compressor": forecast.compressor,
            "step": units.show_seconds(forecast.step),
            "speedup": f"{case.speedup(forecast):.2f}x",
            "progress": f"{forecast.progress:.0%}",
            "training": f"{case.training(forecast):.2f}x",
            "efficiency": f"{case.efficiency(forecast):.0%}" if case.alone else "",
            "exchange": units.show_seconds(forecast.exchange),
            "not hidden": units.show_seconds(forecast.exposed),
            "sent per rank": units.show_bytes(forecast.sent),
            "ratio": f"{ratio:,.0f}" if ratio > 100 else f"{ratio:.3g}",
        })  # fmt: skip
    return console.table(f"{case.ranks} ranks, predicted", rows)


def _other_table(case: Case, steps: Sequence[OtherStep]) -> Table:
    """A row for each compressor and way to exchange."""
    rows = [
        {
            "compressor": each.compressor,
            "exchange": each.setting or "in each step",
            "step": units.show_seconds(each.step),
            "progress": f"{each.progress:.0%}",
            "training": f"{case.training(each):.2f}x",
            "computing": f"{each.computing:.0%}",
            "sent per step": units.show_bytes(each.sent),
        }
        for each in steps
    ]
    return console.table(f"{case.ranks} ranks, exchanging less often or beside the next step, predicted", rows)


def _advice(case: Case, network: Network, is_choice: bool) -> list[str]:
    """What the table of a case comes to, in sentences; `is_choice` says that the user named the compressors."""
    best, none, rate = case.best, case.none, units.show_rate(network.rate)
    if best is none:
        do_not = "Take none of these" if is_choice else "Do not compress"
        line = f"{do_not} at {rate}: training would be less than 5% faster."
    else:
        line = (
            f"Take {best.compressor} at {rate}: a step of {units.show_seconds(best.step)} instead of "
            f"{units.show_seconds(none.step)} makes {best.progress:.0%} of the progress. Training is "
            f"{case.training(best):.3g} times as fast."
        )
    chosen = list(dict.fromkeys(spec for _, spec in case.auto.chosen if spec != "none")) or ["none"]
    auto = f"auto would take {' and '.join(chosen)}: a step of {units.show_seconds(case.auto.step)}, training "
    if best is none and chosen != ["none"]:
        auto += "as fast, within 5%."
    else:
        auto += f"{case.training(case.auto):.3g} times as fast."
    return [line, auto, _by_bandwidth(case.ranges, is_choice)]


def _by_bandwidth(ranges: Ranges, is_choice: bool) -> str:
    *limited, (_, last) = ranges
    parts = [f"{spec} up to {units.show_rate(limit)}" for limit, spec in limited if limit]
    parts.append(f"{last} {'beyond' if parts else 'everywhere'}")
    limit = stops_paying(ranges)
    where = "nowhere" if limit == 0.0 else f"up to {units.show_rate(limit)}" if limit else "up to 1 Tbit/s and more"
    who = "These compressors pay" if is_choice else "Compression pays"
    return f"Best by bandwidth: {', '.join(parts)}. {who} {where}."


def _unknown(work: Workload, calibration: Path | None, by_default: Sequence[str]) -> list[str]:
    """What the predictions do not know of the user's machines and model, and how to find out."""
    if calibration is None:
        measured = (
            "Not measured: your link, and your kernels (taken from one server core). Run `hvd-compress calibrate -np 2 "
            "-o link.json`, then add --calibration link.json."
        )
    else:
        others = f", but those of {', '.join(by_default)}, which are of another machine" if by_default else ""
        measured = f"Kernels are those of {calibration}{others}."
    estimated = "Estimated: the progress of a step, from trainings of small models. `auto` measures it on yours."
    if not work.backward + work.rest:
        estimated += " Not given: --backward and --forward. The longer they are, the less compression gains."
    return [measured, estimated]
