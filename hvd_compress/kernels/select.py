"""Which elements of a vector are kept."""

from __future__ import annotations

import math
from collections.abc import Sequence

import tensorflow as tf

from ..formats.sizes import row_dtype, stride_blocks
from . import noise
from .compile import compiled, fed_back

# Below this size sorting out candidates first costs more than it saves.
_SMALL = 1 << 16
_SAMPLES = 1 << 15


def top_k(flat: tf.Tensor, k: int) -> tf.Tensor:
    """Indices, int64 [k] ascending, of the `k` largest |values| of float32 `flat` [n].

    Exact; of equal values the first ones win. On large vectors a threshold from a strided sample leaves
    few candidates to rank; where the sample misleads (fewer than k candidates), all elements are ranked.
    """
    n = flat.shape[0]
    magnitude = tf.abs(flat)
    if n <= _SMALL or 4 * k > n:
        return _first_largest(magnitude, None, k)
    sample = magnitude[:: max(1, n // _SAMPLES)]
    share = k / n * sample.shape[0]
    # Three standard deviations of the sample's count above k, so that k are found almost always.
    rank = min(sample.shape[0], math.ceil(share + 3.0 * math.sqrt(share) + 3.0))
    threshold = tf.math.top_k(sample, rank).values[-1]
    candidates = tf.where(magnitude >= threshold)[:, 0]
    return tf.cond(
        tf.size(candidates) >= k,
        lambda: _first_largest(tf.gather(magnitude, candidates), candidates, k),
        lambda: _first_largest(magnitude, None, k),
    )


def _first_largest(values: tf.Tensor, labels: tf.Tensor | None, k: int) -> tf.Tensor:
    """Labels (or positions) of the `k` largest values, in the order in which they stand."""
    least = tf.reduce_min(tf.math.top_k(values, k, sorted=False).values)
    # NaN compares as nothing: it is neither above nor equal, and the caller has noticed it elsewhere.
    above = values > least
    equal = tf.cast(values == least, tf.int64)
    room = k - tf.reduce_sum(tf.cast(above, tf.int64))
    chosen = tf.where(above | ((equal > 0) & (tf.cumsum(equal) <= room)))[:, 0]
    if labels is not None:
        chosen = tf.gather(labels, chosen)
    # With NaN among the values there may be fewer; the shape must not follow from values.
    chosen = tf.concat([chosen, tf.zeros([k], tf.int64)], 0)[:k]
    return tf.ensure_shape(chosen, [k])


def strided(flat: tf.Tensor, k: int) -> tf.Tensor:
    """`flat` [n] as [rows, k], whose columns are its `k` strided blocks; zeros fill the last row."""
    missing = stride_blocks(flat.shape[0], k) * k - flat.shape[0]
    if missing:
        # Outside of compiled kernels: padding inside costs twice the whole selection.
        flat = tf.concat([flat, tf.zeros([missing], flat.dtype)], 0)
    return tf.reshape(flat, [-1, k])


def unstrided(grid: tf.Tensor, n: int) -> tf.Tensor:
    """The inverse of `strided`: the first `n` elements, flat."""
    flat = tf.reshape(grid, [-1])
    return flat if flat.shape[0] == n else flat[:n]


@compiled
def strided_top1(
    gradient: tf.Tensor, residual: tf.Tensor | None, decay: float
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Of each column of gradient + decay * residual (float32 [rows, k]), the largest |element|.

    Returns its row (`row_dtype` [k]), its value (float32 [k]), and whether all elements are finite. The largest is
    found as one integer maximum over magnitudes whose lowest bits hold the row, so that near ties (closer
    than 2**-15 for up to 256 rows) may go to either.
    """
    grid = fed_back(gradient, residual, decay)
    rows = grid.shape[0]
    low = (1 << max(rows - 1, 1).bit_length()) - 1
    bits = tf.bitwise.bitwise_and(tf.bitcast(grid, tf.int32), 0x7FFFFFFF & ~low)
    # Of equal magnitudes the first row wins: a zero of the padding never stands before a real one.
    row = tf.reshape(tf.constant(low) - tf.range(rows, dtype=tf.int32), [rows, 1])
    best = tf.reduce_max(tf.bitwise.bitwise_or(bits, row), 0)
    # Infinities and NaN have the highest exponent, and are therefore among the largest.
    finite = tf.reduce_all(best < 0x7F800000)
    chosen = low - tf.bitwise.bitwise_and(best, low)
    where = strided_indices(chosen)
    old = None if residual is None else tf.gather(tf.reshape(residual, [-1]), where)
    values = fed_back(tf.gather(tf.reshape(gradient, [-1]), where), old, decay)
    return tf.cast(chosen, row_dtype(rows)), values, finite


@compiled
def strided_rest(
    gradient: tf.Tensor, residual: tf.Tensor | None, decay: float, rows: tf.Tensor, sent: tf.Tensor
) -> tf.Tensor:
    """Gradient + decay * residual (float32 [rows, k]), less `sent` [k] at `rows` [k] of the columns."""
    grid = fed_back(gradient, residual, decay)
    row = tf.reshape(tf.range(grid.shape[0], dtype=tf.int32), [-1, 1])
    return tf.where(row == tf.cast(rows, tf.int32), grid - sent, grid)


@compiled
def strided_random(n: int, k: int, seed: tf.Tensor) -> tf.Tensor:
    """For each of `k` strided blocks of `n` elements, one row (int32 [k]), uniform by `seed`."""
    return noise.below(seed, strided_counts(n, k))


def strided_counts(n: int, k: int) -> tf.Tensor:
    """How many of the `n` elements lie in each of the `k` strided blocks, int32 [k]."""
    full = n - (stride_blocks(n, k) - 1) * k
    return tf.where(tf.range(k) < full, stride_blocks(n, k), stride_blocks(n, k) - 1)


def strided_indices(rows: tf.Tensor) -> tf.Tensor:
    """The vector's indices of int32 `rows` [k]: row * k + block."""
    k = rows.shape[0]
    return rows * k + tf.range(k, dtype=tf.int32)


def spread(ranks: Sequence[tuple[tf.Tensor, tf.Tensor]], n: int, scale: tf.Tensor) -> tf.Tensor:
    """Puts each rank's values (float32 [k]) at its rows (integers [k]) of the strided blocks, else zero.

    Sums over the ranks, in order, into float32 [n], and multiplies by `scale`.
    """
    depth = stride_blocks(n, ranks[0][0].shape[0])
    return unstrided(_spread([tuple(pair) for pair in ranks], depth, scale), n)


@compiled
def _spread(ranks: Sequence[tuple[tf.Tensor, tf.Tensor]], depth: int, scale: tf.Tensor) -> tf.Tensor:
    row = tf.reshape(tf.range(depth, dtype=tf.int32), [depth, 1])
    total = None
    for values, rows in ranks:
        put = tf.where(row == tf.cast(rows, tf.int32), values, 0.0)
        total = put if total is None else total + put
    return total * scale
