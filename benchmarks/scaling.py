"""Predicts weak scaling to 4,096 ranks: the efficiency of every algorithm on several networks, and which one pays off.

    python benchmarks/scaling.py --out docs/images --page docs/scaling.md

Runs only the cost model. Prints Markdown tables, and writes them into a page. See docs/scaling.md.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from page_tables import markdown, show

from hvd_compress import formats
from hvd_compress.cost import CostModel, KernelCost, Link, Ring, Scaled, TwoLevel, pays, weak_scaling
from hvd_compress.cost.defaults import CPU
from hvd_compress.tools import units
from hvd_compress.tools.models import MODELS
from hvd_compress.tools.network import Network
from hvd_compress.tools.prediction import forecast
from hvd_compress.tools.workload import Workload

# The algorithms in the plots.
SPECS = (
    "none", "fp16", "int8", "int4", "onebit", "topk:ratio=0.01", "block_topk:ratio=0.01", "randomk:ratio=0.01",
    "hybrid:ratio=0.01,bits=4", "powersgd:rank=2", "dgc:ratio=0.001",
)  # fmt: skip
RANKS = [2**power for power in range(13)]
# A step of ResNet-50 on a GPU; the backward pass takes two thirds of it.
BACKWARD, FORWARD = 0.12, 0.06
RATE, LATENCY = 10e9, 20e-6
RATES = (1e9, 10e9, 25e9, 100e9)
WORKERS, LOCAL = 8, Link.of_rate(100e9, 5e-6)
# A leaf switch has 32 hosts.
LEAF, OVERSUBSCRIPTION = 32, 4.0
# Kernels that take no time, to show the limits of the network alone.
FREE = dict.fromkeys((formats.parse(spec).name for spec in SPECS), KernelCost())


def networks(rate: float = RATE, kernels: Mapping[str, KernelCost] = FREE) -> dict[str, Network]:
    """The networks in the plots: flat ones, and those of hosts with eight workers."""
    flat = Network(rate, LATENCY, ranks_per_leaf=LEAF, oversubscription=OVERSUBSCRIPTION, kernels=kernels)
    two = dataclasses.replace(flat, shape="two-level", workers=WORKERS, local=LOCAL, hierarchical=True)
    return {
        "ring": flat,
        "tree": dataclasses.replace(flat, shape="tree"),
        "fat tree 4:1": dataclasses.replace(flat, shape="fat-tree"),
        "two levels, ring": two,
        "two levels, tree": dataclasses.replace(two, between="tree"),
        "two levels, fat tree 4:1": dataclasses.replace(two, between="fat-tree"),
    }


def scaled(spec: str, work: Workload, network: Network) -> list[Scaled]:
    """Weak scaling of one algorithm, for numbers of ranks that fill whole hosts."""
    workers = network.workers
    ranks = [n for n in RANKS if n % workers == 0]
    return weak_scaling(lambda n: forecast(spec, work, network, n).step, work.backward + work.rest, ranks)


def efficiencies(work: Workload, out: Path | None) -> str:
    """Plots efficiency against ranks, with a panel for each network; returns a table for the most ranks."""
    by_network = {name: {spec: scaled(spec, work, network) for spec in SPECS} for name, network in networks().items()}
    table = [[spec, *(f"{100 * lines[spec][-1].efficiency:.0f}%" for lines in by_network.values())] for spec in SPECS]
    if out is not None:
        draw_efficiencies(by_network, out / "scaling_efficiency.png")
    return markdown(["", *by_network], table)


def draw_efficiencies(by_network: Mapping[str, Mapping[str, Sequence[Scaled]]], path: Path) -> None:
    """Draws a panel for each network and a line for each algorithm."""
    figure, panels = plt.subplots(2, 3, figsize=(15, 8), sharey=True, layout="constrained")
    for axes, (name, lines) in zip(panels.flat, by_network.items()):
        for spec, rows in lines.items():
            style: dict[str, Any] = {"color": "black", "linewidth": 2.5} if spec == "none" else {}
            axes.plot([row.ranks for row in rows], [100 * row.efficiency for row in rows], label=spec, **style)
        against_ranks(axes)
        axes.set(title=name, ylim=(0, 102), ylabel="% of its speed alone")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize="small")
    alone = units.show_seconds(BACKWARD + FORWARD)
    figure.suptitle(f"ResNet-50, {alone} a step alone, {units.show_rate(RATE)}, kernels that take no time (predicted)")
    save(figure, path)


def patterns(out: Path | None) -> str:
    """Milliseconds of a 25 MiB bucket on the wire, for each collective."""
    nbytes, link = 25 * 2**20, Link.of_rate(RATE, LATENCY)
    ranks = [n for n in RANKS if n >= 2 * WORKERS]
    cases = [
        ("none", "allreduce"),
        *((spec, p) for spec in ("int8", "topk:ratio=0.01") for p in ("allgather", "scatter_reduce", "two_level")),
    ]

    def seconds(spec: str, pattern: str, n: int) -> float:
        two = TwoLevel(link, LOCAL, n // WORKERS, WORKERS)
        model = CostModel(link, n, two if pattern == "two_level" else Ring(link, n))
        return model.predict(spec, nbytes, pattern, form="alpha_beta").total

    milliseconds = {case: [1e3 * seconds(*case, n) for n in ranks] for case in cases}
    error_text = [ranks.index(n) for n in (16, 64, 512, 4096)]
    table = [
        [f"{spec}, {pattern}", *(f"{values[i]:,.1f}" for i in error_text)]
        for (spec, pattern), values in milliseconds.items()
    ]
    if out is not None:
        draw_patterns(milliseconds, ranks, out / "scaling_patterns.png")
    return markdown(["ms", *(f"{ranks[i]:,} ranks" for i in error_text)], table)


def draw_patterns(milliseconds: Mapping[tuple[str, str], Sequence[float]], ranks: Sequence[int], path: Path) -> None:
    """Draws a line for each collective, with a colour for each compressor."""
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    styles = {"allreduce": "-", "allgather": "--", "scatter_reduce": "-", "two_level": ":"}
    colors = {"none": "black", "int8": "tab:blue", "topk:ratio=0.01": "tab:orange"}
    for (spec, pattern), values in milliseconds.items():
        axes.plot(ranks, values, styles[pattern], color=colors[spec], label=f"{spec}, {pattern}")
    against_ranks(axes, ranks)
    axes.set(yscale="log", ylabel="ms on the wire", title=f"25 MiB of gradient, {units.show_rate(RATE)}")
    axes.legend(fontsize="small")
    save(figure, path)


def crossovers(work: Workload, name: str, kernels: Mapping[str, KernelCost]) -> str:
    """The numbers of ranks for which each compressor is faster than none, by the rate of the network."""
    table = []
    for spec in SPECS[1:]:
        cells = []
        for rate in RATES:
            network = networks(rate, kernels)[name]
            plain = scaled("none", work, network)
            cells.append(in_words(pays(plain, scaled(spec, work, network)), [row.ranks for row in plain]))
        table.append([spec, *cells])
    return markdown(["", *map(units.show_rate, RATES)], table, words=len(RATES) + 1)


def in_words(faster: Sequence[int], ranks: Sequence[int]) -> str:
    """The numbers of ranks as text, with successive ones of those that were tried as a range."""
    if not faster:
        return "never"
    places = [ranks.index(n) for n in faster]
    runs: list[list[int]] = []
    for place in places:
        if runs and runs[-1][1] == place - 1:
            runs[-1][1] = place
        else:
            runs.append([place, place])
    error_text = [
        f"{ranks[a]:,}" + ("" if a == b else " on" if b == len(ranks) - 1 else f" to {ranks[b]:,}") for a, b in runs
    ]
    return ", ".join(error_text)


def against_ranks(axes: Any, ranks: Sequence[int] = RANKS) -> None:
    """Sets up the axis of ranks."""
    axes.set(xscale="log", xlabel="ranks")
    axes.set_xticks(ranks, [f"{n:,}" for n in ranks], rotation=45)
    axes.xaxis.minorticks_off()
    axes.grid(True, which="both", alpha=0.2)


def save(figure: Any, path: Path) -> None:
    """Writes a plot."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the plots go (default: none is drawn)")
    parser.add_argument("--page", type=Path, help="whose tables are replaced (default: they are printed only)")
    args = parser.parse_args()
    work = Workload(tuple(MODELS["resnet50"]()), BACKWARD, FORWARD)
    tables = {
        "efficiency": efficiencies(work, args.out),
        "patterns": patterns(args.out),
        "pays on a ring, free kernels": crossovers(work, "ring", FREE),
        "pays on a ring, one core's kernels": crossovers(work, "ring", CPU.kernels),
        "pays on a fat tree, free kernels": crossovers(work, "fat tree 4:1", FREE),
        "pays in two levels, free kernels": crossovers(work, "two levels, ring", FREE),
    }
    show(tables, args.page)


if __name__ == "__main__":
    main()
