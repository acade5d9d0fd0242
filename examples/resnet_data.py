"""What keras_resnet.py trains on: CIFAR-10 or the digits, real images in a folder, or random images."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NamedTuple

import data
import image_files
import images
import numpy as np
import tensorflow as tf


class Task(NamedTuple):
    """What is trained on.

    Attributes:
        name: cifar10, digits, --data-dir or synthetic.
        description: For the report.
        classes: How many there are.
        share: The number of this worker's images in an epoch; the same on all workers.
        training_set: A function from the number of steps per epoch and the epochs to batches of images and labels.
        validation_set: This worker's share, or None.
        test_set: Arrays of images and labels, or None.
        check: A function that ends the run, with one line, if it finds an image that cannot be used.
    """

    name: str
    description: str
    classes: int
    share: int
    training_set: Callable[[int, range], tf.data.Dataset]
    validation_set: tf.data.Dataset | None = None
    test_set: tuple[np.ndarray, np.ndarray] | None = None
    check: Callable[[], None] = lambda: None


def load(args: argparse.Namespace) -> Task:
    """What the arguments ask for. Call it on all workers."""
    if args.data_dir:
        return folder_task(args)
    return synthetic_task(args) if args.synthetic else array_task(args)


def folder_task(args: argparse.Namespace) -> Task:
    """The images of --data-dir. All workers get the same number of steps, or the same error."""
    found = image_files.find(args.data_dir, args.classes)
    train, validation = found.train, found.validation
    for part, name, least in ((train, "training", args.batch_size), (validation, "validation", 1)):
        if part.share < least:
            raise SystemExit(
                f"{args.data_dir} has {part.total} images for {name}, {part.share} for each worker: "
                f"that must be {least} at least" + (", the --batch-size" if name == "training" else "")
            )
    return Task(
        "--data-dir",
        f"{args.data_dir}, {train.total} images of {found.classes} classes, validated on {validation.total} others",
        found.classes,
        train.share,
        lambda steps, epochs: images.training_set(train, args.image_size, args.batch_size, steps, epochs, args.seed),
        images.validation_set(validation, args.image_size, args.batch_size),
        check=lambda: image_files.check((train, validation)),
    )


def array_task(args: argparse.Namespace) -> Task:
    """CIFAR-10 or the digits. Images are shifted by up to 4 pixels; half of those of CIFAR-10 are mirrored."""
    arrays = data.load(args.data, (32, 32, 3))
    x, y = data.share(arrays)

    def augment(image, label):
        image = tf.image.random_crop(tf.pad(image, [[4, 4], [4, 4], [0, 0]]), image.shape)
        return (tf.image.random_flip_left_right(image) if arrays.name == "cifar10" else image), label

    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x)).repeat()
    dataset = dataset.map(augment).batch(args.batch_size, drop_remainder=True).prefetch(2)
    description = f"{arrays.name}, {len(arrays.x_train)} images, tested on {len(arrays.x_test)} others"
    test_set = arrays.x_test, arrays.y_test
    return Task(arrays.name, description, 10, len(x), lambda steps, epochs: dataset, test_set=test_set)


def synthetic_task(args: argparse.Namespace) -> Task:
    """The same batch of random images in every step, 100 steps per epoch."""
    classes = 1000 if args.model == "resnet50" else 10
    x = tf.random.uniform([args.batch_size, args.image_size, args.image_size, 3])
    y = tf.random.uniform([args.batch_size], maxval=classes, dtype=tf.int64)
    dataset = tf.data.Dataset.from_tensors((x, y)).repeat()
    return Task("synthetic", "random images", classes, 100 * args.batch_size, lambda steps, epochs: dataset)
