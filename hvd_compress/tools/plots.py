"""The plots of `plan`, `bench` and `tune`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from . import console, units
from .network import Network
from .prediction import forecast
from .search import BASELINE, Outcome
from .workload import Workload

_MOST_RANKS = 4096
_DPI = 120


def _plot_file(text: str) -> Path:
    """As `console.output_file`; ValueError also if plots cannot be drawn into a file of this name."""
    path = console.output_file(text)
    with console.needed_by("--plot"):
        from matplotlib.backend_bases import FigureCanvasBase

    known = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix[1:].lower() not in known:
        raise ValueError(f"{str(path)!r} does not end in one of .{', .'.join(known)}")
    return path


PLOT_FILE = units.Parsed("path", _plot_file)


def plan(path: Path, work: Workload, network: Network, specs: Sequence[str], ranks: int) -> None:
    """Step time against bandwidth between `ranks`, and against ranks up to 4,096, a line per compressor.

    If a step's time on a single rank is known, the efficiency of each rank is drawn, too.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    rates = network.rate * np.logspace(-2, 2, 41)
    step = network.workers if network.shape == "two-level" else 1
    counts = sorted({max(2 * step, step * round(2**power / step)) for power in range(1, 13)})
    counts = [count for count in counts if count <= _MOST_RANKS]
    alone = work.backward + work.rest
    columns, width = (3, 18) if alone else (2, 13)
    figure = Figure(figsize=(width, 5), layout="constrained")
    left, right, *rest = figure.subplots(1, columns)
    for i, spec in enumerate(specs):
        style: dict[str, Any] = {"color": colormaps["tab20"](i % 20)}
        style |= {"color": "black", "linewidth": 2.5} if spec == "none" else {}
        left.plot(rates / 1e9, [1e3 * forecast(spec, work, network, ranks, rate).step for rate in rates], **style)
        steps = np.array([forecast(spec, work, network, count).step for count in counts])
        right.plot(counts, 1e3 * steps, label=spec, **style)
        for axes in rest:
            axes.plot(counts, 100 * alone / steps, **style)
    left.axvline(network.rate / 1e9, color="gray", linestyle=":")
    left.set(xlabel="Gbit/s", title=f"{ranks} ranks")
    right.set(xlabel="ranks", title=units.show_rate(network.rate))
    for axes in (left, right):
        axes.set(xscale="log", yscale="log", ylabel="ms per step")
    for axes in rest:
        axes.set(xscale="log", xlabel="ranks", title="efficiency", ylim=(0, 102), ylabel="% of its speed alone")
    for axes in (right, *rest):
        axes.set_xticks(counts, [f"{count:,}" for count in counts], rotation=45)
        axes.xaxis.minorticks_off()
    for axes in (left, right, *rest):
        axes.grid(True, which="both", alpha=0.2)
    figure.legend(*right.get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    backward = units.show_seconds(work.backward)
    figure.suptitle(f"{units.show_count(work.numel)} parameters, backward pass {backward} (predicted)")
    with console.writing(path):
        figure.savefig(path, dpi=_DPI)


def bench(path: Path, result: Mapping[str, Any]) -> None:
    """Measured totals, a bar per compressor with its quartiles, and what was predicted."""
    from matplotlib.figure import Figure

    rows = result["compressors"]
    names = [row["compressor"] for row in rows]
    low, totals, high = (np.array([1e3 * row["total"][key] for row in rows]) for key in ("low", "median", "high"))
    figure = Figure(figsize=(9, 0.5 * len(rows) + 1.5), layout="constrained")
    axes = figure.subplots()
    colors = ["gray" if name == "none" else "tab:blue" for name in names]
    bars = axes.barh(names, totals, xerr=[totals - low, high - totals], color=colors)
    axes.bar_label(bars, [f"{total:.3g} ms" for total in totals], padding=4)
    axes.plot([1e3 * row["predicted"] for row in rows], names, "k|", markersize=14, label="predicted")
    axes.legend()
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlabel("ms per exchange, median and quartiles")
    axes.set_title(f"{units.show_count(result['params'])} parameters, {result['ranks']} ranks")
    with console.writing(path):
        figure.savefig(path, dpi=_DPI)


def tune(path: Path, tried: Sequence[Outcome], best: Outcome, metric: str) -> None:
    """The seconds for the same progress and the metric of each setting that was timed, by verdict."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    shown = [outcome for outcome in tried if outcome.metric is not None and np.isfinite(outcome.step)]
    for verdict in dict.fromkeys(outcome.verdict for outcome in shown):
        some = [outcome for outcome in shown if outcome.verdict == verdict]
        axes.plot([1e3 * one.cost for one in some], [one.metric or 0.0 for one in some], "o", label=verdict)
    for outcome in shown:
        if outcome.verdict == "ok":
            where = (1e3 * outcome.cost, outcome.metric)
            axes.annotate(
                outcome.setting.title, where, (4, 4), textcoords="offset points", fontsize="x-small",
                fontweight="bold" if outcome is best or outcome.setting == BASELINE else "normal",
            )  # fmt: skip
    axes.set(xscale="log", xlabel="ms for the progress of an uncompressed step", ylabel=metric)
    axes.set_title(f"{len(tried)} settings, best: {best.setting.title}")
    axes.grid(True, which="both", alpha=0.2)
    axes.legend()
    with console.writing(path):
        figure.savefig(path, dpi=_DPI)
