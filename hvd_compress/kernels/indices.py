"""Sorted index sets in few bytes, of a size known beforehand.

Two forms; `form` names the smaller for given n and k:

* `pages`: 16 bits per index within pages of 65,536 elements, and the number of indices in each page
  (4 bytes a page; left out where there is only one page);
* `bitmap`: one bit per element.
"""

from __future__ import annotations

import math

import tensorflow as tf

from . import bitpack

PAGE = 65536
_ROW = 1024  # bitmap bits packed as one row


def form(n: int, k: int) -> str:
    """`"pages"` or `"bitmap"`, whichever takes fewer bytes for `k` of `n` indices."""
    return "bitmap" if _bitmap_bytes(n) < _pages_bytes(n, k) else "pages"


def specs(n: int, k: int) -> list[tf.TensorSpec]:
    """The tensors that `pack` returns for `k` of `n` indices."""
    if form(n, k) == "bitmap":
        return [tf.TensorSpec([_bitmap_bytes(n)], tf.uint8)]
    low = tf.TensorSpec([k], tf.uint16)
    return [low] if n <= PAGE else [tf.TensorSpec([math.ceil(n / PAGE)], tf.int32), low]


def pack(indices: tf.Tensor, n: int) -> list[tf.Tensor]:
    """Packs int32 `indices` [k], ascending and distinct, each below `n`."""
    k = indices.shape[0]
    if form(n, k) == "bitmap":
        rows = _bitmap_bytes(n) * 8 // _ROW if n > _ROW else 1
        width = min(_ROW, _bitmap_bytes(n) * 8)
        ones = tf.ones([k], tf.int32)
        flags = tf.cast(tf.scatter_nd(indices[:, None], ones, [rows * width]), tf.uint8)
        return [tf.reshape(bitpack.pack(tf.reshape(flags, [rows, width]), 1)[0], [-1])]
    low = tf.cast(tf.bitwise.bitwise_and(indices, PAGE - 1), tf.uint16)
    if n <= PAGE:
        return [low]
    pages = math.ceil(n / PAGE)
    ends = tf.searchsorted(indices, tf.range(1, pages + 1, dtype=tf.int32) * PAGE)
    return [ends - tf.concat([[0], ends[:-1]], 0), low]


def unpack(packed: list[tf.Tensor], n: int, k: int) -> tf.Tensor:
    """The inverse of `pack`: int32 [k], ascending."""
    if form(n, k) == "bitmap":
        width = min(_ROW, _bitmap_bytes(n) * 8)
        flags = tf.reshape(bitpack.unpack([tf.reshape(packed[0], [-1, width // 8])], 1), [-1])
        # Exactly k: a damaged bitmap must not change the shape of what follows.
        found = tf.cast(tf.where(flags > 0)[:, 0], tf.int32)[:k]
        return tf.ensure_shape(tf.pad(found, [[0, k - tf.size(found)]]), [k])
    low = tf.cast(packed[-1], tf.int32)
    if n <= PAGE:
        return low
    ends = tf.cumsum(packed[0])
    page = tf.searchsorted(ends, tf.range(k, dtype=tf.int32), side="right")
    return page * PAGE + low


def _bitmap_bytes(n: int) -> int:
    return 8 * math.ceil(n / 64) if n <= _ROW else _ROW // 8 * math.ceil(n / _ROW)


def _pages_bytes(n: int, k: int) -> int:
    return 2 * k + (4 * math.ceil(n / PAGE) if n > PAGE else 0)
