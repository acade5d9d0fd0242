"""Whether `CompressionGuard` leaves healthy trainings alone: the tasks of train.py with each compressor, guarded.

    horovodrun --gloo -np 2 python benchmarks/guard.py --json guard.json

A guard that acts in these trainings does so without need: they reach the metrics of docs/results.md without one.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common
import horovod.tensorflow as hvd
import tasks
import tensorflow as tf
from tensorflow import keras
from train import METHODS, TASKS

import hvd_compress as hvdc

ON_CPUS = [task for task in TASKS if task != "gpt2"]
# The guard watches compressed gradients of this package.
SPECS = [method for method in METHODS if not method.startswith("horovod") and method not in ("none", "fp16", "bf16")]


def train(task_name: str, spec: str, seed: int, times: int) -> tuple[int, list[str]]:
    """Trains `times` as many steps as uncompressed training needs; returns the steps, and what the guard did."""
    task, model, batches = tasks.begin(task_name, seed)
    optimizer = tasks.optimizer(task_name, "", spec)
    model.compile(optimizer, task.loss, jit_compile=False)

    def endless() -> Iterator[Any]:
        for x, y in batches:
            yield tf.nest.map_structure(tf.convert_to_tensor, x), tf.convert_to_tensor(y)

    every = TASKS[task_name].every
    steps = times * TASKS[task_name].steps // every * every
    callbacks = [hvdc.callbacks.BroadcastGlobalVariablesCallback(0), hvdc.callbacks.CompressionGuard()]
    model.fit(endless(), steps_per_epoch=every, epochs=steps // every, callbacks=callbacks, verbose=0)
    guard = optimizer._hvdc.reducer.guard
    return steps, [f"step {event.step}: {event.compressor} ({event.reason})" for event in guard.events]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=ON_CPUS, help="default: all but gpt2")
    parser.add_argument("--specs", nargs="+", metavar="SPEC", default=SPECS, help="default: all compressors")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="default: 0")
    parser.add_argument(
        "--times", type=int, default=3, help="the steps of uncompressed training (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    args = parser.parse_args()
    hvd.init()
    runs: list[dict[str, Any]] = []
    for task, spec, seed in ((task, spec, seed) for task in args.tasks for spec in args.specs for seed in args.seeds):
        start = time.perf_counter()
        steps, events = train(task, spec, seed, args.times)
        keras.backend.clear_session()
        if hvd.rank() == 0:
            runs.append({"task": task, "spec": spec, "seed": seed, "steps": steps, "events": events})
            seconds = time.perf_counter() - start
            print(f"{task}, {spec}, seed {seed}: {steps} steps, {seconds:.0f} s, {events or 'calm'}", flush=True)
    if hvd.rank() == 0:
        common.save(args.json, {"benchmark": "guard", "runs": runs})
        acted = sum(bool(run["events"]) for run in runs)
        print(f"the guard acted in {acted} of {len(runs)} trainings")


if __name__ == "__main__":
    main()
