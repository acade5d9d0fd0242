"""One worker of one training of train.py, which starts it; the first worker prints the result as JSON."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tasks
import tensorflow as tf
from custom_loop import tf_variables

from hvd_compress.tools.timed_exchange import barrier

HOROVOD = {"horovod none": "none", "horovod fp16": "fp16"}
PATIENCE = 3  # times the steps of a training without compression, then the target counts as not reached


def train(
    task_name: str, method: str, seed: int, target: float, num_steps: int, every: int, decays: bool
) -> dict[str, Any]:
    """Trains until the target is reached and `num_steps` are done, and returns times, bytes and metrics."""
    task, model, batches = tasks.begin(task_name, seed)
    named, _, options = method.partition(" + ")
    kind, _, spec = ("", "", None) if method in HOROVOD else named.rpartition(" ")
    optimizer = tasks.optimizer(task_name, kind, spec, options, num_steps if decays else 0)
    optimizer.build(model.trainable_variables)
    variables = model.trainable_variables

    @tf.function
    def step(x: Any, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Trains one step; returns the loss and the bytes of stock Horovod."""
        with tf.GradientTape() as tape:
            loss = task.loss(y, model(x, training=True))
        if method in HOROVOD:
            tape = hvd.DistributedGradientTape(tape, compression=getattr(hvd.Compression, HOROVOD[method]))
        gradients = tape.gradient(loss, tf_variables(variables))
        optimizer.apply_gradients(zip(gradients, variables))
        return loss, stock_bytes(gradients, 2 if method == "horovod fp16" else 4)

    def metric_of_all() -> float:
        """The mean over the workers, so that all stop in the same step; with local steps, of synchronized weights."""
        rounds = None if method in HOROVOD or spec == "OneBitAdam" else optimizer._hvdc.rounds
        if rounds is not None:
            rounds.show_synchronized()
        metric = tf.constant(task.metric(model), tf.float64)
        if rounds is not None:
            rounds.show_own()
        return float(hvd.allreduce(metric, op=hvd.Average, name="metric").numpy())

    sign = 1 if task.higher_is_better else -1
    seconds = sent = first_step = 0.0
    curve = [[0, 0.0, 0, round(metric_of_all(), 5)]]
    reached: dict[str, Any] = {"seconds": None, "steps": None, "bytes": None}
    most_steps = num_steps if decays else PATIENCE * num_steps
    for steps in range(every, most_steps + 1, every):
        chunk = [next(batches) for _ in range(every)]
        barrier()
        start = time.perf_counter()
        for x, y in chunk:
            loss, stock = step(tf.nest.map_structure(tf.convert_to_tensor, x), tf.convert_to_tensor(y))
            if not first_step:
                float(loss)
                first_step = time.perf_counter() - start
        float(loss)  # waits for a GPU
        seconds += time.perf_counter() - start
        sent += every * (float(stock) if method in HOROVOD else optimizer.bytes_sent()[0])
        metric = metric_of_all()
        if str(steps) == os.environ.get("CHANGE_AT"):
            change_rate(Path(os.environ["CHANGE_FLAG"]))
        curve.append([steps, round(seconds, 3), int(sent), round(metric, 5)])
        if reached["seconds"] is None and sign * metric >= sign * target:
            reached = {"seconds": round(seconds, 3), "steps": steps, "bytes": int(sent)}
        if steps >= num_steps and (reached["seconds"] is not None or not np.isfinite(metric)):
            break
    # Steps up to the first evaluation are slower, and do not count; in the shortest trainings there are no others.
    last, begin = curve[-1], curve[1] if len(curve) > 2 else [1, first_step]
    return {
        **reached,
        "first_step": round(first_step, 3),
        "step_ms": round((last[1] - begin[1]) / (last[0] - begin[0]) * 1e3, 2),
        "metric": next((point[3] for point in curve if point[0] >= num_steps), curve[-1][3]),
        "metric_name": task.metric_name,
        "chosen": chosen(optimizer) if spec == "auto" else "",
        "curve": curve,
    }


def change_rate(flag: Path) -> None:
    """Lets the benchmark change the rate of the links, and waits for it."""
    if hvd.rank() == 0:
        flag.touch()
        while flag.exists():
            time.sleep(0.01)
    barrier()


def stock_bytes(gradients: list[Any], itemsize: int) -> tf.Tensor:
    """Bytes that each rank sends with stock Horovod: dense gradients in a ring allreduce, slices in an allgather."""
    n = hvd.size()
    dense = sum(g.shape.num_elements() for g in gradients if not isinstance(g, tf.IndexedSlices))
    nbytes = tf.constant(2 * (n - 1) / n * dense * itemsize, tf.float64)
    for g in gradients:
        if isinstance(g, tf.IndexedSlices):
            row = (g.values.shape[-1] * itemsize + 8) * (n - 1)  # the row's number has 8 bytes
            nbytes += tf.cast(tf.size(g.indices, tf.int64), tf.float64) * row
    return nbytes


def chosen(optimizer: Any) -> str:
    """What `auto` uses at the end: the compressor of each bucket."""
    return ", ".join(dict.fromkeys(bucket.chosen for bucket in optimizer.compression_report().buckets))


def main() -> None:
    task, method, seed, target, steps, every, decays = sys.argv[1:]
    cores = len(os.sched_getaffinity(0))
    tf.config.threading.set_intra_op_parallelism_threads(cores)
    hvd.init()
    result = train(task, method, int(seed), float(target), int(steps), int(every), decays == "True")
    if hvd.rank() == 0:
        print("RESULT " + json.dumps(result), flush=True)
    barrier()


if __name__ == "__main__":
    main()
