"""Finds and checks the images of a folder, and shares them out among the workers.

    DIR/train/CLASS/*.jpg     DIR/train-00000-of-01024, ...
    DIR/val/CLASS/*.jpg       DIR/validation-00000-of-00128, ...

Folders: the names of the folders in `train` are the classes, in alphabetical order. `val` may also be called
`validation`. TFRecords, which may also be in DIR/train and DIR/validation: a record has the features `image/encoded`
and `image/class/label`, an integer from 1 on as TensorFlow's scripts for ImageNet write it. The model counts its
classes from 0. Images are JPEG or PNG.

All workers get the same number of images. A worker that had one step more than the others would wait for them for
ever. So if the images cannot be divided evenly, some are left out.
"""

from __future__ import annotations

import functools
import os
import re
import struct
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable, NamedTuple, TypeVar

import horovod.tensorflow as hvd
import tensorflow as tf

SUFFIXES = (".jpg", ".jpeg", ".png")
SHUFFLED_RECORDS = 4096  # files are shuffled as a whole, their records within so many
THREADS = 16  # look at files before training; most of the time they wait for the disk

T = TypeVar("T")
LabeledFiles = list[tuple[str, int]]  # paths of images and labels


class Part(NamedTuple):
    """One worker's share of the images for training or for validation.

    Attributes:
        total: The number of images of all workers together.
        share: The number of images of this worker in an epoch. It is the same on all workers.
        elements: A function from a seed, int64 [], to a dataset of this worker's images in an order drawn from the
            seed. None stands for a fixed order.
        read: A function from an element of that dataset to the encoded image, string [], and the label, int64 [].
        check: A function that decodes all of this worker's images. It raises ValueError with the name of the first
            file that cannot be used.
    """

    total: int
    share: int
    elements: Callable[[Any], tf.data.Dataset]
    read: Callable[[Any], tuple[tf.Tensor, tf.Tensor]]
    check: Callable[[], Any]


class Images(NamedTuple):
    """The number of classes, and this worker's share of the images."""

    classes: int
    train: Part
    validation: Part


def find(data_dir: str, record_classes: int) -> Images:
    """Finds and checks the images. Call it on all workers.

    Args:
        data_dir: The folder, in one of the layouts above.
        record_classes: The number of classes of TFRecords.

    Raises:
        SystemExit: On all workers, with the same line: a worker cannot use what it found.
    """
    root = Path(data_dir)
    if on_all_workers(lambda: has_records(root), root):
        names = ("train", "validation")
        train, validation = on_all_workers(lambda: [record_files(root, name) for name in names], root)
        part = functools.partial(record_part, classes=record_classes)
        return Images(record_classes, part(train, training=True), part(validation, training=False))
    classes, train, validation = on_all_workers(lambda: find_folders(root), root)
    return Images(len(classes), folder_part(train), folder_part(validation))


def check(parts: Sequence[Part]) -> None:
    """Decodes all images of this worker.

    Raises:
        SystemExit: An image cannot be used.
    """
    try:
        for part in parts:
            part.check()
    except ValueError as error:
        raise SystemExit(str(error)) from None


def decode(encoded: tf.Tensor) -> tf.Tensor:
    """A JPEG or PNG as uint8 [height, width, 3]. `decode_jpeg` reads both, in gray and CMYK too."""
    return tf.io.decode_jpeg(encoded, channels=3)


# Folders


def find_folders(root: Path) -> tuple[list[str], LabeledFiles, LabeledFiles]:
    """The classes, the training images and the validation images of all workers."""
    train = root / "train"
    validation = root / "val" if (root / "val").is_dir() else root / "validation"
    if not (train.is_dir() and validation.is_dir()):
        raise ValueError(f"{root} has neither folders 'train' and 'val' nor TFRecords 'train-00000-of-...'")
    classes, others = class_names(train), class_names(validation)
    for folder, missing in ((validation, {*classes} - {*others}), (train, {*others} - {*classes})):
        if missing:
            raise ValueError(f"{folder} has no folder {sorted(missing)[0]!r}: train and val must have the same classes")
    return classes, labeled_files(train, classes), labeled_files(validation, classes)


def class_names(folder: Path) -> list[str]:
    """The names of the folders in a folder, in alphabetical order."""
    names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))
    if not names:
        raise ValueError(f"{folder} has no folders: put the images of each class into a folder")
    return names


def labeled_files(folder: Path, classes: list[str]) -> LabeledFiles:
    """The images in the folders of all classes, in alphabetical order, and their labels."""
    files = []
    for label, name in enumerate(classes):
        paths = sorted(entry.path for entry in os.scandir(folder / name) if entry.name.lower().endswith(SUFFIXES))
        if not paths:
            raise ValueError(f"{folder / name} has no images: their names must end in {', '.join(SUFFIXES)}")
        files += [(path, label) for path in paths]
    return files


def folder_part(files: LabeledFiles) -> Part:
    """This worker's share: every n-th file, for n workers. At most n - 1 files are left out."""
    share = len(files) // hvd.size()
    own = files[hvd.rank() :: hvd.size()]
    names = [path for path, _ in own]
    on_all_workers(lambda: in_threads(check_ends, names))
    with tf.device("CPU"):
        paths, labels = tf.constant(names, tf.string), tf.constant([label for _, label in own], tf.int64)

    def read(element: dict[str, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.io.read_file(element["path"]), element["label"]

    def elements(seed: Any) -> tf.data.Dataset:
        dataset = tf.data.Dataset.from_tensor_slices({"path": paths, "label": labels})
        return dataset if seed is None else dataset.shuffle(len(own), seed=seed)

    return Part(len(files), share, elements, read, lambda: in_threads(check_image, names))


def check_ends(path: str) -> None:
    """Looks at both ends of a file, which is fast. Only if they are not those of a JPEG or PNG, it is decoded."""
    with open(path, "rb") as file:
        start = file.read(8)
        file.seek(max(0, os.path.getsize(path) - 16))
        end = file.read()
    is_jpeg = start.startswith(b"\xff\xd8\xff") and end.endswith(b"\xff\xd9")
    is_png = start == b"\x89PNG\r\n\x1a\n" and b"IEND" in end
    if not (is_jpeg or is_png):
        check_image(path)


def check_image(path: str) -> None:
    """Decodes a file."""
    try:
        decode(tf.io.read_file(path))
    except tf.errors.OpError:
        raise ValueError(f"{path} is not an image that can be read: replace it, or delete it") from None


# TFRecords


def has_records(root: Path) -> bool:
    """Whether a folder has TFRecords for training."""
    if not root.is_dir():
        raise ValueError(f"{root} is not a folder: give the one that has 'train' and 'val' in it")
    return any(root.glob("train-*-of-*")) or any(root.glob("train/train-*-of-*"))


def record_files(root: Path, name: str) -> list[str]:
    """The TFRecords for training or validation, none of which may be missing."""
    files = sorted([*root.glob(f"{name}-*-of-*"), *root.glob(f"{name}/{name}-*-of-*")])
    if not files:
        raise ValueError(f"{root} has no TFRecords '{name}-00000-of-...'")
    count = files[0].name.rsplit("-", 1)[1]
    for i in range(int(count) if count.isdigit() else 0):
        file = files[0].with_name(f"{name}-{i:0{len(count)}}-of-{count}")
        if file not in files:
            raise ValueError(f"{file} is missing")
    return [str(file) for file in files]


def record_part(files: list[str], classes: int, training: bool) -> Part:
    """This worker's share: files of its own, or every n-th record of all files, for n workers.

    With files of its own, a worker reads nothing that belongs to others. But some workers may have more records than
    others, and the rest of theirs is left out of the epoch: with eight files per worker at most an eighth, and another
    one in each epoch. Validation should not depend on the number of workers, so it leaves out at most n - 1 records.
    """
    read = functools.partial(read_record, classes=classes)
    own = files[hvd.rank() :: hvd.size()]
    counts = hvd.allgather_object(sum(on_all_workers(lambda: in_threads(lambda file: count_records(file, read), own))))
    own_files = training and (len(files) % hvd.size() == 0 or len(files) >= 8 * hvd.size())

    def elements(seed: Any) -> tf.data.Dataset:
        names = tf.data.Dataset.from_tensor_slices(own if own_files else files)
        if own_files and seed is not None:
            names = names.shuffle(len(own), seed=seed)
        dataset = names.interleave(tf.data.TFRecordDataset, cycle_length=16, num_parallel_calls=tf.data.AUTOTUNE)
        if not own_files:
            dataset = dataset.shard(hvd.size(), hvd.rank())
        return dataset if seed is None else dataset.shuffle(SHUFFLED_RECORDS, seed=seed)

    share = min(counts) if own_files else sum(counts) // hvd.size()
    return Part(sum(counts), share, elements, read, lambda: in_threads(lambda file: check_records(file, read), files))


def read_record(record: tf.Tensor, classes: int) -> tuple[tf.Tensor, tf.Tensor]:
    """The encoded image and the label of a record, counted from 0."""
    features = {
        "image/encoded": tf.io.FixedLenFeature([], tf.string),
        "image/class/label": tf.io.FixedLenFeature([], tf.int64),
    }
    example = tf.io.parse_single_example(record, features)
    label = example["image/class/label"]
    text = f"image/class/label must be one of 1 to {classes}, the number of --classes"
    checks = [
        tf.debugging.assert_positive(label, text),
        tf.debugging.assert_less_equal(label, tf.constant(classes, tf.int64), text),
    ]
    with tf.control_dependencies(checks):
        return example["image/encoded"], label - 1


def count_records(path: str, read: Callable) -> int:
    """Counts the records of a file by their headers, which is fast, and tries the first one.

    A record is its length (8 bytes), a checksum (4), the data and another checksum (4).
    """
    count, position, size = 0, 0, os.path.getsize(path)
    with open(path, "rb") as file:
        while position + 16 <= size:
            file.seek(position)
            position += struct.unpack("<Q", file.read(8))[0] + 16
            count += 1
    if position != size:
        raise ValueError(f"{path} is cut short, or not a TFRecord: replace it")
    check_records(path, read, 1)
    return count


def check_records(path: str, read: Callable, count: int = -1) -> None:
    """Decodes the first records of a file, or all of them."""
    done = 0
    try:
        for record in tf.data.TFRecordDataset(path).take(count):
            decode(read(record)[0])
            done += 1
    except tf.errors.OpError as error:
        raise ValueError(f"{path}, record {done} (from 0), cannot be used: {cause(error)}") from None


# Workers


def on_all_workers(action: Callable[[], T], same_in: Path | None = None) -> T:
    """Calls `action` on each worker, and returns this worker's result.

    Args:
        action: A function that raises OSError or ValueError on any worker.
        same_in: A folder in which all workers must find the same, wherever theirs is.

    Raises:
        SystemExit: On all workers, with the same line: the action failed on one, or results differ.
    """
    result, error = None, ""
    try:
        result = action()
    except (OSError, ValueError) as raised:
        error = str(raised)
    found = repr(result).replace(str(same_in), "") if same_in else ""
    outcomes = hvd.allgather_object((error, zlib.crc32(found.encode())))
    errors = [error for error, _ in outcomes]
    for worker, error in enumerate(errors):
        if error:
            raise SystemExit(error if len({*errors}) == 1 else f"worker {worker}: {error}")
    if len({*outcomes}) > 1:
        raise SystemExit("the workers do not find the same files: give all of them copies of one --data-dir")
    return result


def in_threads(function: Callable[[str], T], paths: Sequence[str]) -> list[T]:
    """The results of a function that waits for the disk."""
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(function, paths))


def cause(error: tf.errors.OpError) -> str:
    """What TensorFlow says, without where it happened."""
    text = error.message.split(" [Op:")[0].split("}} ")[-1].split("\n")[0]
    return re.sub(r"^assertion failed: \[(.*?)\].*", r"\1", text).rstrip(". ")
