"""Compares predictions with measurements between emulated hosts and with published ones.

    sudo python benchmarks/netlab.py --hosts 8 --rate 100mbit -- \
        python benchmarks/exchange.py --label 100mbit --json docs/results/exchange_8_100mbit.json
    python benchmarks/scaling_check.py docs/results/*.json --out docs/images --page docs/scaling.md

Prints Markdown tables, and writes them into a page. The error is (predicted - measured) / measured. No parameter is
fitted to the measurements: a link has its nominal rate, or the rate that the same hosts reach over an unshaped link if
that is lower, and the latency of `plan`. Kernels have their default speeds, divided by the number of hosts per core.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from page_tables import markdown, show

from hvd_compress.cost import Link, Ring
from hvd_compress.cost.defaults import CPU
from hvd_compress.tools import units
from hvd_compress.tools.models import MODELS, of_size
from hvd_compress.tools.network import Network
from hvd_compress.tools.plan import LATENCY
from hvd_compress.tools.prediction import forecast
from hvd_compress.tools.workload import Workload

# Cores of the machine that emulates the hosts.
CORES = 2
UNSHAPED = "unshaped"
BACKWARD = 2 / 3  # its share of a step's computation: two matrix products for each one of the forward pass


class Row(NamedTuple):
    """A measurement and its prediction, in seconds."""

    what: str
    where: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """The error relative to the measurement."""
        return self.predicted / self.measured - 1.0


def network(rate: float, hosts: int, cores: int = CORES) -> Network:
    """The network of emulated hosts, which have a core each as far as there are enough."""
    times = max(1.0, hosts / cores)
    kernels = {
        name: dataclasses.replace(cost, **{k: v * times for k, v in dataclasses.asdict(cost).items()})
        for name, cost in CPU.kernels.items()
    }
    return Network(rate, LATENCY, kernels=kernels)


def exchange(method: str, work: Workload, net: Network, ranks: int) -> float:
    """Predicted seconds of a method of `exchange.py` for the gradients of a step."""
    library, _, spec = method.rpartition(" ")
    if library in ("horovod", "DDP"):
        # 16 bits are half as many bytes; the times of casting and summing them are unknown.
        half = Network(net.rate * 2, net.latency) if spec == "fp16" else net
        return forecast("none", work, half, ranks).step
    return forecast(spec, work, net, ranks).step


def reached(work: Workload, ranks: int, seconds: float) -> float:
    """The bits per second of a ring in which an allreduce of all gradients takes this long."""
    return 8.0 * Ring(Link(0.0, 1.0), ranks).allreduce(4 * work.numel) / seconds


def compare_all(results: Sequence[dict[str, Any]]) -> list[Row]:
    """Results of `exchange.py` with their predictions. Those of unshaped links give the limit of the hosts."""
    limits = {
        (result["model"], result["workers"]): reached(
            Workload(tuple(MODELS[result["model"]]())),
            result["workers"],
            result["methods"]["horovod none"]["median"],
        )
        for result in results
        if result["label"] == UNSHAPED
    }
    shaped = [result for result in results if result["label"] != UNSHAPED]
    return [
        row for result in shaped for row in compare(result, limits.get((result["model"], result["workers"]), math.inf))
    ]


def compare(result: dict[str, Any], limit: float = math.inf) -> list[Row]:
    """The methods of one result of `exchange.py`, with their predictions.

    Args:
        result: Of a link whose rate is its label.
        limit: Bits per second that the hosts themselves can reach.
    """
    ranks, work = result["workers"], Workload(tuple(MODELS[result["model"]]()))
    net = network(min(units.parse_rate(result["label"]), limit), ranks)
    where = f"{result['model']}, {ranks} hosts, {result['label']}"
    return [
        Row(method, where, stats["median"], exchange(method, work, net, ranks))
        for method, stats in result["methods"].items()
        if method != "auto"  # uses several compressors
    ]


def earlier(data: dict[str, Any]) -> list[Row]:
    """Measurements made before."""
    work = Workload(tuple(MODELS["resnet50"]()))
    rows = []
    limit = reached(work, 2, data["unshaped"] / 1e3)
    for each in data["rows"]:
        ranks, label = each["ranks"], each["label"]
        net = network(min(units.parse_rate(label), limit), ranks)
        for method in [name for name in each if name not in ("ranks", "label")]:
            seconds = exchange(method, work, net, ranks)
            rows.append(Row(method, f"{ranks} ranks, {label}", each[method] / 1e3, seconds))
    return rows


def horovod(data: dict[str, Any], latency: float) -> list[Row]:
    """Steps of Horovod's own benchmark. A ring through all GPUs uses the link of each server once."""
    rows = []
    for each in data["efficiency"]:
        model = each["model"]
        alone = data["batch"] / data["alone"][model]
        work = Workload(tuple(of_size(round(data["parameters"][model]))), BACKWARD * alone, (1 - BACKWARD) * alone)
        step = forecast("none", work, Network(data["bandwidth"], latency), each["ranks"]).step
        where = f"{each['ranks']} GPUs, {each['how']}"
        rows.append(Row(model, where, alone / each["measured"], step))
    return rows


def grace(data: dict[str, Any]) -> list[Row]:
    """Steps of GRACE's runs without compression, by the displayed speeds."""
    alone = data["batch"] / data["alone"][0]
    work = Workload(tuple(of_size(round(data["parameters"]))), BACKWARD * alone, (1 - BACKWARD) * alone)
    rows = []
    for each in data["none"]:
        ranks = each["ranks"]
        step = forecast("none", work, Network(each["bandwidth"], LATENCY), ranks).step
        where = f"{ranks} machines, {units.show_rate(each['bandwidth'])}, {each['how']}"
        rows.append(Row("none", where, ranks * data["batch"] / each["measured"][0], step))
    return rows


def grace_compressed(data: dict[str, Any]) -> list[Row]:
    """Steps of GRACE's runs with compression at 1 Gbit/s.

    Predicted as the measured steps at 25 Gbit/s and the additional time on the wire, so that kernels need not be known.
    Compared with both of GRACE's measurements: the displayed speeds, and the total of the log.
    """
    ranks, rows = 8, []
    for each in data["compressed"]:
        nbytes = each["bytes_per_parameter"] * data["parameters"]
        fast, slow = (getattr(Ring(Link.of_rate(rate), ranks), each["collective"])(nbytes) for rate in (25e9, 1e9))
        for i, count in enumerate(("displays", "total")):
            at25, at1 = (ranks * data["batch"] / each[at][i] for at in ("at_25gbit", "at_1gbit"))
            rows.append(Row(each["what"], f"8 machines, 1 Gbit/s, {count}", at1, at25 + slow - fast))
    return rows


def allreduces(data: dict[str, Any]) -> list[Row]:
    """Allreduces between more GPUs, predicted from the one between the fewest, by a ring's 2 (n - 1) / n."""
    rows = []
    for cluster, ((fewest, first), *others) in data["clusters"].items():
        one = Ring(Link(0.0, 1.0), fewest).allreduce(1.0)
        for ranks, milliseconds in others:
            predicted = first / 1e3 * Ring(Link(0.0, 1.0), ranks).allreduce(1.0) / one
            rows.append(Row(f"{ranks} GPUs", cluster, milliseconds / 1e3, predicted))
    return rows


def table(rows: Sequence[Row]) -> str:
    """A Markdown table with the errors of the predictions."""
    cells = [
        [
            row.where, row.what, f"{1e3 * row.measured:,.0f}", f"{1e3 * row.predicted:,.0f}",
            f"{100 * row.error:+.0f}%",
        ]
        for row in rows
    ]  # fmt: skip
    errors = [abs(row.error) for row in rows]
    within = sum(error <= 0.25 for error in errors)
    median = f"Median error {100 * statistics.median(errors):.0f}%, {within} of {len(rows)} within 25%."
    return markdown(["", "", "measured ms", "predicted ms", "error"], cells, words=2) + "\n\n" + median


def plot(rows: Sequence[Row], path: Path) -> None:
    """Plots predicted against measured seconds, with a colour for each method."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6.5, 6), layout="constrained")
    for name in dict.fromkeys(row.what for row in rows):
        rows_of_kind = [row for row in rows if row.what == name]
        measured, predicted = ([1e3 * value for value in each] for each in zip(*(row[2:] for row in rows_of_kind)))
        axes.plot(measured, predicted, "o", label=name)
    ends = [40, 12_000]
    axes.plot(ends, ends, "k-", linewidth=0.8)
    axes.fill_between(
        ends, [0.75 * e for e in ends], [1.25 * e for e in ends], color="gray", alpha=0.2, label="within 25%"
    )
    axes.set(xscale="log", yscale="log", xlabel="ms measured", ylabel="ms predicted", xlim=ends, ylim=ends)
    axes.legend(fontsize=7)
    axes.set_title("Exchange of one step's gradients between emulated hosts")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path, help="JSON files of exchange.py, and published.json")
    parser.add_argument("--out", type=Path, help="where the plot goes (default: none is drawn)")
    parser.add_argument("--page", type=Path, help="whose tables are replaced (default: they are printed only)")
    args = parser.parse_args()
    results = [json.loads(path.read_text(encoding="utf-8")) for path in args.results]
    measured = compare_all([result for result in results if result["benchmark"] == "exchange"])
    tables = {}
    if measured:
        tables["emulated hosts"] = table(measured)
        if args.out is not None:
            plot(measured, args.out / "scaling_measured.png")
    for data in (result for result in results if result["benchmark"] == "published"):
        tables |= {
            "earlier": table(earlier(data["earlier"])),
            "Horovod's benchmark, 0 us": table(horovod(data["horovod"], 0.0)),
            "Horovod's benchmark, 20 us": table(horovod(data["horovod"], 20e-6)),
            "GRACE, no compression": table(grace(data["grace"])),
            "GRACE, compressed": table(grace_compressed(data["grace"])),
            "1-bit Adam's allreduces": table(allreduces(data["onebit_adam"])),
        }
    show(tables, args.page)


if __name__ == "__main__":
    main()
