"""What one rank contributes to the reduction of a bucket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from ..compressors import Compressor, Encoded, Seeds
from ..formats.base import Shape
from ..kernels import native
from ..kernels.compile import fed_back
from . import transfers


class LocalInput(NamedTuple):
    """The chunks of a bucket on one rank, and what encoding them needs."""

    # The pieces of each chunk, float32, of static shapes: one tensor in the chunk's shape, or several vectors. Native
    # operations read them where they are.
    pieces: Sequence[Sequence[tf.Tensor]]
    residuals: Sequence[tf.Tensor | None]  # one for each chunk, of the same shape
    decay: float  # of the residuals
    keep: bool  # whether new residuals are wanted
    seeds: Seeds
    factors: tf.Tensor | None = None  # of `FactorAllreduce`, float32, the same on all ranks
    # Of `Hierarchical`, bool scalar on the host: whether residuals of chunks that other ranks send between hosts may
    # be other than zero.
    has_foreign_residual: tf.Tensor | None = None
    first_chunk: int = 0  # the index of the first chunk: each chunk draws other random numbers
    joined: bool = False  # whether reduced chunks may come end to end in one tensor

    @property
    def num_chunks(self) -> int:
        """The number of chunks."""
        return len(self.pieces)

    def chunk(self, i: int) -> tf.Tensor:
        """Chunk `i`; several pieces are put together."""
        return transfers.concat(self.pieces[i])

    @property
    def chunks(self) -> list[tf.Tensor]:
        """All chunks."""
        return [self.chunk(i) for i in range(self.num_chunks)]

    def with_chunks(self, chunks: Sequence[tf.Tensor], residuals: Sequence[tf.Tensor | None]) -> LocalInput:
        """Other chunks, with these residuals."""
        return self._replace(pieces=[[chunk] for chunk in chunks], residuals=residuals)

    def sum(self, i: int) -> tf.Tensor:
        """Chunk `i` plus its decayed residual."""
        return fed_back(self.chunk(i), self.residuals[i], self.decay)

    def part(self, first: int, last: int) -> LocalInput:
        """The chunks from `first` to before `last`."""
        return self._replace(
            pieces=self.pieces[first:last],
            residuals=self.residuals[first:last],
            first_chunk=self.first_chunk + first,
        )

    @property
    def shapes(self) -> list[Shape]:
        """The shapes of the chunks."""
        return [native.shape_of(of_chunk) for of_chunk in self.pieces]

    def encode(self, compressor: Compressor, i: int) -> Encoded:
        """Encodes chunk `i`."""
        seeds = self.seeds._replace(chunk=self.first_chunk + i)
        return compressor.encode(self.chunk(i), seeds, self.residuals[i], self.decay, self.keep)
