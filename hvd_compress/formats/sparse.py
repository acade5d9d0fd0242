"""Formats of `compressors.sparse`, `compressors.block_sparse` and `compressors.hybrid`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from ..common import checks
from .base import Format, Part, Shape, num_kept, size_of
from .quantize import block_parts
from .registry import register
from .sizes import index_parts, row_dtype, stride_blocks


def energies_of(noise: np.ndarray, block: int) -> np.ndarray:
    """The squares of the elements, [blocks, block]."""
    return np.square(noise[: noise.size // block * block].reshape(-1, block))


def share_left(energies: np.ndarray, count: int) -> float:
    """The share of the energy that the `count` largest leave out."""
    return float(1.0 - np.sort(energies)[-count:].sum() / energies.sum())


@register
@dataclasses.dataclass(frozen=True)
class TopK(Format):
    """The elements of largest magnitude, and their indices."""

    name = "topk"
    examples: ClassVar[tuple[str, ...]] = ("topk:ratio=0.01", "topk:ratio=0.3")
    sparse = True
    ratio: float

    def __post_init__(self) -> None:
        self._set(ratio=checks.ratio(f"{self.name}: ratio", self.ratio))

    def parts(self, shape: Shape) -> list[Part]:
        """The values, then the indices."""
        n = size_of(shape)
        k = num_kept(self.ratio, n)
        return [Part((k,), "float32"), *index_parts(n, k)]

    def estimated_noise_loss(self, noise: np.ndarray) -> float:
        """What is not among the largest."""
        return share_left(np.square(noise), max(1, round(self.ratio * noise.size)))


@dataclasses.dataclass(frozen=True)
class Strided(Format):
    """One element of each of k = max(1, ceil(ratio * n)) strided blocks."""

    ratio: float

    def __post_init__(self) -> None:
        self._set(ratio=checks.ratio(f"{self.name}: ratio", self.ratio))

    @property
    def alignment(self) -> int:  # type: ignore[override]
        """Makes all blocks equally long: 1 / ratio if that is an integer; also a multiple of 64 bytes, for slices."""
        size = round(1.0 / self.ratio)
        return math.lcm(16, size) if abs(size * self.ratio - 1.0) < 1e-9 else 16


@register
@dataclasses.dataclass(frozen=True)
class BlockTopK(Strided):
    """The largest element of each strided block."""

    name = "block_topk"
    examples = ("block_topk:ratio=0.05",)

    def parts(self, shape: Shape) -> list[Part]:
        """The values, then the row of each."""
        n = size_of(shape)
        k = num_kept(self.ratio, n)
        return [Part((k,), "float32"), Part((k,), row_dtype(stride_blocks(n, k)))]

    def estimated_noise_loss(self, noise: np.ndarray) -> float:
        """All but the largest of each block; of `hybrid`, the error of the codes is small beside it."""
        block = round(1.0 / self.ratio)
        return float(1.0 - np.mean(energies_of(noise, block).max(1)) / block)


@register
@dataclasses.dataclass(frozen=True)
class RandomK(Strided):
    """A random element of each strided block, the same on all ranks."""

    name = "randomk"
    examples = ("randomk:ratio=0.1", "randomk:ratio=0.1,unbiased=true")
    summable = True
    unbiased: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set(unbiased=checks.true_or_false("randomk: unbiased", self.unbiased))
        self._set(seed=checks.seed("randomk: seed", self.seed))

    def parts(self, shape: Shape) -> list[Part]:
        """The values."""
        return [Part((num_kept(self.ratio, size_of(shape)),), "float32")]

    def estimated_noise_loss(self, noise: np.ndarray) -> float:
        """All but the random elements."""
        return 1.0 - self.ratio


@register
@dataclasses.dataclass(frozen=True)
class Hybrid(BlockTopK):
    """The largest element of each strided block, in `bits` bits."""

    name = "hybrid"
    examples = ("hybrid:ratio=0.05,bits=4",)
    bits: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set(bits=checks.integer("hybrid: bits", self.bits, 1, 8))

    @property
    def value_bits(self) -> int:  # type: ignore[override]
        """The same as `bits`."""
        return self.bits

    def parts(self, shape: Shape) -> list[Part]:
        """The row of each value, then the parts of the quantized values."""
        values, rows = super().parts(shape)
        return [rows, *block_parts(size_of(values.shape), self.bits)]


@register
@dataclasses.dataclass(frozen=True)
class BlockSparse(TopK):
    """The blocks of matrices with the largest norms; elements where blocks do not fit."""

    name = "block_sparse"
    examples = ("block_sparse:ratio=0.1,block=4",)
    per_tensor = True
    block: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set(block=checks.integer("block_sparse: block", self.block, 1))

    def parts(self, shape: Shape) -> list[Part]:
        """The blocks' values, then their indices."""
        grid = self.grid(shape)
        if grid is None:
            return super().parts(shape)
        num_blocks = math.prod(grid)
        k = num_kept(self.ratio, num_blocks)
        return [Part((k, self.block * self.block), "float32"), *index_parts(num_blocks, k)]

    def estimated_noise_loss(self, noise: np.ndarray) -> float:
        """The blocks that are not among those with the largest norms."""
        energies = energies_of(noise, self.block**2).sum(1)
        return share_left(energies, max(1, round(self.ratio * energies.size)))

    def grid(self, shape: Sequence[Any]) -> tuple[int, int] | None:
        """How many rows and columns of blocks there are; None if blocks do not fit the tensor."""
        if len(shape) < 2:
            return None
        rows, columns = math.prod(shape[:-1]), shape[-1]
        if rows % self.block or columns % self.block:
            return None
        return rows // self.block, columns // self.block
