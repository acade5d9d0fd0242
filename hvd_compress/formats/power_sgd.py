"""Format of `compressors.power_sgd`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..common import checks
from .base import Format, Part, Shape, size_of
from .registry import register
from .sparse import share_left

LARGEST_RANK = 32


class Matrix(NamedTuple):
    """The shape of the matrix that a tensor is treated as."""

    rows: int
    columns: int


class Batch(NamedTuple):
    """Several tensors that are treated as matrices of the same shape."""

    members: tuple[int, ...]  # their positions
    matrix: Matrix
    rank: int


@register
@dataclasses.dataclass(frozen=True)
class PowerSGD(Format):
    """Two thin factors of each matrix."""

    name = "powersgd"
    examples = ("powersgd:rank=2",)
    per_tensor = True
    model_wide = True
    rank: int

    def __post_init__(self) -> None:
        self._set(rank=checks.integer("powersgd: rank", self.rank, 1, LARGEST_RANK))

    def parts(self, shape: Shape) -> list[Part]:
        """The left and the right factor, or all values if factors would not be smaller."""
        matrix = self.matrix(shape)
        if matrix is None:
            return [Part((size_of(shape),), "float32")]
        return [Part((self.rank, side), "float32") for side in matrix]

    def matrix(self, shape: Shape) -> Matrix | None:
        """The matrix that a tensor of this shape is treated as; None if its factors would not be smaller.

        Adjacent dimensions are merged into rows and columns so that rows + columns is smallest: 3 x 3 x 64 x 128 (a
        kernel in Keras' order) becomes 576 x 128, which is PyTorch's matrix transposed; an attention's 768 x 12 x 64
        becomes 768 x 768.
        """
        if len(shape) < 2:
            return None
        splits = [Matrix(math.prod(shape[:i]), math.prod(shape[i:])) for i in range(1, len(shape))]
        best = min(splits, key=sum)
        return best if self.rank * sum(best) < math.prod(best) else None

    def estimated_noise_loss(self, noise: np.ndarray) -> float:
        """Of a square matrix, once the factors have converged: all but the largest singular values."""
        side = math.isqrt(noise.size)
        matrix = noise[: side * side].reshape(side, side)
        return share_left(np.square(np.linalg.svd(matrix, compute_uv=False)), self.rank)

    def batches(self, shapes: Sequence[Shape]) -> list[Batch]:
        """The tensors that are reduced to factors, grouped by the shape of their matrices."""
        members: dict[Matrix, list[int]] = {}
        for i, shape in enumerate(shapes):
            matrix = self.matrix(shape)
            if matrix is not None:
                members.setdefault(matrix, []).append(i)
        return [Batch(tuple(positions), matrix, self.rank) for matrix, positions in members.items()]
