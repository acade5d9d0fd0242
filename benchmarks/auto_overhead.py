"""Compares steps of `auto`, once its choice is made, with those of a fixed compressor.

    sudo python benchmarks/netlab.py --hosts 2 --rate 1gbit -- python benchmarks/auto_overhead.py --fixed int4

Two trainings of the same task in the same processes take turns, ten steps each. Name the compressor that `auto` chooses
as `--fixed`: the last line printed says which ones these are.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import tasks
import tensorflow as tf

from hvd_compress.tools.timed_exchange import barrier

STEPS = 10  # of a turn
FIRST_STEPS = 60  # with their traces, and the first trials of `auto`


def new_training(task_name: str, spec: str) -> tuple[Callable[[int], float], Any]:
    """A function that trains some steps and returns the ms of each; and the optimizer."""
    task, model, batches = tasks.begin(task_name, 0)
    optimizer = tasks.optimizer(task_name, "", spec)
    step = tasks.training_step(task, model, optimizer)

    def train(steps: int) -> float:
        chunk = [tasks.tensors(next(batches)) for _ in range(steps)]
        barrier()
        start = time.perf_counter()
        for x, y in chunk:
            loss = step(x, y)
        float(loss)
        return (time.perf_counter() - start) / steps * 1e3

    return train, optimizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=sorted(tasks.TASKS), default="gpt", help="default: %(default)s")
    parser.add_argument("--fixed", default="int4", metavar="SPEC", help="default: %(default)s")
    parser.add_argument("--turns", type=int, default=24, help="default: %(default)s")
    args = parser.parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    hvd.init()
    (fixed, _), (auto, optimizer) = (new_training(args.task, spec) for spec in (args.fixed, "auto"))
    for train in (fixed, auto):
        train(FIRST_STEPS)
    turns = []
    for turn in range(args.turns):
        first, second = (fixed, auto) if turn % 2 else (auto, fixed)
        times = {first: first(STEPS), second: second(STEPS)}
        turns.append((times[fixed], times[auto]))
    if hvd.rank() == 0:
        medians = [statistics.median(times) for times in zip(*turns)]
        ratio = statistics.median(of_auto / of_fixed for of_fixed, of_auto in turns)
        print(f"{args.fixed} {medians[0]:.1f} ms, auto {medians[1]:.1f} ms; auto takes {ratio:.3f} times as long")
        print("auto:", ", ".join(bucket.chosen for bucket in optimizer.compression_report().buckets), flush=True)
    barrier()


if __name__ == "__main__":
    main()
