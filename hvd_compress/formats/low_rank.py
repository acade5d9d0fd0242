"""Formats of `compressors.low_rank`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from .base import Format, Part, Shape, check_whole, size_of

LARGEST_RANK = 32
# Matrices that one kernel works on: enough that calls cost nothing beside it, and few enough to compile soon.
_AT_ONCE = 8


class Matrix(NamedTuple):
    """A tensor as a matrix, and the rank to which it is reduced."""

    rows: int
    columns: int
    rank: int


class Batch(NamedTuple):
    """Some of several tensors that are matrices of one shape."""

    members: tuple[int, ...]  # their positions
    matrix: Matrix


@dataclasses.dataclass(frozen=True)
class PowerSGD(Format):
    """Two thin factors of each matrix."""

    name: ClassVar[str] = "powersgd"
    per_tensor = True
    rank: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "rank", check_whole(self.rank, "rank", self.name, LARGEST_RANK))

    def parts(self, shape: Shape) -> list[Part]:
        """The left and the right factor, or all values where factors would be no fewer."""
        matrix = self.matrix(shape)
        if matrix is None:
            return [Part((size_of(shape),), "float32")]
        return [
            Part((matrix.rank, matrix.rows), "float32"),
            Part((matrix.rank, matrix.columns), "float32"),
        ]

    def matrix(self, shape: Shape) -> Matrix | None:
        """The matrix as which a tensor of this shape is seen; None where its factors would be no smaller.

        Dimensions are joined to rows and columns where these add up to the least: 3 x 3 x 64 x 128 (a kernel in
        Keras' order) becomes 576 x 128, which is PyTorch's matrix transposed; an attention's 768 x 12 x 64 becomes
        768 x 768.
        """
        if len(shape) < 2:
            return None
        splits = [(math.prod(shape[:i]), math.prod(shape[i:])) for i in range(1, len(shape))]
        rows, columns = min(splits, key=sum)
        rank = min(self.rank, rows, columns)
        return Matrix(rows, columns, rank) if rank * (rows + columns) < rows * columns else None

    def batches(self, shapes: Sequence[Shape]) -> list[Batch]:
        """Which of these tensors are reduced to factors, up to eight matrices of one shape at a time."""
        alike: dict[Matrix, list[int]] = {}
        for i, shape in enumerate(shapes):
            matrix = self.matrix(shape)
            if matrix is not None:
                alike.setdefault(matrix, []).append(i)
        return [
            Batch(tuple(members[first : first + _AT_ONCE]), matrix)
            for matrix, members in alike.items()
            for first in range(0, len(members), _AT_ONCE)
        ]
