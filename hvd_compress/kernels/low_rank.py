"""Low-rank factors of matrices: one step of subspace iteration, in its parts.

Of b matrices [rows, columns] of one shape, the left factors are [b, rank, rows] and the right ones
[b, rank, columns], so that each vector lies in one piece.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from . import noise
from .compile import compiled, fed_back

# Up to this rank, products are made vector by vector.
_FEW = 8
# A vector of which the earlier ones leave less than this share is taken for a sum of them: what is left of it
# is mostly rounding, and would be scaled up to a direction of its own.
_DEPENDENT = 1e-3


@compiled
def start(seed: tf.Tensor, b: int, rank: int, n: int) -> tf.Tensor:
    """Right factors to begin with, float32 [b, rank, n] of random vectors of norm 1; `seed` is an int32 scalar."""
    x = tf.reshape(2.0 * noise.uniform(seed, b * rank * n) - 1.0, [b, rank, n])
    return x / _norm(x)


@compiled
def left(
    matrices: Sequence[tf.Tensor], residuals: Sequence[tf.Tensor] | None, decay: float, right: tf.Tensor
) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """Each matrix, with its residual added, times its right factor.

    Args:
        matrices: float32 [rows, columns] each.
        residuals: The same, or bfloat16; None for none.
        decay: Of the residuals.
        right: float32 [b, rank, columns].

    Returns:
        The products, float32 [b, rank, rows]; the sums, or no tensors where there are no residuals.
    """
    sums = list(matrices)
    if residuals is not None:
        sums = [fed_back(matrix, residual, decay) for matrix, residual in zip(matrices, residuals)]
    products = tf.stack([_times(matrix, right[i], False) for i, matrix in enumerate(sums)])
    return products, [] if residuals is None else sums


@compiled
def right(matrices: Sequence[tf.Tensor], left: tf.Tensor) -> tf.Tensor:
    """Each matrix transposed times its left factor [b, rank, rows]; float32 [b, rank, columns]."""
    return tf.stack([_times(matrix, left[i], True) for i, matrix in enumerate(matrices)])


@compiled
def lost(matrices: Sequence[tf.Tensor], left: tf.Tensor, right: tf.Tensor) -> list[tf.Tensor]:
    """What the factors' products lack of the matrices."""
    return [matrix - _product(left[i], right[i]) for i, matrix in enumerate(matrices)]


@compiled
def products(left: tf.Tensor, right: tf.Tensor) -> list[tf.Tensor]:
    """The matrices that the factors stand for."""
    return [_product(left[i], right[i]) for i in range(left.shape[0])]


@compiled
def orthonormal(factors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Factors [b, rank, n] with orthonormal vectors in place of theirs, or zeros where one depends on those before.

    Gram-Schmidt, of each vector twice (Giraud, Langou and Rozloznik 2005: twice is enough).
    """
    return [_orthonormal(factor) for factor in factors]


@compiled
def unit(factors: Sequence[tf.Tensor], old: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Factors [b, rank, n] with vectors of norm 1, and the old ones where they are zero."""
    found = []
    for factor, before in zip(factors, old):
        size = _norm(factor)
        found.append(tf.where(size > 0.0, tf.math.divide_no_nan(factor, size), before))
    return found


def _times(matrix: tf.Tensor, vectors: tf.Tensor, transpose: bool) -> tf.Tensor:
    """`matrix` (transposed, if so) times each of `vectors` [rank, n]; [rank, the other side]."""
    if vectors.shape[0] > _FEW:
        return tf.matmul(vectors, matrix, transpose_b=not transpose)
    return tf.stack([tf.linalg.matvec(matrix, v, transpose_a=transpose) for v in tf.unstack(vectors)])


def _product(left: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
    """`left` [rank, rows], transposed, times `right` [rank, columns]."""
    if left.shape[0] > _FEW:
        return tf.matmul(left, right, transpose_a=True)
    # In one pass over the result, whatever is done with it.
    total = left[0][:, None] * right[0]
    for i in range(1, left.shape[0]):
        total += left[i][:, None] * right[i]
    return total


def _orthonormal(factor: tf.Tensor) -> tf.Tensor:
    found: list[tf.Tensor] = []
    for vector in tf.unstack(factor, axis=1):
        x = tf.math.divide_no_nan(vector, _norm(vector))
        if found:
            before = tf.stack(found, 1)  # [b, i, n]
            for _ in range(2):
                x -= tf.reduce_sum(tf.reduce_sum(before * x[:, None], -1, keepdims=True) * before, 1)
        size = _norm(x)
        found.append(tf.where(size > _DEPENDENT, x / size, 0.0))
    return tf.stack(found, 1)


def _norm(x: tf.Tensor) -> tf.Tensor:
    """2-norms of the last axis, which is kept; squares of what is small would vanish, so it is scaled first."""
    largest = tf.reduce_max(tf.abs(x), -1, keepdims=True)
    scaled = tf.math.divide_no_nan(x, largest)
    return largest * tf.sqrt(tf.reduce_sum(scaled * scaled, -1, keepdims=True))
