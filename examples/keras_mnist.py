"""Trains a small convolutional network with compressed gradients, on several workers.

    horovodrun -np 2 python examples/keras_mnist.py
    horovodrun -np 2 python examples/keras_mnist.py --compression hybrid:ratio=0.01,bits=4

Without horovodrun it trains on one worker. Compression changes two lines of a Horovod script: the import of
hvd_compress, and the DistributedOptimizer.
"""

from __future__ import annotations

import argparse
import time

import common
import data
import horovod.tensorflow.keras as hvd
from tensorflow import keras

import hvd_compress as hvdc

# There are only few digits: they need more epochs for as many steps as MNIST has in one.
EPOCHS = {"mnist": 1, "digits": 20}


def build_model() -> keras.Model:
    """The network of Horovod's MNIST example, for 28x28 gray images and ten classes."""
    return keras.Sequential(
        [
            keras.layers.Input([28, 28, 1]),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.Conv2D(64, 3, activation="relu"),
            keras.layers.MaxPooling2D(2),
            keras.layers.Dropout(0.25),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )


def arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = common.arguments(
        "Train a small convolutional network with compressed gradients.", "keras_mnist.py", 32, 0.001
    )
    parser.add_argument(
        "--data", choices=sorted(EPOCHS), default="mnist",
        help="mnist is downloaded; digits come with scikit-learn (default: %(default)s)",
    )  # fmt: skip
    epochs = ", ".join(f"{count} for {name}" for name, count in EPOCHS.items())
    parser.add_argument("--epochs", type=int, help=f"default: {epochs}")
    parser.add_argument(
        "--optimizer", choices=["adam", "sgd", "onebit-adam"], default="adam",
        help="sgd has momentum 0.9, but not with dgc, which brings its own; onebit-adam compresses by itself "
        "(default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--freeze-step", type=int, help="of onebit-adam (default: when the variance is stable)")
    parser.add_argument("--save", metavar="FILE", help="save the trained model, for example to model.keras")
    return parser.parse_args()


def main() -> None:
    """Trains and reports."""
    args = arguments()
    hvd.init()
    common.share_devices()
    keras.utils.set_random_seed(args.seed + hvd.rank())  # different shuffling and dropout on each worker

    images = data.load(args.data, (28, 28, 1))
    x, y = data.share(images)
    model = build_model()
    rate = args.lr * hvd.size()
    if args.optimizer == "sgd":
        optimizer = keras.optimizers.SGD(rate, momentum=0.0 if args.compression.name == "dgc" else 0.9)
    else:
        optimizer = keras.optimizers.Adam(rate)
    if args.optimizer == "onebit-adam":
        optimizer = hvdc.optimizers.OneBitAdam(rate, freeze_step=args.freeze_step)
    else:
        optimizer = hvdc.DistributedOptimizer(optimizer, compression=args.compression)
    # Horovod cannot run inside XLA, so the training step must not be compiled.
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"], jit_compile=False)

    start = time.perf_counter()
    model.fit(
        x,
        y,
        batch_size=args.batch_size,
        epochs=args.epochs or EPOCHS[images.name],
        callbacks=[
            hvdc.callbacks.BroadcastGlobalVariablesCallback(0),  # all start with the first worker's weights
            hvdc.callbacks.MetricAverageCallback(),
        ],
        verbose=2 if hvd.rank() == 0 else 0,
    )
    seconds = time.perf_counter() - start

    if hvd.rank() == 0:  # all workers have the same model
        _, accuracy = model.evaluate(images.x_test, images.y_test, verbose=0)
        if args.save:
            model.save(args.save)
        common.report(
            optimizer,
            data=f"{images.name}, {len(images.x_train)} images, tested on {len(images.x_test)} others",
            metrics={"test accuracy": f"{accuracy:.2%}"},
            steps=int(optimizer.iterations.numpy()),
            seconds=seconds,
            compression=args.optimizer if args.optimizer == "onebit-adam" else args.compression,
        )


if __name__ == "__main__":
    main()
