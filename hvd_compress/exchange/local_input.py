"""What one rank contributes to the reduction of a bucket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from ..compressors import Compressor, Encoded, Seeds
from ..formats.base import Shape
from ..kernels.compile import fed_back


class LocalInput(NamedTuple):
    """The chunks of a bucket on one rank, and what encoding them needs."""

    chunks: Sequence[tf.Tensor]  # float32, of static shapes
    residuals: Sequence[tf.Tensor | None]  # one for each chunk, of the same shape
    decay: float  # of the residuals
    keep: bool  # whether new residuals are wanted
    seeds: Seeds
    factors: tf.Tensor | None = None  # of `FactorAllreduce`, float32, the same on all ranks
    # Of `Hierarchical`, bool scalar on the host: whether residuals of chunks that other ranks send between hosts may
    # be other than zero.
    has_foreign_residual: tf.Tensor | None = None
    first_chunk: int = 0  # the index of the first of `chunks`: each chunk draws other random numbers

    def sum(self, i: int) -> tf.Tensor:
        """Chunk `i` plus its decayed residual."""
        return fed_back(self.chunks[i], self.residuals[i], self.decay)

    def part(self, first: int, last: int) -> LocalInput:
        """The chunks from `first` to before `last`."""
        return self._replace(
            chunks=self.chunks[first:last],
            residuals=self.residuals[first:last],
            first_chunk=self.first_chunk + first,
        )

    @property
    def shapes(self) -> list[Shape]:
        """The shapes of the chunks."""
        return [tuple(chunk.shape.as_list()) for chunk in self.chunks]

    def encode(self, compressor: Compressor, i: int) -> Encoded:
        """Encodes chunk `i`."""
        seeds = self.seeds._replace(chunk=self.first_chunk + i)
        return compressor.encode(self.chunks[i], seeds, self.residuals[i], self.decay, self.keep)
