"""Compares the progress that `auto` estimates with that of whole trainings.

    horovodrun -np 2 python benchmarks/progress_estimates.py --task gpt --json docs/results/progress_gpt.json

Trains with all compressors of `--trainings` among the candidates, and no compression in use. A training needs as many
times more steps with a compressor as its true progress is lower: the file, which benchmarks/train.py has written, has
the steps of whole trainings. The estimates need no link, so any machine will do.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common
import horovod.tensorflow as hvd
import tasks

COMPRESSORS = [
    "int8", "int4", "int2", "hadamard", "quantize:bits=2", "topk:ratio=0.05", "hybrid:ratio=0.05,bits=4",
    "hybrid:ratio=0.01,bits=4", "powersgd:rank=4", "powersgd:rank=2", "onebit",
]  # fmt: skip
STEPS = (49, 275)  # after the first 48 steps that are measured, and the first 24 of the second time


def true_progress(runs: Sequence[dict[str, Any]], kind: str, seeds: Sequence[int]) -> dict[str, float]:
    """By its spec, the steps of all trainings without compression over those with each compressor."""
    steps: dict[str, dict[int, int]] = {}
    prefix = f"{kind} " if kind else ""
    for run in runs:
        if run["method"].startswith(prefix):
            steps.setdefault(run["method"].removeprefix(prefix), {})[run["seed"]] = run["steps"]
    complete = {method: [of[seed] for seed in seeds] for method, of in steps.items() if set(seeds) <= set(of)}
    return {
        method: sum(complete["none"]) / sum(of)
        for method, of in complete.items()
        if method in COMPRESSORS and None not in of
    }


def estimates(task_name: str, kind: str, seed: int, specs: Sequence[str]) -> list[dict[str, float]]:
    """The progress of each candidate after each of `STEPS`, by its spec."""
    task, model, batches = tasks.begin(task_name, seed)
    # So high a limit lets only no compression be chosen, and all candidates be traced at once.
    spec = f"auto:candidates=({'|'.join(['none', *specs])}),min_progress=1,link=1gbit"
    optimizer = tasks.optimizer(task_name, kind, spec)
    step, found = tasks.training_step(task, model, optimizer), []
    for number in common.progress(range(1, STEPS[-1] + 1), f"seed {seed}", hvd.rank() == 0):
        step(*tasks.tensors(next(batches)))
        if number in STEPS:
            forecasts = optimizer.compression_report().buckets[0].auto.fixed
            progress = {forecast.compressor: forecast.progress for forecast in forecasts}
            found.append({spec: progress[spec] for spec in specs})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=sorted(tasks.TASKS), default="gpt", help="default: %(default)s")
    parser.add_argument("--optimizer", default="", help="as in the methods of benchmarks/train.py, such as lamb")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="default: 0 1 2")
    parser.add_argument("--trainings", type=Path, metavar="FILE", help="default: docs/results/train_TASK_1gbit.json")
    args = common.parse(parser)
    if args.optimizer and args.trainings is None:
        parser.error("--optimizer needs --trainings")
    hvd.init()
    path = args.trainings or Path(__file__).parents[1] / f"docs/results/train_{args.task}_1gbit.json"
    true = true_progress(json.loads(path.read_text(encoding="utf-8"))["runs"], args.optimizer, args.seeds)
    of_seeds = [estimates(args.task, args.optimizer, seed, list(true)) for seed in args.seeds]
    rows = [
        {"compressor": spec, "true": true[spec]}
        | {f"after {n}": [found[i][spec] for found in of_seeds] for i, n in enumerate(STEPS)}
        for spec in sorted(true, key=COMPRESSORS.index)
    ]
    if hvd.rank() == 0:
        result = {"benchmark": "progress_estimates", "task": args.task, "optimizer": args.optimizer}
        result |= {"seeds": args.seeds, "rows": rows}
        common.save(args.json, result)
        columns = ["", *(f"estimated after {n} steps" for n in STEPS), "true"]
        lines = [[row["compressor"], *(mean(row[f"after {n}"]) for n in STEPS), mean([row["true"]])] for row in rows]
        common.print_table(args.task, columns, lines)


def mean(values: Sequence[float]) -> str:
    return f"{sum(values) / len(values):.2f}"


if __name__ == "__main__":
    main()
