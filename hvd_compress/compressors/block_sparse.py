"""Whole blocks of matrices."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import tensorflow as tf

from .. import formats
from ..formats.base import Shape
from ..kernels.native import NativeFormat
from . import error_feedback as feedback
from .base import ChunkInput, Encoded
from .registry import register
from .sparse import TopK, encode_rows, scatter_sum


@register
@dataclasses.dataclass(frozen=True)
class BlockSparse(formats.BlockSparse, TopK):
    """Keeps the k = max(1, ceil(ratio * m)) of the m blocks of `block` x `block` with the largest norms.

    A tensor is treated as a matrix: its last dimension gives the columns, all others the rows (a kernel of
    3 x 3 x 64 x 128 is 576 x 128). If `block` does not divide both, or the tensor has fewer than two
    dimensions, it is compressed as with `topk` of the same ratio.

    Wire size: 4 k block^2 bytes of values, plus indices: 2 k bytes (as with `topk`, over m blocks).

    Error: ||error||^2 <= (1 - k / m) ||x||^2 (Stich et al. 2018, Lemma A.1, with blocks for elements), a
    contraction: with error feedback.

    Attributes:
        ratio: The share of blocks that is kept, above 0 and at most 1.
        block: The side of a block, at least 1.
    """

    @property
    def native_format(self) -> NativeFormat | None:
        """Native operations do not know blocks of matrices."""
        return None

    def _encode_chunk(self, chunk: ChunkInput) -> Encoded:
        grid = self.grid(chunk.shape)
        if grid is None:
            return super()._encode_chunk(chunk)
        x = chunk.sum()
        num_blocks = math.prod(grid)
        tiles = tf.reshape(x, [grid[0], self.block, grid[1], self.block])
        tiles = tf.reshape(tf.transpose(tiles, [0, 2, 1, 3]), [num_blocks, self.block * self.block])
        # The norm, not its square: squares of small gradients vanish in float32.
        largest = tf.reduce_max(tf.abs(tiles), 1, keepdims=True)
        scaled = tf.math.divide_no_nan(tiles, largest)
        norms = largest[:, 0] * tf.sqrt(tf.reduce_sum(scaled * scaled, 1))
        parts, rest = encode_rows(tiles, norms, self.ratio, chunk.keep)
        new_residual = None if rest is None else self._untile(rest, chunk.shape)
        return Encoded(parts, chunk.shape, new_residual, feedback.all_finite(x))

    def decode_sum(self, ranks: Sequence[Sequence[tf.Tensor]], ctx: Shape, scale: tf.Tensor) -> tf.Tensor:
        """Adds the blocks to zeros, one rank after another."""
        grid = self.grid(ctx)
        if grid is None:
            return super().decode_sum(ranks, ctx, scale)
        return self._untile(scatter_sum(ranks, math.prod(grid), scale), ctx)

    def _untile(self, tiles: tf.Tensor, shape: Shape) -> tf.Tensor:
        """Blocks [m, block * block] as a tensor of this shape."""
        rows, columns = self.grid(shape) or (0, 0)
        tiles = tf.reshape(tiles, [rows, columns, self.block, self.block])
        return tf.reshape(tf.transpose(tiles, [0, 2, 1, 3]), shape)
