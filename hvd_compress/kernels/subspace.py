"""Low-rank factors of matrices: the parts of one step of subspace iteration.

The left factor of a matrix [rows, columns] is [rank, rows] and the right one [rank, columns], so that each vector is
contiguous. The factors of b matrices of one shape are one tensor [b, rank, ...].

Products of a matrix and a factor use TensorFlow's matmul: XLA would take seconds to compile each. Products of two
factors are compiled, so that the matrix is written in one pass.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import tensorflow as tf

from . import noise
from .compile import compiled

# One pass computes the sum of so many outer products; with 32, it took six times as long as a matmul.
_MAX_OUTER_PRODUCTS = 8
# A vector counts as dependent on the earlier ones if less than this share of it is orthogonal to them: that rest is
# mostly rounding error, and would be scaled up to a random direction.
_DEPENDENT = 1e-3


def start(seed: tf.Tensor, n: int) -> tf.Tensor:
    """`n` random numbers for the first right factors, float32 in [-1, 1); `seed` is an int32 scalar.

    They are few, and mostly needed once: compiling this would take longer.
    """
    return 2.0 * noise.uniform(seed, n) - 1.0


def left(matrix: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
    """The left factor: a matrix times its right factor; float32 [rank, rows]."""
    return tf.matmul(right, matrix, transpose_b=True)


def right(matrix: tf.Tensor, left: tf.Tensor) -> tf.Tensor:
    """The right factor: a transposed matrix times its left factor; float32 [rank, columns]."""
    return tf.matmul(left, matrix)


@compiled
def lost(matrix: tf.Tensor, left: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
    """The matrix minus the product of its factors."""
    if left.shape[0] > _MAX_OUTER_PRODUCTS:
        return matrix - tf.matmul(left, right, transpose_a=True)
    return matrix - _outer_products(left, right)


def _outer_products(left: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
    return functools.reduce(tf.add, [p[:, None] * q for p, q in zip(tf.unstack(left), tf.unstack(right))])


def product(left: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
    """The product of two factors, float32 [rows, columns].

    Without matmul, so that it does not depend on the algorithm that a rank takes for it.
    """
    total = _first_product(left[:_MAX_OUTER_PRODUCTS], right[:_MAX_OUTER_PRODUCTS])
    for i in range(_MAX_OUTER_PRODUCTS, left.shape[0], _MAX_OUTER_PRODUCTS):
        total = _next_product(total, left[i : i + _MAX_OUTER_PRODUCTS], right[i : i + _MAX_OUTER_PRODUCTS])
    return total


_first_product = compiled(_outer_products)


@compiled
def _next_product(total: tf.Tensor, left: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
    return total + _outer_products(left, right)


@compiled
def orthonormal(factors: Sequence[tf.Tensor]) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Orthonormalizes the vectors of factors [b, rank, n]; a vector that depends on earlier ones becomes zero.

    Cholesky QR, twice (Yamamoto et al. 2015): except for two products with the vectors, it works on matrices of
    rank x rank, of all factors at once. Without matmul, which GPUs would round to 10 bits.

    Returns:
        The vectors, and the matrices [2, b, rank, rank] that `transformed` makes them of.
    """
    vectors, both = [scaled(factor)[0] for factor in factors], []
    for _ in range(2):
        squares = tf.concat([tf.reduce_sum(x[:, :, None] * x[:, None], -1) for x in vectors], 0)
        both.append(tf.split(_inverse_roots(squares), [x.shape[0] for x in vectors]))
        vectors = [tf.reduce_sum(root[..., None] * x[:, None], 2) for root, x in zip(both[-1], vectors)]
    return vectors, [tf.stack(pair) for pair in zip(*both)]


@compiled
def transformed(factors: Sequence[tf.Tensor], matrices: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The vectors that `orthonormal` makes of factors [b, rank, n] with these matrices [2, b, rank, rank].

    The order of each sum is fixed, so that ranks compute the same.
    """
    vectors = [scaled(factor)[0] for factor in factors]
    for i, both in enumerate(matrices):
        for root in tf.unstack(both):
            terms = [root[:, :, k, None] * vectors[i][:, None, k] for k in range(root.shape[-1])]
            vectors[i] = functools.reduce(tf.add, terms)
    return vectors


def _inverse_roots(squares: tf.Tensor) -> tf.Tensor:
    """Lower triangular T with T S T^T = 1 for each S of `squares` [any number, rank, rank].

    The rows and columns of dependent vectors are zero. This is the Gram-Schmidt process, computed from the inner
    products of the vectors.
    """
    rank = squares.shape[-1]
    norms = tf.sqrt(tf.linalg.diag_part(squares))
    cosines = tf.math.divide_no_nan(squares, norms[:, :, None] * norms[:, None, :])
    unit = tf.eye(rank)
    rows: list[tf.Tensor] = []
    for i in range(rank):
        row = tf.broadcast_to(unit[i], [squares.shape[0], rank])
        for earlier in rows:
            row -= tf.reduce_sum(earlier * cosines[:, i], -1, keepdims=True) * earlier
        square = tf.reduce_sum(row[:, :, None] * cosines * row[:, None, :], [1, 2])[:, None]
        rows.append(tf.where(square > _DEPENDENT**2, row * tf.math.rsqrt(square), 0.0))
    return tf.math.divide_no_nan(tf.stack(rows, 1), norms[:, None, :])


def next_start(right: tf.Tensor, old: tf.Tensor) -> tf.Tensor:
    """The right factors [..., rank, n] to start the next step with, scaled.

    Where a matrix is zero, the old factor remains a good start.
    """
    new, is_new = scaled(right)
    return tf.where(is_new, new, old)


def scaled(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Vectors [..., n] divided by their largest magnitudes, so that no square underflows; and if these are above 0."""
    largest = tf.reduce_max(tf.abs(x), -1, keepdims=True)
    return tf.math.divide_no_nan(x, largest), largest > 0.0
