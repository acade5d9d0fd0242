"""Sequences of ids for examples/keras_recommender.py: what came after what.

By default, the ids are the words of the source of Python's standard library. A file of your own has a sequence of ids
in each line, in the order of time, for example all items that one user has bought. Ids are separated by white space,
and can be any text:

    item-17 item-4 item-17 item-93
    item-4 item-2001

Ids are numbered from 1 by their frequency, so 1 is the most frequent one. 0 stands for no id.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tensorflow as tf
import text

WORD = re.compile(rb"[A-Za-z_]\w*")
NEGATIVES = 64


class Ids(NamedTuple):
    """Sequences of numbered ids.

    Attributes:
        name: A description of the data.
        count: How many different ids there are.
        train: Sequences, int32 [length] each.
        validation: Other sequences. Ids that do not occur in `train` are left out: nothing is known about them.
    """

    name: str
    count: int
    train: list[np.ndarray]
    validation: list[np.ndarray]


def load(path: str | None = None) -> Ids:
    """Loads the ids of a file, or the words of Python's standard library.

    Args:
        path: A file with a sequence of ids in each line. The last tenth of the lines is for validation.

    Raises:
        ValueError: The file cannot be read, or has too few ids.
    """
    if path is None:
        source = text.load()
        parts = [[WORD.findall(part.tobytes())] for part in (source.train, source.validation)]
        return numbered(f"words of the {source.name}", *parts)
    try:
        lines = [line.split() for line in Path(path).read_bytes().splitlines()]
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    lines = [line for line in lines if len(line) > 1]
    if len(lines) < 2:
        raise ValueError(f"{path} must have at least two lines with two ids each, separated by white space")
    first = len(lines) - max(1, len(lines) // 10)
    return numbered(path, lines[:first], lines[first:])


def numbered(name: str, train: Sequence[Sequence[bytes]], validation: Sequence[Sequence[bytes]]) -> Ids:
    """Numbers the ids of both parts by their frequency in `train`."""
    counts = Counter(each for sequence in train for each in sequence)
    numbers = {each: number for number, (each, _) in enumerate(counts.most_common(), 1)}
    of_train = [np.array([numbers[each] for each in sequence], np.int32) for sequence in train]
    known = [np.array([numbers[each] for each in sequence if each in numbers], np.int32) for sequence in validation]
    return Ids(name, len(numbers), of_train, known)


def windows(sequences: list[np.ndarray], context: int) -> tuple[np.ndarray, np.ndarray]:
    """All places in the sequences, as pairs of what came before and what came then.

    Returns:
        A stream, int32 [n], and positions in it, int64 [m]. At a position p, `stream[p]` came after
        `stream[p - context:p]`, which begins with zeros where a sequence begins.
    """
    zeros = np.zeros(context, np.int32)
    stream = np.concatenate([part for sequence in sequences for part in (zeros, sequence)])
    return stream, np.flatnonzero(stream)


def dataset(
    sequences: list[np.ndarray], context: int, batch_size: int, rank: int, size: int
) -> tuple[tf.data.Dataset, int]:
    """Endless shuffled batches of this rank's part of the windows.

    Each batch is ((context, candidates), label): the ids before, int32 [batch_size, context]; the id that came then,
    followed by `NEGATIVES` ids from random positions, int32 [batch_size, 1 + NEGATIVES]; and the place of the right
    candidate, int32 [batch_size], which is 0. The more frequent an id, the more often it is drawn.

    Returns:
        The batches, and their number in an epoch, which is the same on all ranks.
    """
    stream, positions = windows(sequences, context)
    count = len(positions) // size
    stream, items = tf.constant(stream), tf.constant(stream[positions])

    def look_up(position: tf.Tensor) -> tuple[tuple[tf.Tensor, tf.Tensor], tf.Tensor]:
        before = tf.gather(stream, position[:, None] + tf.range(-context, 0, dtype=tf.int64))
        drawn = tf.random.uniform([batch_size, NEGATIVES], maxval=tf.size(items), dtype=tf.int32)
        candidates = tf.concat([tf.gather(stream, position)[:, None], tf.gather(items, drawn)], 1)
        return (before, candidates), tf.zeros([batch_size], tf.int32)

    part = tf.data.Dataset.from_tensor_slices(positions).take(count * size).shard(size, rank)
    batches = part.shuffle(count).repeat().batch(batch_size, drop_remainder=True).map(look_up).prefetch(2)
    return batches, count // batch_size
