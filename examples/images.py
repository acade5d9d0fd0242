"""Training and validation images from folders or TFRecords, as datasets of this worker's share.

`image_files.py` says which files are read, and shares them out. Everything random follows from the seed, the worker
and the epoch. So each worker and each epoch has its own order and its own augmentation, and a training that is resumed
gets the images that it would have got without the interruption.
"""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf
from image_files import Part, decode

MEAN, STDDEV = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's red, green and blue


def training_set(part: Part, image_size: int, batch_size: int, steps: int, epochs: range, seed: int) -> tf.data.Dataset:
    """Shuffled batches of augmented images.

    Args:
        part: This worker's share. An epoch has `steps * batch_size` images of it.
        image_size: Height and width.
        batch_size: Images per step.
        steps: Steps per epoch; the same on all workers.
        epochs: The epochs, counted from 0. Training that is resumed does not start with 0.
        seed: The same on all workers.

    Returns:
        For each step of all epochs: images, float32 [batch_size, image_size, image_size, 3], and labels, int64
        [batch_size].
    """

    def shuffled(epoch: tf.Tensor) -> tf.data.Dataset:
        tf.random.set_seed(1)  # of this function only: so that its shuffling depends on the key alone
        key = tf.random.experimental.stateless_fold_in([seed, hvd.rank()], epoch)
        order_seed = tf.random.stateless_uniform([], key, maxval=tf.int64.max, dtype=tf.int64)
        elements = part.elements(order_seed).take(steps * batch_size)
        return elements.enumerate().map(lambda i, element: (element, tf.random.experimental.stateless_fold_in(key, i)))

    def augmented(element: Any, key: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        encoded, label = part.read(element)
        return augment(decode(encoded), image_size, key), label

    dataset = tf.data.Dataset.range(epochs.start, epochs.stop).flat_map(shuffled)
    dataset = dataset.map(augmented, num_parallel_calls=tf.data.AUTOTUNE)
    return dataset.batch(batch_size, drop_remainder=True).prefetch(tf.data.AUTOTUNE)


def validation_set(part: Part, image_size: int, batch_size: int) -> tf.data.Dataset:
    """The images of the share, once and in a fixed order; batches as those of `training_set`, the last one smaller."""

    def cropped(element: Any) -> tuple[tf.Tensor, tf.Tensor]:
        encoded, label = part.read(element)
        return center_crop(decode(encoded), image_size), label

    dataset = part.elements(None).take(part.share).map(cropped, num_parallel_calls=tf.data.AUTOTUNE)
    return dataset.batch(batch_size).prefetch(tf.data.AUTOTUNE)


def augment(image: tf.Tensor, size: int, key: tf.Tensor) -> tf.Tensor:
    """A random window of an image, resized, and mirrored in half of the cases.

    The window has 8 to 100% of the area, and its sides a ratio of 3:4 to 4:3 (Szegedy et al., Going Deeper with
    Convolutions, arXiv 1409.4842, section 6).

    Args:
        image: uint8 [height, width, 3].
        size: Height and width of the result.
        key: int32 [2], from which the random numbers follow.

    Returns:
        float32 [size, size, 3].
    """
    begin, window, _ = tf.image.stateless_sample_distorted_bounding_box(
        tf.shape(image),
        tf.zeros([1, 0, 4]),  # no boxes of objects: the whole image
        key,
        aspect_ratio_range=(3 / 4, 4 / 3),
        area_range=(0.08, 1.0),
        max_attempts=10,
        use_image_if_no_bounding_boxes=True,
    )
    image = resize(tf.slice(image, begin, window), size)
    return tf.image.stateless_random_flip_left_right(image, tf.random.experimental.stateless_fold_in(key, 0))


def center_crop(image: tf.Tensor, size: int) -> tf.Tensor:
    """The square in the middle with 7/8 of the shorter side, resized: from uint8 to float32 [size, size, 3]."""
    height, width = tf.shape(image)[0], tf.shape(image)[1]
    side = tf.maximum(1, tf.minimum(height, width) * 7 // 8)
    return resize(tf.image.crop_to_bounding_box(image, (height - side) // 2, (width - side) // 2, side, side), size)


def resize(image: tf.Tensor, size: int) -> tf.Tensor:
    """Resizes uint8 [height, width, 3] and normalizes the colors: float32 [size, size, 3]."""
    image = tf.image.resize(tf.ensure_shape(image, [None, None, 3]), [size, size], antialias=True)
    return (image / 255.0 - MEAN) / STDDEV
