"""Which elements of a vector are kept."""

from __future__ import annotations

import math

import tensorflow as tf

from . import noise
from .compile import compiled

# Below this size sorting out candidates first costs more than it saves.
_SMALL = 1 << 16
_SAMPLES = 1 << 15


def top_k(flat: tf.Tensor, k: int) -> tf.Tensor:
    """Indices, int32 [k] ascending, of the `k` largest |values| of float32 `flat` [n].

    Exact. On large vectors a threshold from a strided sample leaves few candidates to sort; where
    the sample misleads (fewer than k candidates), all elements are sorted.
    """
    n = flat.shape[0]
    magnitude = tf.abs(flat)
    if n <= _SMALL or 4 * k > n:
        chosen = tf.math.top_k(magnitude, k, sorted=False).indices
        return tf.sort(chosen)
    sample = magnitude[:: max(1, n // _SAMPLES)]
    share = k / n * sample.shape[0]
    # Three standard deviations of the sample's count above k, so that k are found almost always.
    rank = min(sample.shape[0], math.ceil(share + 3.0 * math.sqrt(share) + 3.0))
    threshold = tf.math.top_k(sample, rank).values[-1]
    candidates = tf.cast(tf.where(magnitude >= threshold)[:, 0], tf.int32)

    def among_candidates() -> tf.Tensor:
        return tf.gather(candidates, tf.math.top_k(tf.gather(magnitude, candidates), k, sorted=False).indices)

    def among_all() -> tf.Tensor:
        return tf.math.top_k(magnitude, k, sorted=False).indices

    chosen = tf.cond(tf.size(candidates) >= k, among_candidates, among_all)
    return tf.sort(tf.ensure_shape(chosen, [k]))


def stride_blocks(n: int, k: int) -> int:
    """Elements per block when `n` elements form `k` blocks with stride k: j, j + k, j + 2k, ..."""
    return math.ceil(n / k)


@compiled
def strided_top1(flat: tf.Tensor, k: int) -> tf.Tensor:
    """For each of `k` strided blocks of `flat` [n], the row (int32 [k]) of its largest |value|.

    Element j + row * k of the vector is row `row` of block j. Magnitudes are compared in one integer
    maximum of their bits with the row in the low bits, so that values that agree in their leading
    bits may tie (within 2**-15 for blocks of up to 256). NaN counts as the largest.
    """
    n = flat.shape[0]
    rows = stride_blocks(n, k)
    grid = tf.reshape(tf.pad(flat, [[0, rows * k - n]]), [rows, k])
    low = (1 << max(rows - 1, 1).bit_length()) - 1
    bits = tf.bitwise.bitwise_and(tf.bitcast(tf.abs(grid), tf.int32), ~low)
    # Of equal magnitudes the first row wins: a zero of the padding never stands before a real one.
    row = tf.reshape(tf.constant(low) - tf.range(rows, dtype=tf.int32), [rows, 1])
    best = tf.reduce_max(tf.bitwise.bitwise_or(bits, row), 0)
    return low - tf.bitwise.bitwise_and(best, low)


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
def spread(values: tf.Tensor, rows: tf.Tensor, n: int, scale: tf.Tensor) -> tf.Tensor:
    """Puts float32 `values` [..., k] at int32 `rows` [..., k] of their strided blocks, else zero.

    Sums over the leading axes, in order, into float32 [n], and multiplies by `scale`.
    """
    k = values.shape[-1]
    depth = stride_blocks(n, k)
    values, rows = tf.reshape(values, [-1, k]), tf.reshape(rows, [-1, k])
    row = tf.reshape(tf.range(depth, dtype=tf.int32), [depth, 1])
    total = tf.where(row == rows[0], values[0], 0.0)
    for r in range(1, values.shape[0]):
        total += tf.where(row == rows[r], values[r], 0.0)
    flat = tf.reshape(total * scale, [-1])
    return flat if depth * k == n else flat[:n]


@compiled
def remove(flat: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    """`flat` [n] without what `rows` [k] chose: those elements become zero."""
    n, k = flat.shape[0], rows.shape[0]
    depth = stride_blocks(n, k)
    row = tf.reshape(tf.range(depth, dtype=tf.int32), [depth, 1])
    grid = tf.reshape(tf.pad(flat, [[0, depth * k - n]]), [depth, k])
    kept = tf.reshape(tf.where(row == rows, 0.0, grid), [-1])
    return kept if depth * k == n else kept[:n]
