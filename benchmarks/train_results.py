"""Draws the results of train.py, and writes their tables into docs/results.md.

    python benchmarks/train_results.py docs/results/train_*.json --out docs/images --page docs/results.md

Tables and plots are of medians over the seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

import page_tables

try:
    import matplotlib
except ImportError:
    sys.exit("plots need matplotlib: pip install -e .[bench]")
matplotlib.use("Agg")
from matplotlib import pyplot as plt

Result = dict[str, Any]
CURVES = ["horovod none", "horovod fp16", "none", "int8", "int4", "quantize:bits=2", "hybrid:ratio=0.05,bits=4", "auto"]
COLUMNS = [
    "method", "seconds to the target", "times as fast as Horovod", "steps to the target", "MB to the target",
    "ms per step", "first step, s", "metric after equal steps", "difference",
]  # fmt: skip


def methods_of(result: Result) -> dict[str, list[Result]]:
    """The runs of each method."""
    names = dict.fromkeys(run["method"] for run in result["runs"])
    return {name: [run for run in result["runs"] if run["method"] == name] for name in names}


def median(runs: list[Result], key: str) -> float:
    """The median over seeds; infinite if half of them did not reach the target."""
    return statistics.median(math.inf if run[key] is None else run[key] for run in runs)


def baseline(method: str) -> str:
    """The method without compression that has the same optimizer."""
    kind = method.partition(" ")[0]
    return f"{kind} none" if kind in ("adam", "sgd") else "none"


def number(value: float, digits: int = 1) -> str:
    return f"{value:,.{digits}f}" if math.isfinite(value) else "not reached"


def table(result: Result) -> str:
    """One line for each method."""
    methods = methods_of(result)
    rows = []
    for name, runs in methods.items():
        seconds, steps = median(runs, "seconds"), [str(run["steps"] or "-") for run in runs]
        plain = methods.get(baseline(name))
        difference = "" if plain is None else f"{median(runs, 'metric') - median(plain, 'metric'):+.2f}"
        rows.append([
            name, number(seconds), f"{median(methods['horovod none'], 'seconds') / seconds:.1f}", " ".join(steps),
            number(median(runs, "bytes") / 1e6), number(median(runs, "step_ms"), 0),
            number(median(runs, "first_step")), number(median(runs, "metric"), 2), difference,
        ])  # fmt: skip
    return page_tables.markdown(COLUMNS, rows)


def title(result: Result) -> str:
    return f"{result['task']}, {result['hosts']} hosts, {result['rate']}"


def curves(result: Result, path: Path) -> None:
    """Plots the metric of a few methods against seconds and against bytes; the seed with the median time."""
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.5), sharey=True)
    methods = methods_of(result)
    for name in CURVES:
        runs = sorted(methods.get(name, []), key=lambda run: run["seconds"] or math.inf)
        if runs:
            points = runs[len(runs) // 2]["curve"][1:]
            for axis, x in zip(axes, (1, 2)):
                scale = 1e6 if x == 2 else 1
                axis.plot([point[x] / scale for point in points], [point[3] for point in points], label=name)
    for axis, label in zip(axes, ("seconds, first step included", "MB sent by each worker")):
        axis.axhline(result["target"], color="black", linewidth=0.6, linestyle=":")
        axis.set_xlabel(label)
        axis.set_xscale("log")
    axes[0].set_ylabel(result["runs"][0]["metric_name"])
    axes[1].legend(fontsize=8)
    figure.suptitle(title(result))
    save(figure, path)


def overview(results: list[Result], path: Path) -> None:
    """Plots gain against cost: how much sooner the target is reached, and the metric after equal steps."""
    names = list(dict.fromkeys(result["task"] for result in results))
    figure, axes = plt.subplots(1, len(names), figsize=(6.5 * len(names), 5.5), squeeze=False)
    markers = dict(zip(dict.fromkeys(result["rate"] for result in results), "osD^v"))
    for axis, task in zip(axes[0], names):
        colors: dict[str, Any] = {}
        for result in (result for result in results if result["task"] == task):
            methods = methods_of(result)
            plain = median(methods["horovod none"], "seconds")
            sign = 1 if "accuracy" in result["runs"][0]["metric_name"] else -1
            for name, runs in methods.items():
                seconds = median(runs, "seconds")
                if name == "horovod none" or baseline(name) not in methods or not math.isfinite(seconds):
                    continue
                color = colors.setdefault(name, plt.get_cmap("tab20").colors[len(colors) % 20])
                loss = sign * (median(runs, "metric") - median(methods[baseline(name)], "metric"))
                axis.scatter(plain / seconds, loss, color=color, marker=markers[result["rate"]])
        axis.axvline(1, color="black", linewidth=0.6)
        axis.axhline(0, color="black", linewidth=0.6)
        axis.set_xscale("log")
        axis.set_xlabel("times as fast to the target as Horovod without compression")
        axis.set_ylabel("metric after equal steps, against no compression (up is better)")
        axis.set_title(task)
        handles = [plt.Line2D([], [], color=color, marker="o", linestyle="", label=n) for n, color in colors.items()]
        handles += [plt.Line2D([], [], color="gray", marker=m, linestyle="", label=rate) for rate, m in markers.items()]
        axis.legend(handles=handles, fontsize=7)
    save(figure, path)


def save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path, help="JSON files of train.py")
    parser.add_argument("--out", type=Path, default=Path("."), help="where the plots go (default: here)")
    parser.add_argument("--page", type=Path, help="the page whose tables are replaced")
    args = parser.parse_args()
    results = [json.loads(path.read_text(encoding="utf-8")) for path in args.results]
    for result in results:
        curves(result, args.out / f"train_{result['task']}_{result['rate']}.png")
    overview(results, args.out / "train_overview.png")
    page_tables.show({f"{result['task']} {result['rate']}": table(result) for result in results}, args.page)


if __name__ == "__main__":
    main()
