"""Packs the factors of several matrices into one vector, and unpacks them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import tensorflow as tf

from ..formats.power_sgd import Batch


def pack(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """All tensors end to end; [0] of none."""
    flat = [tf.reshape(tensor, [-1]) for tensor in tensors]
    return tf.concat(flat, 0) if flat else tf.zeros([0])


def unpack(flat: tf.Tensor, batches: Sequence[Batch], side: str) -> list[tf.Tensor]:
    """The left ("rows") or right ("columns") factors [b, rank, n] of each batch; `flat` may hold more behind them."""
    if not batches:
        return []
    shapes = [[len(members), rank, getattr(matrix, side)] for members, matrix, rank in batches]
    lengths = [math.prod(shape) for shape in shapes]
    return [tf.reshape(part, shape) for part, shape in zip(tf.split(flat[: sum(lengths)], lengths), shapes)]


def unpack_last(flat: tf.Tensor, alike: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The tensors at the end of `flat`, in the shapes of these."""
    lengths = [tensor.shape.num_elements() for tensor in alike]
    return [tf.reshape(part, x.shape) for part, x in zip(tf.split(flat[-sum(lengths) :], lengths), alike)]


def per_matrix(batches: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The factors of each matrix, [rank, n], of those of each batch."""
    return [factor for batch in batches for factor in tf.unstack(batch)]
