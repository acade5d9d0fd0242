"""Whole blocks of matrices."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import tensorflow as tf

from .. import formats
from ..formats.base import Shape, num_kept
from ..kernels import select
from . import error_feedback as _residual
from .base import BuiltinCompressor, Encoded, Seeds
from .sparse import TopK, cleared, scattered_sum, taken


@dataclasses.dataclass(frozen=True)
class BlockSparse(formats.BlockSparse, BuiltinCompressor):
    """Keeps the k = max(1, ceil(ratio * m)) of the m blocks of `block` x `block` with the largest norms.

    A tensor is seen as a matrix of its last dimension by all the others (a kernel of 3 x 3 x 64 x 128 as
    576 x 128). Where `block` does not divide both sides, or the tensor has fewer than two dimensions, it is
    compressed as `topk` with the same ratio.

    Wire size: 4 k block^2 bytes of values plus 2 k of indices (as `topk`'s, over m blocks).

    Error: ||error||^2 <= (1 - k / m) ||x||^2 (Stich et al. 2018, Lemma A.1, with blocks for elements): a
    contraction, fed back.

    Attributes:
        ratio: The share of blocks that is kept, above 0 and at most 1.
        block: The side of a block, at least 1.
    """

    def encode(
        self,
        gradient: tf.Tensor,
        seeds: Seeds,
        residual: tf.Tensor | None = None,
        decay: float = 1.0,
        keep: bool = False,
    ) -> Encoded:
        """Selects blocks by their norms; see `Compressor.encode`."""
        shape = tuple(gradient.shape.as_list())
        grid = self.grid(shape)
        if grid is None:
            return TopK(self.ratio).encode(gradient, seeds, residual, decay, keep)
        x = _residual.add(gradient, residual, decay)
        m = math.prod(grid)
        tiles = tf.reshape(x, [grid[0], self.block, grid[1], self.block])
        tiles = tf.reshape(tf.transpose(tiles, [0, 2, 1, 3]), [m, self.block * self.block])
        # Of the norm, not its square: squares of small gradients vanish in float32.
        largest = tf.reduce_max(tf.abs(tiles), 1, keepdims=True)
        scaled = tf.math.divide_no_nan(tiles, largest)
        norms = largest[:, 0] * tf.sqrt(tf.reduce_sum(scaled * scaled, 1))
        chosen = select.top_k(norms, num_kept(self.ratio, m))
        left = self._matrix(cleared(tiles, chosen), shape) if keep else None
        return Encoded(taken(tiles, chosen), shape, left, _residual.all_finite(x))

    def decode_sum(self, ranks: Sequence[Sequence[tf.Tensor]], ctx: Shape, scale: tf.Tensor) -> tf.Tensor:
        """Adds the blocks, rank after rank, to zeros."""
        grid = self.grid(ctx)
        if grid is None:
            return TopK(self.ratio).decode_sum(ranks, ctx, scale)
        return self._matrix(scattered_sum(ranks, math.prod(grid), scale), ctx)

    def _matrix(self, tiles: tf.Tensor, shape: Shape) -> tf.Tensor:
        rows, columns = self.grid(shape) or (0, 0)
        tiles = tf.reshape(tiles, [rows, columns, self.block, self.block])
        return tf.reshape(tf.transpose(tiles, [0, 2, 1, 3]), shape)
