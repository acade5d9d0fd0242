"""Draws the results of train.py, and writes their tables into docs/results.md.

    python benchmarks/train_results.py docs/results/*.json --out docs/images --page docs/results.md

Tables and plots are of medians over the seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

import page_tables
from netlab import BURST
from plot import finish, plt

from hvd_compress.common.units import parse_rate

Result = dict[str, Any]
CURVES = ["horovod none", "horovod fp16", "none", "int8", "int4", "quantize:bits=2", "hybrid:ratio=0.05,bits=4", "auto"]
SHOWN = [
    "horovod fp16", "none", "int8", "int4", "quantize:bits=2", "hadamard", "onebit", "hybrid:ratio=0.05,bits=4",
    "hybrid:ratio=0.01,bits=4", "powersgd:rank=4", "auto",
]  # fmt: skip
GAIN = "times as fast as Horovod"
COLUMNS = [
    "method", "seconds to the target", GAIN, "steps to the target", "MB to the target", "ms per step", "first step, s",
    "metric after equal steps", "difference",
]  # fmt: skip


def methods_of(result: Result) -> dict[str, list[Result]]:
    """The runs of each method, in the order of their seeds."""
    runs = sorted(result["runs"], key=lambda run: run["seed"])
    names = dict.fromkeys(run["method"] for run in runs)
    return {name: [run for run in runs if run["method"] == name] for name in names}


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
    horovod = methods.get("horovod none")
    rows = []
    for name, runs in methods.items():
        seconds, steps = median(runs, "seconds"), [str(run["steps"] or "-") for run in runs]
        # Horovod was measured with the task's usual optimizer only.
        times = median(horovod, "seconds") / seconds if horovod and baseline(name) == "none" else math.nan
        gain = f"{times:.1f}" if math.isfinite(times) and times else "-"
        plain = methods.get(baseline(name))
        difference = "" if plain is None else f"{median(runs, 'metric') - median(plain, 'metric'):+.2f}"
        rows.append([
            name, number(seconds), gain, " ".join(steps),
            number(median(runs, "bytes") / 1e6), number(median(runs, "step_ms"), 0),
            number(median(runs, "first_step")), number(median(runs, "metric"), 2), difference,
        ])  # fmt: skip
    shown = [i for i, column in enumerate(COLUMNS) if column != GAIN or horovod]
    return page_tables.markdown([COLUMNS[i] for i in shown], [[row[i] for i in shown] for row in rows])


def title(result: Result) -> str:
    then = "{} after {} steps".format(*result["change"]) if result.get("change") else ""
    return ", ".join(
        filter(None, [result["task"], f"{result['hosts']} hosts", result["rate"], *_other_settings(result), then])
    )


def _other_settings(result: Result) -> list[str]:
    """The delay and loss of packets, where there are any, and the burst if it is not the usual one."""
    delay, loss = result.get("delay"), result.get("loss")
    burst = result.get("burst", BURST)
    return [
        *([f"{delay * 1e3:g}ms"] if delay else []),
        *([f"{loss:.1%} lost"] if loss else []),
        *([f"bursts of {burst}"] if burst != BURST else []),
    ]


def link_of(result: Result) -> str:
    """The rate and other settings, and of a link that changes the other rate and the step."""
    return "_".join([result["rate"], *_other_settings(result), *map(str, result.get("change") or [])]).replace(" ", "_")


def training_of(result: Result) -> str:
    """The task and the link, such as "gpt, 1gbit"."""
    return f"{result['task']}, {link_of(result)}"


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
    finish(figure, path)


def overview(results: list[Result], path: Path) -> None:
    """Plots, for each task, how much sooner the target is reached on each link, and the metric after equal steps."""
    tasks = list(dict.fromkeys(result["task"] for result in results))
    rates = list(dict.fromkeys(result["rate"] for result in results))
    figure, axes = plt.subplots(len(tasks), 2, figsize=(11, 3.6 * len(tasks)), squeeze=False, sharey="row")
    for (gain, cost), task in zip(axes, tasks):
        some = [result for result in results if result["task"] == task]
        shown = [name for name in SHOWN if all(name in methods_of(result) for result in some)]
        plain = [run["metric"] for result in some for run in methods_of(result)["horovod none"]]
        cost.axvspan(min(plain), max(plain), color="0.9", label="Horovod without compression")
        for result in some:
            methods, color = methods_of(result), f"C{rates.index(result['rate'])}"
            horovod = median(methods["horovod none"], "seconds")
            times = [horovod / median(methods[name], "seconds") for name in shown]  # 0 if not reached
            gain.scatter(times, shown, color=color, label=result["rate"], zorder=2)
            points = [(run["metric"], name) for name in shown for run in methods[name]]
            cost.scatter(*zip(*points), color=color, s=12, alpha=0.6, zorder=2)
        gain.axvline(1, color="black", linewidth=0.6)
        gain.set_xscale("log")
        gain.set_xticks([0.5, 1, 2, 4, 8, 16], ["0.5", "1", "2", "4", "8", "16"])
        gain.minorticks_off()
        gain.set_xlabel("times as fast to the target as Horovod without compression")
        gain.set_title(f"{task}: gain")
        gain.legend(fontsize=8)
        gain.invert_yaxis()
        steps, name = some[0]["steps"], some[0]["runs"][0]["metric_name"]
        cost.set_xlabel(f"{name}, after {steps} steps")
        cost.set_title(f"{task}: cost")
        cost.legend(fontsize=8)
        for axis in (gain, cost):
            axis.grid(axis="y", linewidth=0.4)
    finish(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path, help="JSON files; those of other benchmarks are left out")
    parser.add_argument("--out", type=Path, default=Path("."), help="where the plots go (default: here)")
    parser.add_argument("--page", type=Path, help="the page whose tables are replaced")
    args = parser.parse_args()
    results = [json.loads(path.read_text(encoding="utf-8")) for path in args.results]
    results = [result for result in results if result["benchmark"] == "train"]
    results.sort(key=lambda result: parse_rate(result["rate"]))
    for result in results:
        curves(result, args.out / f"train_{result['task']}_{link_of(result)}.png")
    steady = [r for r in results if not (r.get("change") or _other_settings(r))]
    steady = [r for r in steady if "horovod none" in methods_of(r)]
    if steady:
        overview(steady, args.out / "train_overview.png")
    page_tables.show({f"{result['task']} {link_of(result)}": table(result) for result in results}, args.page)


if __name__ == "__main__":
    main()
