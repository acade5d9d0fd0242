"""What a choice of compressors that changes during training could gain at most.

    python benchmarks/switching.py docs/results/train_*.json --page docs/results.md

The curves of trainings with fixed compressors show how long each of them takes from one level of the validation loss to
the next. An oracle takes the fastest one from each level to the next, and pays nothing for a switch. It also profits
from the noise of each curve, so a real choice is hardly faster. The time to the first level, which includes the first
step, is that of one compressor. Only losses are smooth enough for this: an accuracy on 360 images jumps.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import page_tables
from train_results import methods_of, training_of

LEVELS = 12
TASKS = ("gpt", "mlp")
# With another optimizer, or not of this package.
LEFT_OUT = ("horovod", "sgd", "adam", "OneBitAdam", "auto")


def seconds_at(curve: list[list[float]], levels: np.ndarray) -> np.ndarray:
    """When a training first reaches each of the losses `levels`; infinity for those that it does not reach.

    `curve` has rows of steps, seconds, bytes and loss. Between two evaluations, the loss falls along a line.
    """
    points = np.array(curve)
    lowest, seconds = np.minimum.accumulate(points[:, 3]), points[:, 1]
    at = np.interp(-levels, -lowest + 1e-12 * np.arange(len(lowest)), seconds)
    return np.where(levels >= lowest[-1], at, np.inf)


def bound(result: dict[str, Any]) -> tuple[str, float, float]:
    """The fastest fixed compressor, its seconds to the target, and those of the oracle; means over the seeds."""
    methods = {name: runs for name, runs in methods_of(result).items() if not name.startswith(LEFT_OUT)}
    begin = max(run["curve"][1][3] for runs in methods.values() for run in runs)  # the first evaluation
    levels = np.linspace(begin, result["target"], LEVELS)
    means = {name: np.mean([seconds_at(run["curve"], levels) for run in runs], 0) for name, runs in methods.items()}
    reached = {name: seconds for name, seconds in means.items() if np.isfinite(seconds).all()}
    best = min(reached, key=lambda name: reached[name][-1])
    parts = np.array([np.diff(seconds, prepend=0.0) for seconds in reached.values()])
    return best, float(reached[best][-1]), float(parts.min(0).sum())


def table(results: list[dict[str, Any]]) -> str:
    """One line for each task and link."""
    rows = []
    for result in results:
        if result["task"] in TASKS and "none" in methods_of(result) and not result.get("change"):
            best, fixed, oracle = bound(result)
            rows.append([training_of(result), best, f"{fixed:.1f}", f"{oracle:.1f}"])
    columns = ["training", "fastest fixed compressor", "its seconds", "seconds of the oracle"]
    return page_tables.markdown(columns, sorted(rows), words=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path, help="JSON files of train.py")
    parser.add_argument("--page", type=Path, help="the page whose table is replaced")
    args = parser.parse_args()
    results = [json.loads(path.read_text(encoding="utf-8")) for path in args.results]
    page_tables.show({"switching": table(results)}, args.page)


if __name__ == "__main__":
    main()
