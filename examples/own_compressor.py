"""Defines a compressor of your own and trains with it.

    horovodrun -np 2 python examples/own_compressor.py

`compress` returns what to send of a tensor, and `decompress` turns it into a tensor again. hvd_compress does the
rest: it packs the gradients into one long tensor, sends the result of `compress`, sums the results of
`decompress`, and adds what was lost to the next step's gradient.
"""

from __future__ import annotations

import argparse
import time

import common
import data
import horovod.tensorflow.keras as hvd
import tensorflow as tf
from tensorflow import keras

import hvd_compress as hvdc

BLOCK = 500  # values with a common scale
POWERS = [1.0, 3.0, 9.0, 27.0, 81.0]  # five digits to the base of 3 fit into a byte


class Ternary(hvdc.Compressor):
    """Sends -1, 0 or +1 for each value, and one scale for 500 values: 104 bytes instead of 2,000.

    Values below 0.7 times the mean absolute value of the block become 0. The others become their sign times their mean
    absolute value (Li and Liu, Ternary Weight Networks, 2016). The error is smaller than the tensor, as error
    feedback requires. The compressor is deterministic.
    """

    def compress(self, tensor: tf.Tensor) -> tuple[tuple[tf.Tensor, tf.Tensor], tf.TensorShape]:
        missing = -tensor.shape.num_elements() % BLOCK  # zeros to fill the last block
        blocks = tf.reshape(tf.pad(tf.reshape(tensor, [-1]), [[0, missing]]), [-1, BLOCK])
        size = tf.abs(blocks)
        large = tf.cast(size > 0.7 * tf.reduce_mean(size, 1, keepdims=True), tf.float32)
        scale = tf.math.divide_no_nan(tf.reduce_sum(size * large, 1), tf.reduce_sum(large, 1))
        digits = tf.reshape(tf.sign(blocks) * large + 1.0, [-1, 5])
        codes = tf.cast(tf.reduce_sum(digits * POWERS, 1), tf.uint8)
        return (codes, scale), tensor.shape  # what is sent, and what else `decompress` needs

    def decompress(self, payload: tuple[tf.Tensor, tf.Tensor], shape: tf.TensorShape) -> tf.Tensor:
        codes, scale = payload
        digits = tf.floor(tf.cast(codes, tf.float32)[:, None] / POWERS) % 3.0
        blocks = (tf.reshape(digits, [-1, BLOCK]) - 1.0) * scale[:, None]
        return tf.reshape(tf.reshape(blocks, [-1])[: shape.num_elements()], shape)


def main() -> None:
    """Trains on the digits and reports."""
    parser = argparse.ArgumentParser(description="Train with a compressor of your own.")
    parser.add_argument("--epochs", type=int, default=30, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    args = parser.parse_args()
    hvd.init()
    common.share_devices()
    keras.utils.set_random_seed(args.seed + hvd.rank())

    images = data.load("digits", (28, 28, 1))
    x, y = data.share(images)
    model = keras.Sequential(
        [
            keras.layers.Input([28, 28, 1]),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    optimizer = hvdc.DistributedOptimizer(keras.optimizers.SGD(0.02 * hvd.size(), momentum=0.9), compression=Ternary())
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"], jit_compile=False)
    callbacks = [hvdc.callbacks.BroadcastGlobalVariablesCallback(0), hvdc.callbacks.MetricAverageCallback()]
    verbose = 2 if hvd.rank() == 0 else 0
    start = time.perf_counter()
    model.fit(x, y, batch_size=32, epochs=args.epochs, callbacks=callbacks, verbose=verbose)
    seconds = time.perf_counter() - start

    if hvd.rank() == 0:
        _, accuracy = model.evaluate(images.x_test, images.y_test, verbose=0)
        common.report(
            optimizer,
            data=f"{images.name}, {len(images.x_train)} images, tested on {len(images.x_test)} others",
            metrics={"test accuracy": f"{accuracy:.2%}"},
            steps=int(optimizer.iterations.numpy()),
            seconds=seconds,
            compression=Ternary(),
        )


if __name__ == "__main__":
    main()
