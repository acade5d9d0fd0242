"""Packs sorted sets of indices into few bytes; the size depends on n and k only.

There are two forms, and `form` returns the smaller one for given n and k:

* `pages`: 16 bits per index within pages of 65,536 elements, and the number of indices in each page
  (4 bytes a page; omitted if there is only one page);
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


def unpack(packed: Sequence[tf.Tensor], n: int, k: int) -> tuple[tf.Tensor, tf.Tensor]:
    """The inverse of `pack`: int64 [k], ascending, and whether these are `k` indices below `n`.

    If the packed bytes are damaged, indices that are too large become n - 1, so that writes stay inside the tensor.
    """
    if form(n, k) == "bitmap":
        rows, width = _bitmap_shape(n)
        flags, count = _unpack_flags(tf.reshape(packed[0], [rows, width // 8]))
        indices = tf.where(flags)[:, 0]
        # Exactly k: a damaged bitmap must not change shapes.
        indices = tf.ensure_shape(tf.concat([indices, tf.zeros([k], tf.int64)], 0)[:k], [k])
        return _checked(indices, n, count == k)
    return _unpack_pages(list(packed), n)


@compiled
def _unpack_flags(packed: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    count = tf.reduce_sum(tf.cast(tf.raw_ops.PopulationCount(x=packed), tf.int32))
    return tf.reshape(bitpack.unpack([packed], 1), [-1]) > 0, count


@compiled
def _checked(indices: tf.Tensor, n: int, valid: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    return tf.minimum(indices, n - 1), valid & tf.reduce_all(indices < n)


@compiled
def _unpack_pages(packed: list[tf.Tensor], n: int) -> tuple[tf.Tensor, tf.Tensor]:
    low = tf.cast(packed[-1], tf.int64)
    if n <= PAGE:
        return tf.minimum(low, n - 1), tf.reduce_all(low < n)
    # In 64 bits, because the sum of damaged counts may be large.
    valid = tf.reduce_all(packed[0] >= 0) & (
        tf.reduce_sum(tf.cast(packed[0], tf.int64)) == tf.constant(low.shape[0], tf.int64)
    )
    ends = tf.cumsum(packed[0])
    position = tf.range(low.shape[0], dtype=tf.int32)
    # An index is in the page whose number is how many pages end at or before its position.
    page = tf.reduce_sum(tf.cast(ends[:, None] <= position, tf.int32), 0)
    indices = tf.cast(page, tf.int64) * PAGE + low
    return tf.minimum(indices, n - 1), valid & tf.reduce_all(indices < n)


def _bitmap_shape(n: int) -> tuple[int, int]:
    """Rows and columns of the bitmap's bits."""
    bits = 8 * bitmap_bytes(n)
    return (1, bits) if n <= ROW else (bits // ROW, ROW)
