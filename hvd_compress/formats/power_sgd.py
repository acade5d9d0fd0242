"""Formats of `compressors.low_rank`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from .base import Format, Part, Shape, check_integer, size_of

LARGEST_RANK = 32


class Matrix(NamedTuple):
    """The shape of a tensor that is seen as a matrix."""

    rows: int
    columns: int


class Batch(NamedTuple):
    """Those of several tensors that are matrices of one shape."""

    members: tuple[int, ...]  # their positions
    matrix: Matrix
    rank: int


@dataclasses.dataclass(frozen=True)
class PowerSGD(Format):
    """Two thin factors of each matrix."""

    name: ClassVar[str] = "powersgd"
    per_tensor = True
    model_wide = True
    rank: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "rank", check_integer(self.rank, "rank", self.name, LARGEST_RANK))

    def parts(self, shape: Shape) -> list[Part]:
        """The left and the right factor, or all values where factors would be no fewer."""
        matrix = self.matrix(shape)
        if matrix is None:
            return [Part((size_of(shape),), "float32")]
        return [Part((self.rank, side), "float32") for side in matrix]

    def matrix(self, shape: Shape) -> Matrix | None:
        """The matrix as which a tensor of this shape is seen; None where its factors would be no smaller.

        Dimensions are joined to rows and columns where these add up to the least: 3 x 3 x 64 x 128 (a kernel in
        Keras' order) becomes 576 x 128, which is PyTorch's matrix transposed; an attention's 768 x 12 x 64 becomes
        768 x 768.
        """
        if len(shape) < 2:
            return None
        splits = [Matrix(math.prod(shape[:i]), math.prod(shape[i:])) for i in range(1, len(shape))]
        best = min(splits, key=sum)
        return best if self.rank * sum(best) < math.prod(best) else None

    def batches(self, shapes: Sequence[Shape]) -> list[Batch]:
        """Which of these tensors are reduced to factors, those of one shape together."""
        alike: dict[Matrix, list[int]] = {}
        for i, shape in enumerate(shapes):
            matrix = self.matrix(shape)
            if matrix is not None:
                alike.setdefault(matrix, []).append(i)
        return [Batch(tuple(members), matrix, self.rank) for matrix, members in alike.items()]
