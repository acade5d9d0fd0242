"""Low-rank factors of matrices: one step of subspace iteration, in its parts.

The left factor of a matrix [rows, columns] is [rank, rows] and the right one [rank, columns], so that each vector
lies in one chunk; those of b matrices of one shape are one tensor [b, rank, ...].

Products with a matrix, which read all of it for a few numbers, are TensorFlow's own: XLA would compile each of them
for seconds. What makes a matrix of factors is compiled, so that it is written in one pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from . import noise
from .compile import compiled

# Up to this rank, matrices are made of factors vector by vector, in one pass.
_FEW = 8
# A vector of which the earlier ones leave less than this share is taken for a sum of them: what is left of it
# is mostly rounding, and would be scaled up to a direction of its own.
_DEPENDENT = 1e-3


@compiled
def start(seed: tf.Tensor, n: int) -> tf.Tensor:
    """`n` numbers for right factors to begin with, float32 in [-1, 1); `seed` is an int32 scalar."""
    return 2.0 * noise.uniform(seed, n) - 1.0


def left(matrix: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
    """A matrix times its right factor; float32 [rank, rows]."""
    return tf.matmul(right, matrix, transpose_b=True)


def right(matrix: tf.Tensor, left: tf.Tensor) -> tf.Tensor:
    """A matrix, transposed, times its left factor; float32 [rank, columns]."""
    return tf.matmul(left, matrix)


@compiled
def lost(matrix: tf.Tensor, left: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
    """What the factors' product lacks of the matrix."""
    return matrix - _product(left, right)


@compiled
def product(left: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
    """The matrix that the factors stand for, float32 [rows, columns]."""
    return _product(left, right)


def _product(left: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
    if left.shape[0] > _FEW:
        return tf.matmul(left, right, transpose_a=True)
    total = left[0][:, None] * right[0]
    for i in range(1, left.shape[0]):
        total += left[i][:, None] * right[i]
    return total


@compiled
def orthonormal(factors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Factors [b, rank, n] with orthonormal vectors in place of theirs, or zeros where one depends on those before.

    Cholesky QR, twice (Yamamoto et al. 2015): all but two products with the vectors is done on matrices of
    rank x rank, of all factors at once. Without matmul, which GPUs would round to 10 bits.
    """
    found = [scaled(factor)[0] for factor in factors]
    for _ in range(2):
        squares = tf.concat([tf.reduce_sum(x[:, :, None] * x[:, None], -1) for x in found], 0)
        parts = tf.split(_inverse_roots(squares), [x.shape[0] for x in found])
        found = [tf.reduce_sum(root[..., None] * x[:, None], 2) for root, x in zip(parts, found)]
    return found


def _inverse_roots(squares: tf.Tensor) -> tf.Tensor:
    """Lower triangular T with T S T^T = 1 for each of `squares` [any number, rank, rank].

    Rows and columns of zeros stand for vectors that depend on those before. Row by row it is what Gram and Schmidt
    do, with products that are known already.
    """
    rank = squares.shape[-1]
    size = tf.sqrt(tf.linalg.diag_part(squares))
    cosines = tf.math.divide_no_nan(squares, size[:, :, None] * size[:, None, :])
    unit = tf.eye(rank)
    rows: list[tf.Tensor] = []
    for i in range(rank):
        row = tf.broadcast_to(unit[i], [squares.shape[0], rank])
        for before in rows:
            row -= tf.reduce_sum(before * cosines[:, i], -1, keepdims=True) * before
        square = tf.reduce_sum(row[:, :, None] * cosines * row[:, None, :], [1, 2])[:, None]
        rows.append(tf.where(square > _DEPENDENT**2, row * tf.math.rsqrt(square), 0.0))
    return tf.math.divide_no_nan(tf.stack(rows, 1), size[:, None, :])


_roots = compiled(_inverse_roots)


def through(matrix: tf.Tensor, start: tf.Tensor) -> tf.Tensor:
    """The share of its energy that a matrix keeps where its left factor comes from `start`, a float32 scalar.

    With no kernel that is compiled for each shape; once orthogonalized, it is no more than an estimate.
    """
    product, _ = scaled(left(matrix, start))
    roots = _roots(tf.matmul(product, product, transpose_b=True)[None])[0]
    found = tf.matmul(roots, right(matrix, product))
    return tf.math.divide_no_nan(tf.reduce_sum(found * found), tf.reduce_sum(matrix * matrix))


def scaled(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Vectors [..., n] over their largest magnitudes, so that no square vanishes; and whether these are above 0."""
    largest = tf.reduce_max(tf.abs(x), -1, keepdims=True)
    return tf.math.divide_no_nan(x, largest), largest > 0.0
