"""Trains with compressed gradients in a custom loop, without `model.fit`.

    horovodrun -np 2 python examples/custom_loop.py --compression topk:ratio=0.01

Wrap the tape as with Horovod: in every step.
"""

from __future__ import annotations

import argparse
import time

import common
import data
import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from keras_mnist import build_model
from tensorflow import keras

import hvd_compress as hvdc


def arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = common.arguments("Train in a custom loop with compressed gradients.", "custom_loop.py", 32, 0.001)
    parser.add_argument("--data", choices=["mnist", "digits"], default="mnist", help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=690, help="default: %(default)s")
    return parser.parse_args()


def tf_variables(variables: list) -> list[tf.Variable]:
    """The TensorFlow variables inside Keras 3 variables; Horovod needs the former."""
    return [v if isinstance(v, tf.Variable) else v.value for v in variables]


def main() -> None:
    """Trains and reports."""
    args = arguments()
    hvd.init()
    common.share_devices()
    keras.utils.set_random_seed(args.seed + hvd.rank())  # different shuffling and dropout on each worker

    images = data.load(args.data, (28, 28, 1))
    x, y = data.share(images)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x)).repeat()
    dataset = dataset.batch(args.batch_size, drop_remainder=True).take(args.steps).prefetch(2)
    model = build_model()
    optimizer = keras.optimizers.Adam(args.lr * hvd.size())  # not distributed: the tape is
    loss_of = keras.losses.SparseCategoricalCrossentropy()

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        tape = hvdc.DistributedGradientTape(tape, compression=args.compression)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    # All workers start with the weights of the first one. The optimizer's variables are zeros on all of them.
    hvd.broadcast_variables(tf_variables(model.weights), root_rank=0)
    start = time.perf_counter()
    for number, (x_batch, y_batch) in enumerate(dataset, 1):
        loss = step(x_batch, y_batch)
        if number % 100 == 0 and hvd.rank() == 0:
            print(f"step {number}: loss {float(loss):.4f}", flush=True)
    float(loss)  # waits for a GPU
    seconds = time.perf_counter() - start

    if hvd.rank() == 0:  # all workers have the same weights
        predicted = np.argmax(model.predict(images.x_test, verbose=0), axis=-1)
        common.report(
            hvdc.DistributedGradientTape(tf.GradientTape(), compression=args.compression),
            model.trainable_variables,
            data=f"{images.name}, {len(images.x_train)} images, tested on {len(images.x_test)} others",
            metrics={"test accuracy": f"{np.mean(predicted == images.y_test):.2%}"},
            steps=int(optimizer.iterations.numpy()),
            seconds=seconds,
            compression=args.compression,
        )


if __name__ == "__main__":
    main()
