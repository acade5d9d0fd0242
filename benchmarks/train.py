"""Times training to a given accuracy with every compressor.

    sudo python benchmarks/netlab.py --hosts 2 --rate 100mbit -- python benchmarks/train.py

Runs under horovodrun. Trains the network of examples/keras_mnist.py on scikit-learn's handwritten digits, once per
method and seed. The time starts with the first step and includes tracing and compilation, but not the evaluation on
the test images after every epoch. Stock Horovod uses its DistributedGradientTape, because its optimizer does not reduce
gradients on Keras 3.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import common

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

STOCK = {"horovod none": "none", "horovod fp16": "fp16"}
SPECS = ["none", "int8", "int4", "hybrid:ratio=0.01,bits=4", "hybrid:ratio=0.05,bits=4"]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accuracy", type=float, default=96.0, help="percent to reach (default: %(default)s)")
    parser.add_argument("--specs", nargs="*", default=SPECS, metavar="SPEC", help="our compressors")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="default: 0 1 2")
    parser.add_argument("--batch-size", type=int, default=32, help="per worker (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=0.001, help="per worker (default: %(default)s)")
    parser.add_argument("--max-epochs", type=int, default=60, help="give up then (default: %(default)s)")
    return common.parse(parser)


def train(method: str, seed: int, images: Any, args: argparse.Namespace) -> dict[str, Any]:
    """One training. Returns the seconds and steps until the accuracy was reached, or None for both."""
    import data
    import horovod.tensorflow as hvd
    import numpy as np
    import tensorflow as tf
    from custom_loop import tf_variables
    from keras_mnist import build_model
    from tensorflow import keras

    import hvd_compress as hvdc
    from hvd_compress.tools.timed_exchange import barrier

    keras.utils.set_random_seed(seed)
    model = build_model()  # the seed gives all workers the same weights
    keras.utils.set_random_seed(1000 * seed + hvd.rank())
    optimizer = keras.optimizers.Adam(args.lr * hvd.size())
    optimizer.build(model.trainable_variables)  # otherwise the step would be traced twice
    loss_of = keras.losses.SparseCategoricalCrossentropy()

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        if method in STOCK:
            compression = getattr(hvd.Compression, STOCK[method])
            tape = hvd.DistributedGradientTape(tape, compression=compression)
        else:
            tape = hvdc.DistributedGradientTape(tape, compression=method)
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, tf_variables(variables)), variables))

    @tf.function
    def predict(x: tf.Tensor) -> tf.Tensor:
        return model(x, training=False)

    x, y = data.share(images)
    random = np.random.default_rng([seed, hvd.rank()])
    seconds, steps, first_step = 0.0, 0, 0.0
    for _ in range(args.max_epochs):
        order = random.permutation(len(x))
        barrier()
        start = time.perf_counter()
        for first in range(0, len(x) - args.batch_size + 1, args.batch_size):
            batch = order[first : first + args.batch_size]
            step(tf.constant(x[batch]), tf.constant(y[batch]))
            if steps == 0:
                first_step = time.perf_counter() - start
            steps += 1
        seconds += time.perf_counter() - start
        scores = predict(tf.constant(images.x_test)).numpy()
        accuracy = float((scores.argmax(1) == images.y_test).mean() * 100)
        # All workers have the same weights, but one decides, so that all stop in the same step.
        if hvd.broadcast(tf.constant(accuracy), 0, name="accuracy").numpy() >= args.accuracy:
            return {"seconds": seconds, "first_step": first_step, "steps": steps, "accuracy": accuracy}
    return {"seconds": None, "first_step": first_step, "steps": None, "accuracy": accuracy}


def main() -> None:
    args = arguments()
    import data
    import horovod.tensorflow as hvd

    hvd.init()
    images = data.load("digits", (28, 28, 1))
    methods = [*STOCK, *args.specs]
    runs = [(seed, method) for seed in args.seeds for method in methods]
    results: dict[str, list[dict[str, Any]]] = {method: [] for method in methods}
    for seed, method in common.progress(runs, "trainings", hvd.rank() == 0):
        results[method].append(train(method, seed, images, args))
    if hvd.rank() != 0:
        return
    medians = {
        method: statistics.median(run["seconds"] or float("inf") for run in results[method]) for method in methods
    }
    rows = [
        [
            method, f"{medians[method]:.1f}", f"{medians['horovod none'] / medians[method]:.2f}",
            f"{medians['horovod fp16'] / medians[method]:.2f}",
            f"{statistics.median(run['first_step'] for run in results[method]):.1f}",
            " ".join(str(run["steps"] or "-") for run in results[method]),
        ]
        for method in methods
    ]  # fmt: skip
    title = f"digits to {args.accuracy}%, {hvd.size()} workers {args.label}"
    columns = [
        "method",
        "seconds, median",
        "times sooner than none",
        "than fp16",
        "first step s",
        "steps of each seed",
    ]
    common.print_table(title, columns, rows)
    settings = {key: vars(args)[key] for key in ("accuracy", "batch_size", "lr", "label")}
    result = {"benchmark": "train", "workers": hvd.size(), **settings, "methods": results}
    common.save(args.json, result)


if __name__ == "__main__":
    main()
