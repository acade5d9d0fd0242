"""Selection of the elements of a vector that are sent."""

from __future__ import annotations

import math
from collections.abc import Sequence

import tensorflow as tf

from ..formats.base import Shape, size_of
from ..formats.sizes import row_dtype, stride_blocks
from . import blocks, noise
from .compile import Terms, compiled, fed_back

# Up to this size, preselecting candidates costs more than it saves.
_SMALL = 1 << 16
_SAMPLES = 1 << 15


def top_k(flat: tf.Tensor, k: int) -> tf.Tensor:
    """Indices, int64 [k] ascending, of the `k` largest |values| of float32 `flat` [n].

    Exact; the first of equal values are selected. On large vectors, a threshold from a strided sample leaves
    few candidates to rank. If fewer than k candidates reach it, all elements are ranked.
    """
    n = flat.shape[0]
    magnitude = tf.abs(flat)
    if n <= _SMALL or 4 * k > n:
        return _first_largest(magnitude, None, k)
    sample = magnitude[:: max(1, n // _SAMPLES)]
    share = k / n * sample.shape[0]
    # Three standard deviations of the count in the sample, so that there are almost always k candidates.
    rank = min(sample.shape[0], math.ceil(share + 3.0 * math.sqrt(share) + 3.0))
    threshold = tf.math.top_k(sample, rank).values[-1]
    candidates = tf.where(magnitude >= threshold)[:, 0]
    return tf.cond(
        tf.size(candidates) >= k,
        lambda: _first_largest(tf.gather(magnitude, candidates), candidates, k),
        lambda: _first_largest(magnitude, None, k),
    )


def _first_largest(values: tf.Tensor, labels: tf.Tensor | None, k: int) -> tf.Tensor:
    """Labels (or positions) of the `k` largest values, in the order of their positions."""
    least = tf.reduce_min(tf.math.top_k(values, k, sorted=False).values)
    # NaN is neither above nor equal. The caller detects it elsewhere.
    above = values > least
    equal = tf.cast(values == least, tf.int64)
    num_equal = k - tf.reduce_sum(tf.cast(above, tf.int64))
    selected = tf.where(above | ((equal > 0) & (tf.cumsum(equal) <= num_equal)))[:, 0]
    if labels is not None:
        selected = tf.gather(labels, selected)
    # If values are NaN there may be fewer, but the shape must not depend on values.
    selected = tf.concat([selected, tf.zeros([k], tf.int64)], 0)[:k]
    return tf.ensure_shape(selected, [k])


def strided(flat: tf.Tensor, k: int) -> tf.Tensor:
    """`flat` [n] as [rows, k], whose columns are its `k` strided blocks; the last row is padded with zeros.

    The inverse is `blocks.from_blocks`.
    """
    missing = stride_blocks(flat.shape[0], k) * k - flat.shape[0]
    if missing:
        # Outside compiled kernels: inside, padding costs twice as much as the whole selection.
        flat = tf.concat([flat, tf.zeros([missing], flat.dtype)], 0)
    return tf.reshape(flat, [-1, k])


@compiled
def strided_top1(terms: Terms) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """The element of largest magnitude in each column of gradient + decay * residual (float32 [rows, k]).

    Returns its row (`row_dtype` [k]), its value (float32 [k]), and whether all elements are finite. It is found
    as one integer maximum over magnitudes whose lowest bits are replaced by the row, so that either of two close
    magnitudes (closer than 2**-15 for up to 256 rows) may be selected.
    """
    gradient, residual, decay = terms
    grid = fed_back(*terms)
    rows = grid.shape[0]
    row_mask = (1 << max(rows - 1, 1).bit_length()) - 1
    magnitudes = tf.bitwise.bitwise_and(tf.bitcast(grid, tf.int32), 0x7FFFFFFF & ~row_mask)
    # Rows count down, so that the first of equal magnitudes is selected: never a padding zero before a real one.
    row = tf.reshape(tf.constant(row_mask) - tf.range(rows, dtype=tf.int32), [rows, 1])
    largest = tf.reduce_max(tf.bitwise.bitwise_or(magnitudes, row), 0)
    # Infinities and NaN have the highest exponent, and are therefore among the largest.
    finite = tf.reduce_all(largest < 0x7F800000)
    selected = row_mask - tf.bitwise.bitwise_and(largest, row_mask)
    indices = strided_indices(selected)
    old = None if residual is None else tf.gather(tf.reshape(residual, [-1]), indices)
    values = fed_back(tf.gather(tf.reshape(gradient, [-1]), indices), old, decay)
    return tf.cast(selected, row_dtype(rows)), values, finite


@compiled
def strided_rest(terms: Terms, rows: tf.Tensor, sent: tf.Tensor) -> tf.Tensor:
    """Gradient + decay * residual (float32 [rows, k]) minus `sent` [k] at row `rows` [k] of each column."""
    grid = fed_back(*terms)
    row = tf.reshape(tf.range(grid.shape[0], dtype=tf.int32), [-1, 1])
    return tf.where(row == tf.cast(rows, tf.int32), grid - sent, grid)


@compiled
def strided_random(n: int, k: int, seed: tf.Tensor) -> tf.Tensor:
    """A random row, uniform by `seed`, of each of `k` strided blocks of `n` elements; int32 [k]."""
    return noise.below(seed, strided_counts(n, k))


def strided_counts(n: int, k: int) -> tf.Tensor:
    """The number of elements in each of `k` strided blocks of `n` elements, int32 [k]."""
    full = n - (stride_blocks(n, k) - 1) * k
    return tf.where(tf.range(k) < full, stride_blocks(n, k), stride_blocks(n, k) - 1)


def strided_indices(rows: tf.Tensor) -> tf.Tensor:
    """The indices in the flat vector of int32 `rows` [k]: row * k + block."""
    k = rows.shape[0]
    return rows * k + tf.range(k, dtype=tf.int32)


def spread(ranks: Sequence[tuple[tf.Tensor, tf.Tensor]], shape: Shape, scale: tf.Tensor) -> tf.Tensor:
    """Places each rank's values (float32 [k]) at its rows (integers [k]) of the strided blocks, among zeros.

    Returns the sum over the ranks, in their order, times `scale`; float32 of this shape. If a block does not have the
    row, its value is not written, and all of the result is NaN.
    """
    return blocks.from_blocks(_spread([tuple(pair) for pair in ranks], size_of(shape), scale), shape)


@compiled
def _spread(ranks: Sequence[tuple[tf.Tensor, tf.Tensor]], n: int, scale: tf.Tensor) -> tf.Tensor:
    k = ranks[0][0].shape[0]
    depth, counts = stride_blocks(n, k), strided_counts(n, k)
    row = tf.reshape(tf.range(depth, dtype=tf.int32), [depth, 1])
    total = None
    for values, rows in ranks:
        rows = tf.cast(rows, tf.int32)
        scale = tf.where(tf.reduce_all((rows >= 0) & (rows < counts)), scale, math.nan)
        placed = tf.where(row == rows, values, 0.0)
        total = placed if total is None else total + placed
    return total * scale
