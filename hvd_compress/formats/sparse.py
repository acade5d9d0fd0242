"""Formats of `compressors.sparse`, `compressors.block_sparse` and `compressors.hybrid`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar

from .base import Format, Part, Shape, check_flag, check_integer, check_ratio, check_seed, num_kept, size_of
from .quantize import block_parts
from .sizes import index_parts, row_dtype, stride_blocks


@dataclasses.dataclass(frozen=True)
class TopK(Format):
    """The largest elements, and where they are."""

    name: ClassVar[str] = "topk"
    sparse = True
    ratio: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "ratio", check_ratio(self.ratio, self.name))

    def parts(self, shape: Shape) -> list[Part]:
        """The values, then the indices."""
        n = size_of(shape)
        k = num_kept(self.ratio, n)
        return [Part((k,), "float32"), *index_parts(n, k)]


class Strided(Format):
    """One element of each of k = max(1, ceil(ratio * n)) strided blocks."""

    ratio: float

    @property
    def alignment(self) -> int:  # type: ignore[override]
        """Such that all blocks are of one size: 1 / ratio where that is whole, and 64 bytes for slices."""
        size = round(1.0 / self.ratio)
        return math.lcm(16, size) if abs(size * self.ratio - 1.0) < 1e-9 else 16

    def rows_of(self, n: int) -> Part:
        """Each block's row, for `n` elements."""
        k = num_kept(self.ratio, n)
        return Part((k,), row_dtype(stride_blocks(n, k)))


@dataclasses.dataclass(frozen=True)
class BlockTopK(Strided):
    """The largest element of each strided block."""

    name: ClassVar[str] = "block_topk"
    ratio: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "ratio", check_ratio(self.ratio, self.name))

    def parts(self, shape: Shape) -> list[Part]:
        """The values, then each block's row."""
        rows = self.rows_of(size_of(shape))
        return [Part(rows.shape, "float32"), rows]


@dataclasses.dataclass(frozen=True)
class RandomK(Strided):
    """A random element of each strided block, the same on all ranks."""

    name: ClassVar[str] = "randomk"
    summable = True
    ratio: float
    unbiased: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "ratio", check_ratio(self.ratio, self.name))
        object.__setattr__(self, "unbiased", check_flag(self.unbiased, "unbiased", self.name))
        object.__setattr__(self, "seed", check_seed(self.seed, self.name))

    def parts(self, shape: Shape) -> list[Part]:
        """The values."""
        return [Part((num_kept(self.ratio, size_of(shape)),), "float32")]


@dataclasses.dataclass(frozen=True)
class Hybrid(Strided):
    """The largest element of each strided block, in `bits` bits."""

    name: ClassVar[str] = "hybrid"
    ratio: float
    bits: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "ratio", check_ratio(self.ratio, self.name))
        object.__setattr__(self, "bits", check_integer(self.bits, "bits", self.name, 8))

    @property
    def value_bits(self) -> int:  # type: ignore[override]
        """The same as `bits`."""
        return self.bits

    def parts(self, shape: Shape) -> list[Part]:
        """Each block's row, then the parts of the quantized values."""
        rows = self.rows_of(size_of(shape))
        return [rows, *block_parts(size_of(rows.shape), self.bits)]


@dataclasses.dataclass(frozen=True)
class BlockSparse(Format):
    """The blocks of matrices with the largest norms."""

    name: ClassVar[str] = "block_sparse"
    sparse = True
    per_tensor = True
    ratio: float
    block: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "ratio", check_ratio(self.ratio, self.name))
        object.__setattr__(self, "block", check_integer(self.block, "block", self.name))

    def parts(self, shape: Shape) -> list[Part]:
        """The blocks' values, then their indices."""
        grid = self.grid(shape)
        if grid is None:
            return TopK(self.ratio).parts(shape)
        m = math.prod(grid)
        k = num_kept(self.ratio, m)
        return [Part((k, self.block * self.block), "float32"), *index_parts(m, k)]

    def grid(self, shape: Sequence[Any]) -> tuple[int, int] | None:
        """Rows and columns of blocks, or None where they do not fit."""
        if len(shape) < 2:
            return None
        rows, columns = math.prod(shape[:-1]), shape[-1]
        if rows % self.block or columns % self.block:
            return None
        return rows // self.block, columns // self.block
