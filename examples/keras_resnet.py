"""Trains a residual network with compressed gradients and all of Horovod's Keras callbacks.

    horovodrun -np 2 python examples/keras_resnet.py --compression int8
    horovodrun -np 2 python examples/keras_resnet.py --model resnet50 --synthetic --steps 20

ResNet-20 is trained on CIFAR-10 as by its authors (He et al., Deep Residual Learning for Image Recognition,
section 4.2, 2015). ResNet-50 is trained on random images, to measure the time of a step.
"""

from __future__ import annotations

import argparse
import math
import time

import common
import data
import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf
from tensorflow import keras

import hvd_compress as hvdc

# The paper's 64,000 steps of 128 images are 164 epochs of CIFAR-10.
EPOCHS = {"cifar10": 164, "digits": 20}


def resnet20(classes: int = 10) -> keras.Model:
    """A network of nine residual blocks with two layers each, for 32x32 images; 0.27 million weights."""

    def conv(x, filters, stride=1):
        x = keras.layers.Conv2D(
            filters,
            3,
            stride,
            padding="same",
            use_bias=False,
            kernel_initializer="he_normal",
            kernel_regularizer=keras.regularizers.L2(5e-5),  # its gradient equals a weight decay of 1e-4
        )(x)
        return keras.layers.BatchNormalization(momentum=0.9)(x)

    def shortcut(x, filters, stride):
        if stride == 1:
            return x
        new = filters - x.shape[-1]  # every other pixel, and zeros for the new channels: it has no weights
        return keras.layers.Lambda(lambda t: tf.pad(t[:, ::2, ::2], [[0, 0], [0, 0], [0, 0], [0, new]]))(x)

    inputs = keras.layers.Input([32, 32, 3])
    x = keras.layers.ReLU()(conv(inputs, 16))
    for filters, first_stride in ((16, 1), (32, 2), (64, 2)):
        for stride in (first_stride, 1, 1):
            y = keras.layers.ReLU()(conv(x, filters, stride))
            x = keras.layers.ReLU()(keras.layers.Add()([conv(y, filters), shortcut(x, filters, stride)]))
    x = keras.layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, keras.layers.Dense(classes, activation="softmax")(x))


def training_set(x: np.ndarray, y: np.ndarray, batch_size: int, flip: bool) -> tf.data.Dataset:
    """Endless shuffled batches. Images are shifted by up to 4 pixels; if `flip`, half of them are mirrored."""

    def augment(image, label):
        image = tf.image.random_crop(tf.pad(image, [[4, 4], [4, 4], [0, 0]]), image.shape)
        return (tf.image.random_flip_left_right(image) if flip else image), label

    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x)).repeat()
    return dataset.map(augment).batch(batch_size, drop_remainder=True).prefetch(2)


def synthetic_set(image_size: int, classes: int, batch_size: int) -> tf.data.Dataset:
    """Endless repetitions of one batch of random images."""
    x = tf.random.uniform([batch_size, image_size, image_size, 3])
    y = tf.random.uniform([batch_size], maxval=classes, dtype=tf.int64)
    return tf.data.Dataset.from_tensors((x, y)).repeat()


def arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = common.arguments("Train a residual network with compressed gradients.", "keras_resnet.py", 64, 0.05)
    parser.add_argument("--model", choices=["resnet20", "resnet50"], default="resnet20")
    parser.add_argument(
        "--data", choices=sorted(EPOCHS), default="cifar10",
        help="cifar10 is downloaded; digits come with scikit-learn (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--synthetic", action="store_true", help="random images instead of --data")
    parser.add_argument("--image-size", type=int, default=224, help="of resnet50 (default: %(default)s)")
    epochs = ", ".join(f"{count} for {name}" for name, count in EPOCHS.items())
    parser.add_argument("--epochs", type=int, help=f"default: {epochs}")
    parser.add_argument("--steps", type=int, help="train about this many steps, instead of --epochs")
    parser.add_argument("--warmup-epochs", type=int, default=5, help="default: %(default)s")
    args = parser.parse_args()
    if args.model == "resnet50" and not args.synthetic:
        parser.error("resnet50 is too large for these data sets: add --synthetic")
    return args


def main() -> None:
    """Trains and reports."""
    args = arguments()
    hvd.init()
    common.share_devices()
    keras.utils.set_random_seed(args.seed + hvd.rank())  # different shuffling and images on each worker

    if args.model == "resnet50":
        model = keras.applications.ResNet50(weights=None, input_shape=(args.image_size, args.image_size, 3))
    else:
        model = resnet20()
    images = None
    if args.synthetic:
        name, epochs, steps_per_epoch = "random images", args.epochs or 1, 100
        dataset = synthetic_set(model.input_shape[1], model.output_shape[-1], args.batch_size)
    else:
        images = data.load(args.data, (32, 32, 3))
        x, y = data.share(images)
        name = f"{images.name}, {len(images.x_train)} images, tested on {len(images.x_test)} others"
        epochs, steps_per_epoch = args.epochs or EPOCHS[images.name], max(1, len(x) // args.batch_size)
        dataset = training_set(x, y, args.batch_size, flip=images.name == "cifar10")
    if args.steps:
        epochs = math.ceil(args.steps / steps_per_epoch)
        steps_per_epoch = args.steps // epochs

    lr = args.lr * hvd.size()
    optimizer = hvdc.DistributedOptimizer(keras.optimizers.SGD(lr, momentum=0.9), compression=args.compression)
    # Horovod cannot run inside XLA, so the training step must not be compiled.
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"], jit_compile=False)
    callbacks = [
        hvdc.callbacks.BroadcastGlobalVariablesCallback(0),  # all start with the first worker's weights
        hvdc.callbacks.MetricAverageCallback(),  # the callbacks below get the averages
        hvdc.callbacks.LearningRateWarmupCallback(lr, min(args.warmup_epochs, max(1, epochs // 2)), verbose=1),
        # A tenth of the rate in the second half of the training, a hundredth in the last quarter.
        hvdc.callbacks.LearningRateScheduleCallback(
            lr, lambda epoch: 0.1 if epoch < 0.75 * epochs else 0.01, start_epoch=math.ceil(epochs / 2)
        ),
    ]

    start = time.perf_counter()
    model.fit(
        dataset,
        epochs=epochs,
        steps_per_epoch=steps_per_epoch,
        callbacks=callbacks,
        verbose=2 if hvd.rank() == 0 else 0,
    )
    seconds = time.perf_counter() - start

    if hvd.rank() == 0:  # all workers have the same weights
        accuracy = None
        if images is not None:
            _, accuracy = model.evaluate(images.x_test, images.y_test, verbose=0)
        common.report(
            optimizer,
            data=name,
            metrics=None if accuracy is None else {"test accuracy": f"{accuracy:.2%}"},
            steps=int(optimizer.iterations.numpy()),
            seconds=seconds,
            compression=args.compression,
        )


if __name__ == "__main__":
    main()
