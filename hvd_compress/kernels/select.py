"""Which elements of a vector are kept."""

from __future__ import annotations

import math
from collections.abc import Sequence

import tensorflow as tf

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


def stride_blocks(n: int, k: int) -> int:
    """Elements per block when `n` elements form `k` blocks with stride k: j, j + k, j + 2k, ..."""
    return math.ceil(n / k)


def row_dtype(n: int, k: int) -> tf.DType:
    """The shortest integer that holds a row of `k` strided blocks of `n` elements."""
    rows = stride_blocks(n, k)
    return tf.uint8 if rows <= 256 else tf.uint16 if rows <= 65536 else tf.int32


@compiled
def strided_top1(
    gradient: tf.Tensor, residual: tf.Tensor | None, decay: float, k: int
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Of each of `k` strided blocks of gradient + decay * residual (float32 [n]), the largest |element|.

    Returns its row (`row_dtype` [k]), its value (float32 [k]), and whether all elements are finite. The largest is
    found as one integer maximum over magnitudes whose lowest bits hold the row, so that near ties (closer
    than 2**-15 for up to 256 rows) may go to either.
    """
    flat = fed_back(gradient, residual, decay)
    n = flat.shape[0]
    rows = stride_blocks(n, k)
    grid = tf.reshape(tf.pad(flat, [[0, rows * k - n]]) if rows * k > n else flat, [rows, k])
    low = (1 << max(rows - 1, 1).bit_length()) - 1
    bits = tf.bitwise.bitwise_and(tf.bitcast(grid, tf.int32), 0x7FFFFFFF & ~low)
    # Of equal magnitudes the first row wins: a zero of the padding never stands before a real one.
    row = tf.reshape(tf.constant(low) - tf.range(rows, dtype=tf.int32), [rows, 1])
    best = tf.reduce_max(tf.bitwise.bitwise_or(bits, row), 0)
    # Infinities and NaN have the highest exponent, and are therefore among the largest.
    finite = tf.reduce_all(best < 0x7F800000)
    chosen = low - tf.bitwise.bitwise_and(best, low)
    where = strided_indices(chosen)
    old = None if residual is None else tf.gather(residual, where)
    return tf.cast(chosen, row_dtype(n, k)), fed_back(tf.gather(gradient, where), old, decay), finite


@compiled
def strided_rest(
    gradient: tf.Tensor,
    residual: tf.Tensor | None,
    decay: float,
    rows: tf.Tensor,
    sent: tf.Tensor | float,
) -> tf.Tensor:
    """Gradient + decay * residual (float32 [n]), less `sent` [k] at `rows` [k] of the strided blocks."""
    flat = fed_back(gradient, residual, decay)
    n, k = flat.shape[0], rows.shape[0]
    depth = stride_blocks(n, k)
    row = tf.reshape(tf.range(depth, dtype=tf.int32), [depth, 1])
    grid = tf.reshape(tf.pad(flat, [[0, depth * k - n]]) if depth * k > n else flat, [depth, k])
    left = tf.reshape(tf.where(row == tf.cast(rows, tf.int32), grid - sent, grid), [-1])
    return left if depth * k == n else left[:n]


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


@compiled
def spread(ranks: Sequence[tuple[tf.Tensor, tf.Tensor]], n: int, scale: tf.Tensor) -> tf.Tensor:
    """Puts each rank's values (float32 [k]) at its rows (integers [k]) of the strided blocks, else zero.

    Sums over the ranks, in order, into float32 [n], and multiplies by `scale`.
    """
    k = ranks[0][0].shape[0]
    depth = stride_blocks(n, k)
    row = tf.reshape(tf.range(depth, dtype=tf.int32), [depth, 1])
    total = None
    for values, rows in ranks:
        put = tf.where(row == tf.cast(rows, tf.int32), values, 0.0)
        total = put if total is None else total + put
    flat = tf.reshape(total * scale, [-1])
    return flat if depth * k == n else flat[:n]
