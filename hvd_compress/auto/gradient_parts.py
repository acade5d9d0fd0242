"""Which parts of the gradients `auto` simulates its candidates on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from ..engine.grouping import Shape

# The sample has about so many elements, in segments of the second number: quantizers scale blocks of 256.
_ELEMENTS, _SEGMENT = 2**16, 256
# A model-wide candidate is simulated on parts of so many matrices, each of at most so many elements.
_MATRICES, _MATRIX = 4, 2**16


class Segments(NamedTuple):
    """The elements of a gradient that are in the sample: every `stride`-th segment of `length` elements."""

    whole: int  # segments of the gradient; a rest is left out
    length: int
    stride: int

    @property
    def numel(self) -> int:
        """The number of elements in the sample."""
        return math.ceil(self.whole / self.stride) * self.length


def stride_of(sizes: Sequence[int]) -> int:
    """The stride with which gradients of these sizes have about `_ELEMENTS` elements in the sample."""
    return max(1, math.ceil(sum(sizes) / _ELEMENTS))


def segments(size: int, stride: int) -> Segments:
    """The segments of a gradient of so many elements."""
    length = min(size, _SEGMENT)
    count = size // length
    return Segments(count, length, min(stride, count))


def segments_of(members: Sequence[int], stride: int, gradients: Sequence[Any]) -> tf.Tensor:
    """The sample of all gradients, float32 [K]."""
    parts = []
    for i in members:
        flat = tf.reshape(gradients[i], [-1])
        of_gradient = segments(flat.shape[0], stride)
        if of_gradient.numel < flat.shape[0]:  # each operation lengthens the first trace
            rows = tf.reshape(flat[: of_gradient.whole * of_gradient.length], [of_gradient.whole, of_gradient.length])
            flat = tf.reshape(rows[:: of_gradient.stride], [-1])
        parts.append(flat)
    return tf.cast(tf.concat(parts, 0), tf.float32)


def part_of(i: int, matrix: Shape, shape: Shape, gradients: Sequence[Any]) -> tf.Tensor:
    """Rows and columns of a gradient at equal distances, float32 of `shape`."""
    every_row, every_column = (size // kept for size, kept in zip(matrix, shape))
    part = tf.reshape(gradients[i], matrix)[::every_row, ::every_column]
    return tf.cast(part[: shape[0], : shape[1]], tf.float32)


def matrices_of(candidate: Any, shapes: Mapping[int, Shape]) -> list[tuple[int, Shape, Shape]]:
    """The matrices on which a model-wide candidate is simulated: a gradient's position, its shape and that of its part.

    The elements of all matrices in their order are divided into `_MATRICES` equal shares. The matrix in the middle of
    each share is chosen, once if it is in several. So layers of all depths are, and small matrices among large ones
    are not.
    """
    matrices = {i: matrix for i, shape in shapes.items() if (matrix := candidate.matrix(shape)) is not None}
    if not matrices:
        matrices = {i: (1, math.prod(shape)) for i, shape in shapes.items()}  # nothing is compressed
    ends = np.cumsum([math.prod(matrix) for matrix in matrices.values()])
    middles = (np.arange(_MATRICES) + 0.5) / _MATRICES * ends[-1]
    chosen = sorted({list(matrices)[place] for place in np.searchsorted(ends, middles, "right")})
    return [(i, matrices[i], _part_shape(*matrices[i])) for i in chosen]


def _part_shape(rows: int, columns: int) -> Shape:
    """The shape of a part of at most `_MATRIX` elements that is as square as it can be.

    The thinner a part, the more of its noise is of low rank. Even in a square one, it is more than in a larger matrix.
    """
    side = math.isqrt(_MATRIX)
    rows_kept = min(rows, max(side, _MATRIX // columns))
    return rows_kept, min(columns, _MATRIX // rows_kept)
