"""Draws the results of exchange.py and kernels.py, and prints them as Markdown tables.

    python benchmarks/plot.py docs/results/*.json --out docs/images

train_results.py does the same for train.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

try:
    import matplotlib
except ImportError:
    sys.exit("plots need matplotlib: pip install -e .[bench]")
matplotlib.use("Agg")
from matplotlib import pyplot as plt

Result = dict[str, Any]


def exchange(results: list[Result], out: Path) -> None:
    """Plots the speedup over stock Horovod, with a group of bars for each link."""
    results = sorted(results, key=lambda r: (r["workers"], -r["methods"]["horovod none"]["median"]))
    everything = list(dict.fromkeys(name for r in results for name in r["methods"]))
    methods = [name for name in everything if name != "horovod none"]
    figure, axes = plt.subplots(figsize=(11, 5))
    width = 0.8 / len(methods)
    colors = plt.get_cmap("tab20").colors
    for m, name in enumerate(methods):
        ratios = [ratio(r, name) for r in results]
        places = [i + (m - len(methods) / 2 + 0.5) * width for i in range(len(results))]
        bars = axes.bar(places, ratios, width, label=name, color=colors[m % 20])
        axes.bar_label(bars, [f"{r:.1f}" if r else "" for r in ratios], fontsize=6, rotation=90, padding=2)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_yscale("log")
    axes.margins(y=0.12)
    axes.set_xticks(range(len(results)), [f"{r['workers']} hosts, {r['label']}" for r in results])
    axes.set_ylabel("times faster than Horovod without compression")
    axes.set_title(f"Exchange of one step's gradients, {results[0]['model']}")
    axes.legend(fontsize=7, ncols=2)
    finish(figure, out / f"exchange_{results[0]['model']}.png")
    print(f"\n### {results[0]['model']}: ms, median (times faster than Horovod without compression)\n")
    print("| method | " + " | ".join(f"{r['workers']} hosts, {r['label']}" for r in results) + " | MB sent |")
    print("|---|" + "---:|" * (len(results) + 1))
    for name in everything:
        cells = []
        for r in results:
            ms = r["methods"].get(name, {}).get("median", 0.0) * 1e3
            cells.append(f"{ms:,.0f} ({ratio(r, name):.1f}x)" if ms else "")
        sent = next(r["methods"][name]["sent"] for r in results if name in r["methods"]) / 1e6
        print(f"| {name} | " + " | ".join(cells) + f" | {sent:,.2f} |")


def ratio(result: Result, name: str) -> float:
    """The speedup of a method over stock Horovod; 0 if it was not measured."""
    if name not in result["methods"]:
        return 0.0
    return result["methods"]["horovod none"]["median"] / result["methods"][name]["median"]


def kernels(results: list[Result], out: Path) -> None:
    """Plots the times of kernels as multiples of x + 1, with bars for each version of TensorFlow."""
    names = [name for name in results[0]["kernels"] if name != "x + 1"]
    figure, axes = plt.subplots(figsize=(9, 6))
    height = 0.8 / len(results)
    print("\n### kernels: times `x + 1`\n")
    versions = [r["versions"]["tensorflow"] for r in results]
    ratios = [[r["kernels"][n]["median"] / r["kernels"]["x + 1"]["median"] for n in names] for r in results]
    for i, (version, row) in enumerate(zip(versions, ratios)):
        places = [n + (i - len(results) / 2 + 0.5) * height for n in range(len(names))]
        bars = axes.barh(places, row, height, label=f"TensorFlow {version}")
        axes.bar_label(bars, [f"{ratio:.1f}" for ratio in row], fontsize=7, padding=2)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_xlabel("time, as a multiple of x + 1 on the same data")
    axes.legend()
    finish(figure, out / "kernels.png")
    print("| kernel | " + " | ".join(f"TensorFlow {v}" for v in versions) + " |")
    print("|---|" + "---:|" * len(versions))
    for n, name in enumerate(names):
        print(f"| {name} | " + " | ".join(f"{row[n]:.2f}" for row in ratios) + " |")


def finish(figure: Any, path: Path) -> None:
    """Writes a figure."""
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path, help="JSON files of exchange.py, kernels.py")
    parser.add_argument("--out", type=Path, default=Path("."), help="where the plots go (default: here)")
    args = parser.parse_args()
    results = [json.loads(path.read_text()) for path in args.results]
    models = dict.fromkeys(r["model"] for r in results if r["benchmark"] == "exchange")
    for model in models:
        exchange([r for r in results if r["benchmark"] == "exchange" and r["model"] == model], args.out)
    of_kernels = [r for r in results if r["benchmark"] == "kernels"]
    if of_kernels:
        kernels(of_kernels, args.out)


if __name__ == "__main__":
    main()
