#!/usr/bin/env python3
"""Makes the runs in tests/data/runs: a healthy one, and one for each fault that `hvd-compress doctor` knows.

    python tests/data/make_runs.py            all of them, each under horovodrun -np 2
    python tests/data/make_runs.py slow_rank  one

Each trains a small network on data that can be learned, with one thing wrong.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent

# "ranks" and "buckets": of how many the files are kept, as many as the rules and the pages need.
HEALTHY = {
    "compression": "int8", "learning_rate": 0.1, "width": 512, "batch": 256, "steps": 60, "ranks": 2, "buckets": 0,
}  # fmt: skip
# What is wrong with each; the rest is as in a healthy run.
RUNS = {
    "healthy": {"steps": 150, "buckets": 1},
    "healthy_auto": {"compression": "auto", "steps": 100, "ranks": 1, "buckets": 1},
    "healthy_none": {"compression": "none"},
    "diverges": {
        "learning_rate": 30.0,
        "compression": "topk:ratio=0.001",
        "error_feedback": False,
        "ranks": 1,
        "buckets": 1,
    },
    "unstable": {
        "learning_rate": 3.0,
        "momentum": 0.9,
        "activation": "tanh",
        "width": 64,
        "steps": 80,
        "ranks": 1,
    },
    "oscillates": {"learning_rate": 3.0, "batch": 64, "steps": 120, "ranks": 1},
    "residual": {"compression": "topk:ratio=0.0005", "learning_rate": 0.01, "steps": 150, "ranks": 1},
    "dominates": {"compression": "none", "width": 2048, "batch": 4},
    # Its first messages pass faster than the link goes on to be: what was measured at the beginning is too good.
    "slow_link": {"compression": "none", "width": 256, "batch": 64, "steps": 40, "rates": ("10mbit",)},
    "costs": {"compression": "topk:ratio=0.01", "width": 2048, "batch": 4},
    "loses_progress": {"compression": "hybrid:ratio=0.005,bits=4", "width": 1024, "ranks": 1, "buckets": 3},
    "slow_rank": {"sleep": 0.06, "buckets": 3},
    "flapping": {"compression": "auto", "flap": True, "steps": 80, "ranks": 1, "buckets": 1},
    # The link changes every few seconds.
    "link_changes": {
        "compression": "auto",
        "width": 1400,
        "batch": 16,
        "steps": 200,
        "rates": ("100mbit", "unshaped"),
        "ranks": 1,
        "buckets": 1,
    },
    # A compressor that is no contraction, with a residual.
    "guarded": {
        "compression": "randomk:ratio=0.45,unbiased=true",
        "error_feedback": True,
        "guard": True,
        "ranks": 1,
    },
    "healthy_rounds": {
        "local_steps": 4,
        "outer": "nesterov:lr=0.7,momentum=0.9",
        "batch_norm": True,
        "learning_rate": 0.02,
        "steps": 160,
    },
    # More and more labels are others on rank 1.
    "drifts": {"local_steps": 4, "skew": True, "learning_rate": 0.02, "steps": 160},
    "outer_step": {"local_steps": 4, "outer": "nesterov:lr=12,momentum=0.9", "learning_rate": 0.02, "steps": 160},
    # Rank 1 has inputs of another scale.
    "statistics": {"local_steps": 8, "scale": 8.0, "batch_norm": True, "learning_rate": 0.02, "steps": 160},
    "small_buckets": {"bucket_bytes": 4096, "steps": 40, "ranks": 1},
    "memory": {"leak": 2_000_000, "sleep_all": 0.02, "steps": 100, "ranks": 1},
}


def train(name: str, directory: str) -> None:
    """One rank of one run."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    sys.path.insert(0, str(ROOT))
    import horovod.tensorflow as hvd
    import numpy as np
    import tensorflow as tf
    from tensorflow import keras

    import hvd_compress as hvdc
    from hvd_compress.common import tracing

    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    fault = {**HEALTHY, **RUNS[name]}
    keras.utils.set_random_seed(7)
    model = keras.Sequential(
        [
            keras.layers.Input([256]),
            keras.layers.Dense(fault["width"], activation=fault.get("activation", "relu")),
            *([keras.layers.BatchNormalization()] if fault.get("batch_norm") else []),
            keras.layers.Dense(fault["width"], activation=fault.get("activation", "relu")),
            keras.layers.Dense(10),
        ]
    )
    names = ("bucket_bytes", "error_feedback", "local_steps", "outer")
    extra = {key: fault[key] for key in names if key in fault}
    optimizer = hvdc.DistributedOptimizer(
        keras.optimizers.SGD(fault["learning_rate"], fault.get("momentum", 0.0)),
        compression=fault["compression"],
        **extra,
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, jit_compile=False)

    teacher = np.random.default_rng(0).standard_normal((256, 10)).astype(np.float32)
    random = np.random.default_rng(hvd.rank() + 1)
    kept = []

    def batches():
        for step in range(fault["steps"]):
            x = random.standard_normal((fault["batch"], 256)).astype(np.float32)
            time.sleep(fault.get("sleep", 0.0) if hvd.rank() == 1 else fault.get("sleep_all", 0.0))
            if fault.get("leak"):
                kept.append(np.ones(fault["leak"], np.uint8))
            labels = (x @ teacher).argmax(1)
            if hvd.rank() == 1:
                x *= fault.get("scale", 1.0)
                if fault.get("skew"):
                    labels[: fault["batch"] * step // fault["steps"]] = 0
            yield x, labels

    tracing.can_forget_traces = lambda: False  # all candidates are traced at once, for `Flap`

    class Flap(keras.callbacks.Callback):
        """As if two candidates were equally good, and noise decided between them."""

        def on_train_batch_end(self, batch, logs=None):
            if fault.get("flap") and batch % 12 == 11:
                (plan,) = optimizer._hvdc.reducer.plans.values()
                selector = plan.auto
                selector.state.choice.assign([1 + batch // 12 % 2] * len(selector.nbytes))
                selector._numbers.assign(tf.zeros_like(selector._numbers))

    data = tf.data.Dataset.from_generator(
        batches,
        output_signature=(
            tf.TensorSpec([fault["batch"], 256], tf.float32),
            tf.TensorSpec([fault["batch"]], tf.int64),
        ),
    )
    model.fit(
        data, epochs=1, verbose=0,
        callbacks=[
            hvdc.callbacks.BroadcastGlobalVariablesCallback(0),
            hvdc.callbacks.CompressionMonitor(directory),
            Flap(),
            *([hvdc.callbacks.CompressionGuard()] if fault.get("guard") else []),
        ],
    )  # fmt: skip


def main() -> None:
    """Makes the runs that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="*", default=list(RUNS), help=", ".join(RUNS))
    parser.add_argument("--into", default=str(HERE / "runs"))
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        train(args.runs[0], args.into)
        return
    for name in args.runs:
        directory = Path(args.into) / name
        shutil.rmtree(directory, ignore_errors=True)
        command = [sys.executable, __file__, name, "--into", str(directory), "--worker"]
        rates = RUNS[name].get("rates")
        if rates:  # between emulated hosts, which only root can set up
            between_hosts(command, rates, directory)
        else:
            start = [str(Path(sys.executable).parent / "horovodrun"), "--gloo", "-np", "2"]
            subprocess.run([*start, *command], check=True, timeout=300, cwd=ROOT)
        shrink(name, directory)


def shrink(name: str, directory: Path) -> None:
    """Removes from a recording what no test needs: files, later steps, other buckets, and columns that nobody reads."""
    sys.path.insert(0, str(ROOT))
    from hvd_compress.tools.run_log import BUCKET_COLUMNS, ROUND_COLUMNS, STEP_COLUMNS

    kept = {**HEALTHY, **RUNS[name]}
    shutil.rmtree(directory / "tensorboard", ignore_errors=True)
    about = directory / "run.json"
    run = json.loads(about.read_text())
    run["buckets"] = [{key: bucket[key] for key in ("name", "nbytes")} for bucket in run["buckets"]]
    about.write_text(json.dumps(run) + "\n")
    # The buckets of the first rank only.
    names = [bucket["name"] for bucket in run["buckets"]][: kept["buckets"]]
    for path in directory.glob("rank-*.csv"):
        is_buckets, rank = path.stem.endswith("buckets"), int(path.stem.split("-")[1])
        if rank >= kept["ranks"] or (is_buckets and (rank or not names)):
            path.unlink()
            continue
        with open(path, newline="") as file:
            rows = [row for row in csv.DictReader(file) if int(row["step"]) <= kept["steps"]]
        with open(path, "w", newline="") as file:
            columns = BUCKET_COLUMNS if is_buckets else (*STEP_COLUMNS, "trial")
            columns = ROUND_COLUMNS if path.stem.endswith("rounds") else columns
            writer = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
            writer.writeheader()
            writer.writerows(row for row in rows if not is_buckets or row["bucket"] in names)


def between_hosts(command: list[str], rates: tuple[str, ...], directory: Path) -> None:
    """Runs a command on two emulated hosts, whose links have one rate after the other, for some seconds each."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from netlab import Netlab

    with Netlab(2, rates[-1]) as net:
        ended = threading.Event()

        def change() -> None:
            for rate in itertools.cycle(rates):
                while not directory.exists():  # the first step is yet to come
                    if ended.wait(0.5):
                        return
                net.set_rate(rate)
                if ended.wait(5.0):
                    return

        changing = threading.Thread(target=change)
        if len(rates) > 1:
            changing.start()
        try:
            net.run(command, check=True, timeout=300, cwd=ROOT)
        finally:
            ended.set()
            if len(rates) > 1:
                changing.join()


if __name__ == "__main__":
    main()
