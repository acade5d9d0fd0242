"""A rotation of blocks of 64 or 16 elements.

The matrix is R = Q x Q x Q, a Kronecker product with Q = J / 2 - I: J is the 4x4 matrix of ones. Q is symmetric and
orthogonal, and so is R: it is its own inverse. All entries of R are 1/8 or -1/8, so R is a Hadamard matrix. A block in
which one value is large, and a constant block, both become 64 values of one magnitude. Blocks of 16 are rotated by
Q x Q.

A block is rotated in two steps: products with Q x Q (`within`), a 16x16 matrix, then sums of four values that are
16 apart (`across`), which XLA fuses with what surrounds them. Both divide a block into four quarters.
"""

from __future__ import annotations

import math

import numpy as np
import tensorflow as tf

from ..common import devices
from ..formats.hadamard import BLOCK
from .compile import compiled

_QUARTERS = 4
_WIDTH = BLOCK // _QUARTERS
_TWICE_Q = np.ones([4, 4], np.float32) - 2.0 * np.eye(4, dtype=np.float32)
_WITHIN = np.kron(_TWICE_Q, _TWICE_Q)


def within(blocks: tf.Tensor, scale: float = 1.0) -> tf.Tensor:
    """The first step: `scale` * 4 * Q x Q times each 16 values.

    On a CPU, TensorFlow multiplies by thin matrices faster than XLA. On a GPU, it rounds the values to 10 bits (TF32),
    and residuals would lack what was rounded off.

    Args:
        blocks: [rows, 64] or [rows, 16], or in quarters.
        scale: A factor.

    Returns:
        The blocks in quarters, [rows, 4, 16] or [rows, 4, 4].
    """
    width = math.prod(blocks.shape[1:]) // _QUARTERS
    if devices.has_gpu():
        products = _sums_within(tf.reshape(blocks, [-1, 4, 4]), scale)
    else:
        products = tf.matmul(tf.reshape(blocks, [-1, _WIDTH]), tf.constant(scale * _WITHIN))
    return tf.reshape(products, [-1, _QUARTERS, width])


@compiled
def _sums_within(blocks: tf.Tensor, scale: float) -> tf.Tensor:
    """`within` for `blocks` [rows, 4, 4], without a matrix product. Scaled first: sums must not overflow."""
    halfway = _across(scale * blocks, 1.0)
    a, b, c, d = (halfway[:, :, i] for i in range(4))
    total = (a + b) + (c + d)
    return total[:, :, None] - 2.0 * halfway


def across(blocks: tf.Tensor, scale: float = 1.0) -> tf.Tensor:
    """The second step: `scale` * 2 * Q along axis 1 of `blocks` [rows, 4, 16]; for use inside kernels.

    Blocks of 16, [rows, 4, 4], are returned as they are, without the factor: the first step is their whole rotation.
    """
    return _across(blocks, scale) if blocks.shape[2] == _WIDTH else blocks


def _across(blocks: tf.Tensor, scale: float) -> tf.Tensor:
    a, b, c, d = (blocks[:, i] for i in range(_QUARTERS))
    total = scale * ((a + b) + (c + d))
    return total[:, None] - (2.0 * scale) * blocks
