"""A flat vector as a matrix of blocks.

These functions are called outside compiled kernels, which take and return matrices. Outside, a reshape is free; inside,
XLA writes a reshaped or padded tensor at two to three times the cost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Callable

import tensorflow as tf

from ..formats.sizes import block_shape


def to_blocks(tensor: tf.Tensor, largest: int) -> tf.Tensor:
    """The elements of `tensor` as [blocks, block size], with a block size of at most `largest`.

    The last block is padded with the last element, which changes neither its minimum nor its maximum.
    """
    flat = tf.reshape(tensor, [-1])
    _, block = block_shape(flat.shape[0], largest)
    missing = -flat.shape[0] % block
    if missing:
        flat = tf.concat([flat, tf.fill([missing], flat[-1])], 0)
    return tf.reshape(flat, [-1, block])


def to_full_blocks(tensor: tf.Tensor, block: int) -> tf.Tensor:
    """The elements of `tensor` as [blocks, block], the last block padded with zeros."""
    flat = tf.reshape(tensor, [-1])
    missing = -flat.shape[0] % block
    return tf.reshape(tf.pad(flat, [[0, missing]]) if missing else flat, [-1, block])


def from_blocks(blocks: tf.Tensor, shape: Sequence[int]) -> tf.Tensor:
    """The inverse of `to_blocks`: the first elements of `blocks` in this shape."""
    flat, n = tf.reshape(blocks, [-1]), math.prod(shape)
    return tf.reshape(flat if flat.shape[0] == n else flat[:n], shape)


def halving(blocks: tf.Tensor, reduce_pair: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]) -> tf.Tensor:
    """Reduces each row of `blocks` [rows, columns] to one value, [rows, 1], by halving the row.

    XLA vectorizes this form about twice as well as a reduction along the last axis, and the order of a sum is the same
    everywhere.
    """
    while blocks.shape[1] > 1:
        half, odd = divmod(blocks.shape[1], 2)
        folded = reduce_pair(blocks[:, :half], blocks[:, half : 2 * half])
        blocks = tf.concat([folded, blocks[:, 2 * half :]], 1) if odd else folded
    return blocks
