"""Sorted index sets in few bytes, of a size known beforehand.

Two forms; `form` names the smaller for given n and k:

* `pages`: 16 bits per index within pages of 65,536 elements, and the number of indices in each page
  (4 bytes a page; left out where there is only one page);
* `bitmap`: one bit per element.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import tensorflow as tf

from ..formats.sizes import PAGE, ROW, bitmap_bytes
from ..formats.sizes import index_form as form
from . import bitpack
from .compile import compiled


def pack(indices: tf.Tensor, n: int) -> list[tf.Tensor]:
    """Packs int64 `indices` [k], ascending and distinct, each below `n`."""
    k = indices.shape[0]
    if form(n, k) == "bitmap":
        rows, width = _bitmap_shape(n)
        ones = tf.ones([k], tf.uint8)
        flags = tf.scatter_nd(indices[:, None], ones, tf.constant([rows * width], tf.int64))
        return [_pack_flags(tf.reshape(flags, [rows, width]))]
    return _pack_pages(indices, n)


@compiled
def _pack_flags(flags: tf.Tensor) -> tf.Tensor:
    return tf.reshape(bitpack.pack(flags, 1)[0], [-1])


@compiled
def _pack_pages(indices: tf.Tensor, n: int) -> list[tf.Tensor]:
    low = tf.cast(tf.bitwise.bitwise_and(indices, PAGE - 1), tf.uint16)
    if n <= PAGE:
        return [low]
    page = tf.bitwise.right_shift(indices, 16)
    pages = tf.range(math.ceil(n / PAGE), dtype=tf.int64)
    return [tf.reduce_sum(tf.cast(page == pages[:, None], tf.int32), 1), low]


def unpack(packed: Sequence[tf.Tensor], n: int, k: int) -> tf.Tensor:
    """The inverse of `pack`: int64 [k], ascending."""
    if form(n, k) == "bitmap":
        rows, width = _bitmap_shape(n)
        found = tf.where(_unpack_flags(tf.reshape(packed[0], [rows, width // 8])))[:, 0]
        # Exactly k: a damaged bitmap must not change the shape of what follows.
        return tf.ensure_shape(tf.concat([found, tf.zeros([k], tf.int64)], 0)[:k], [k])
    return _unpack_pages(list(packed), n)


@compiled
def _unpack_flags(packed: tf.Tensor) -> tf.Tensor:
    return tf.reshape(bitpack.unpack([packed], 1), [-1]) > 0


@compiled
def _unpack_pages(packed: list[tf.Tensor], n: int) -> tf.Tensor:
    low = tf.cast(packed[-1], tf.int64)
    if n <= PAGE:
        return low
    ends = tf.cumsum(packed[0])
    position = tf.range(low.shape[0], dtype=tf.int32)
    # How many pages have ended before this position.
    page = tf.reduce_sum(tf.cast(ends[:, None] <= position, tf.int32), 0)
    return tf.cast(page, tf.int64) * PAGE + low


def _bitmap_shape(n: int) -> tuple[int, int]:
    """The bitmap's bits as rows and columns."""
    bits = 8 * bitmap_bytes(n)
    return (1, bits) if n <= ROW else (bits // ROW, ROW)
