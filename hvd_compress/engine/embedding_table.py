"""The sizes and the compressor of an embedding. Numbers only."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import tensorflow as tf

from ..compressors import Compressor, NoCompression
from ..compressors.rows import Rows
from ..exchange import choice, uncompressed
from .grouping import Shape, TensorGroup
from .layout import FlatLayout, flat_layout


@dataclasses.dataclass(frozen=True)
class EmbeddingTable:
    """A variable whose gradient is IndexedSlices."""

    shape: Shape  # of the variable; rows first
    dtype: tf.DType  # of the gradient's values
    compressor: Compressor  # of the rows, see `Compressor.for_rows`
    ranks: int  # the world size
    limit: int  # the largest size of a bucket of the dense gradient, in bytes of float32
    on_gpu: bool  # whether that is encoded on a GPU
    max_rows: int  # rows of a gradient at most, each counted once
    automatic: bool = False  # whether `auto` decides if rows are sent with `compressor` or uncompressed

    @property
    def columns(self) -> int:
        """The elements of a row."""
        return math.prod(self.shape[1:])

    @functools.cached_property
    def uncompressed(self) -> EmbeddingTable:
        """The same, with uncompressed rows."""
        return dataclasses.replace(self, compressor=NoCompression(), automatic=False)

    @functools.cached_property
    def rows(self) -> Rows:
        """The code of its rows."""
        return Rows(self.compressor, self.shape[0], self.columns, self.dtype)

    @functools.cached_property
    def layout(self) -> FlatLayout:
        """The chunks of the dense gradient, where that is compressed."""
        gradient = TensorGroup((0,), (self.shape,))
        return flat_layout(gradient, (self.compressor,), self.limit, self.ranks, on_gpu=self.on_gpu)

    @functools.cached_property
    def dense_bytes(self) -> int:
        """The bytes that each rank sends of the dense gradient."""
        if self.compressor.uncompressed:
            return uncompressed.bytes_sent(math.prod(self.shape) * uncompressed.size_sent(self.dtype), self.ranks)
        sent = 0
        for chunks in self.layout.in_buckets(self.limit):
            shapes = self.layout.shapes[chunks.start : chunks.stop]
            collective = choice.choose(self.compressor, shapes, self.ranks)
            sent += collective.bytes_sent(self.compressor, shapes, self.ranks)
        return sent

    @functools.cached_property
    def most_rows(self) -> int:
        """The largest number of rows, of all ranks together, that is less to send than the dense gradient.

        Both exchanges are one collective on the same link, so the one with fewer bytes is faster.
        """
        return self.dense_bytes * self.ranks // ((self.ranks - 1) * self.rows.nbytes)

    @property
    def sum_dtype(self) -> tf.DType:
        """The dtype in which rows are summed: float32 for 16-bit floats and where rows are compressed."""
        if not self.dtype.is_floating:
            return tf.int64
        return self.dtype if self.compressor.uncompressed and self.dtype.size > 2 else tf.float32

    def is_dense(self, counts: tf.Tensor) -> tf.Tensor:
        """Whether the gradient is exchanged as a dense tensor, a bool scalar; `counts`: rows of each rank, int64."""
        return tf.reduce_sum(counts) > self.most_rows

    def bytes_sent(self, rows: Any, dense: Any, given: Any) -> tuple[Any, Any]:
        """The bytes that each rank sends in a step, on average, and those of stock Horovod.

        The arguments are the columns of `State.embedding_counts`, ints or int64 tensors. For stock Horovod, all ranks
        count as having as many slices as this one.
        """
        in_rows = (self.ranks - 1) * rows * self.rows.nbytes // self.ranks
        # Horovod gathers values and, as int64, numbers of rows.
        stock = (self.ranks - 1) * given * (self.columns * self.dtype.size + 8)
        return dense * self.dense_bytes + (1 - dense) * in_rows, stock
