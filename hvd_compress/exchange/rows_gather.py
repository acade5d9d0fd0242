"""IndexedSlices: gradients of some rows of a table (an embedding), which differ from rank to rank and step to step.

1. Each rank sums what it has for the same row.
2. With what the ranks tell each other anyway (`tell`, `heard`) they learn how many rows each has.
3. Rows cross in an allgather, each compressed for itself (`compressors.rows`); or, where all ranks together have
   so many that less is sent that way, as the dense tensor that they stand for, as other gradients do. All ranks
   know the same numbers, and so choose alike.
4. Each rank sums the rows, rank after rank: in the same order everywhere, on a GPU, too, as no rank has a row twice.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from ..compressors import Seeds
from ..compressors.rows import Rows
from ..engine.grouping import TensorGroup
from ..engine.layout import flat
from ..engine.packing import FlatPacking
from ..formats.base import Shape
from ..kernels import noise
from . import choice, uncompressed
from .group import Group
from .local_input import LocalInput

# Numbers of rows are told as two float32, of which each holds less than 24 bits exactly.
_LOW = 4096


@dataclasses.dataclass(frozen=True)
class Table:
    """What is known of a table before the first step.

    Attributes:
        shape: Of the variable; rows first.
        dtype: Of its gradient's values.
        compressor: Of its rows; one that `Compressor.for_rows` returns.
        ranks: How many there are.
        limit: Bytes of float32 of a dense gradient that cross at once at most.
    """

    shape: Shape
    dtype: tf.DType
    compressor: Any
    ranks: int
    limit: int

    @property
    def columns(self) -> int:
        """Elements of a row."""
        return math.prod(self.shape[1:])

    @functools.cached_property
    def rows(self) -> Rows:
        """Their code."""
        return Rows(self.compressor, self.shape[0], self.columns, self.dtype)

    @functools.cached_property
    def layout(self) -> FlatPacking:
        """The chunks of the dense gradient, where that is compressed."""
        bucket, compressor = TensorGroup((0,), (self.shape,)), self.compressor
        found = flat(bucket, (compressor,), self.limit, self.ranks)
        return FlatPacking(found.tensors, found.multiple, found.alignment, found.largest)

    @functools.cached_property
    def dense_bytes(self) -> int:
        """What each rank sends of the dense gradient."""
        if self.compressor.uncompressed:
            size = 4 if self.dtype == tf.bfloat16 else self.dtype.size  # summed as float32
            return uncompressed.bytes_sent(math.prod(self.shape) * size, self.ranks)
        sent = 0
        for run in self.layout.in_buckets(self.limit):
            shapes = self.layout.shapes[run.start : run.stop]
            pattern = choice.choose(self.compressor, shapes, self.ranks)
            sent += pattern.bytes_sent(self.compressor, shapes, self.ranks)
        return sent

    @functools.cached_property
    def most_rows(self) -> int:
        """Up to so many rows of all ranks together, each rank sends less in rows than in the dense gradient.

        Both are a collective on the same link, so that bytes tell which is faster.
        """
        return self.dense_bytes * self.ranks // ((self.ranks - 1) * self.rows.nbytes)

    @property
    def wide(self) -> tf.DType:
        """In which dtype rows are summed: where they are compressed, and 16-bit floats, as float32."""
        if not self.dtype.is_floating:
            return tf.int64
        plain = self.compressor.uncompressed
        return self.dtype if plain and self.dtype.size > 2 else tf.float32

    def is_dense(self, counts: tf.Tensor) -> tf.Tensor:
        """Whether the gradient crosses as a dense tensor, a bool scalar; `counts`: rows of each rank, int64."""
        return tf.reduce_sum(counts) > self.most_rows

    def bytes_sent(self, rows: Any, dense: Any, given: Any) -> tuple[Any, Any]:
        """What each rank sends in a step, on average, and what stock Horovod sends; numbers or int64 tensors.

        Args:
            rows: How many all ranks have together.
            dense: 1 if they cross as a dense tensor, else 0.
            given: This rank's slices, before those of the same row are summed. As if all ranks had as many.
        """
        in_rows = (self.ranks - 1) * rows * self.rows.nbytes // self.ranks
        # Horovod gathers values and, as int64, numbers of rows.
        plain = (self.ranks - 1) * given * (self.columns * self.dtype.size + 8)
        return dense * self.dense_bytes + (1 - dense) * in_rows, plain


class Merged(NamedTuple):
    """A rank's slices of one table."""

    rows: tf.Tensor  # int64 [n], each of them once
    values: tf.Tensor  # [n, columns], the sums; see `Table.wide`
    given: tf.Tensor  # int64, how many there were before


class Feedback(NamedTuple):
    """Where a table's losses stay."""

    residual: Any  # tf.Variable in the table's shape; None without error feedback
    decay: float
    seeds: Seeds


class RowsReduction(NamedTuple):
    """What came of one table."""

    rows: tf.Tensor  # int64 [m], each of them once
    values: tf.Tensor  # [m, columns], scaled sums; both the same on all ranks
    kept_rows: tf.Tensor  # int64 [k], whose residuals change
    kept: tf.Tensor  # [k, columns], to these
    norms: tf.Tensor  # float32 [2], of gradient + residual on this rank, and of what compression lost of that


def merge(table: Table, slices: tf.IndexedSlices) -> Merged:
    """Sums the values of each row."""
    indices = tf.cast(slices.indices, tf.int64)
    # A row that is not there stays one that is not there, for the optimizer to refuse or to ignore as ever.
    none = tf.constant(table.shape[0], tf.int64)
    indices = tf.where((indices >= 0) & (indices < none), indices, none)
    rows, place = tf.unique(indices, tf.int64)
    values = tf.reshape(tf.cast(slices.values, table.wide), [-1, table.columns])
    summed = tf.math.unsorted_segment_sum(values, place, tf.size(rows))
    return Merged(rows, summed, tf.size(indices, out_type=tf.int64))


def tell(merged: Sequence[Merged], group: Group) -> tf.Tensor:
    """How many rows of each table this rank has, float32 [2 * tables * ranks]: to be summed over the ranks."""
    counts = tf.stack([tf.size(m.rows, out_type=tf.int64) for m in merged])
    halves = tf.cast(tf.stack([counts // _LOW, counts % _LOW]), tf.float32)
    place = np.zeros(group.size, np.float32)
    place[group.rank] = 1.0
    return tf.reshape(halves[:, :, None] * place, [-1])


def heard(told: tf.Tensor, tables: int, group: Group, averaged: bool) -> tf.Tensor:
    """What all ranks told, int64 [tables, ranks]."""
    halves = tf.reshape(told * float(group.size) if averaged else told, [2, tables, group.size])
    high, low = tf.unstack(tf.cast(tf.round(halves), tf.int64))
    return high * _LOW + low


def reduce(
    tables: Sequence[Table],
    merged: Sequence[Merged],
    feedback: Sequence[Feedback],
    counts: tf.Tensor,
    op: Any,
    predivide: float,
    group: Group,
) -> list[RowsReduction]:
    """Sums the rows of all ranks.

    Args:
        tables: The tables.
        merged: What this rank has for each.
        feedback: The residuals of each.
        counts: How many rows each rank has, int64 [tables, ranks], the same on all ranks.
        op: hvd.Average or hvd.Sum.
        predivide: As in `uncompressed.reduce`.
        group: The ranks.
    """
    mine = [_Mine(*row) for row in zip(tables, merged, feedback)]
    scale = predivide / group.size if op == hvd.Average else 1.0
    with tf.device("CPU"):
        dense = [m.table.is_dense(count) for m, count in zip(mine, tf.unstack(counts))]
    encoded = [_either(d, m, m.nothing, functools.partial(m.encode, predivide)) for d, m in zip(dense, mine)]
    gathered = hvd.grouped_allgather(
        [tf.ensure_shape(payload, [None, m.table.rows.nbytes]) for m, (payload, *_) in zip(mine, encoded)],
        **group.keywords("_rows"),
    )
    found = []
    for t, (m, payload, (_, left, norms)) in enumerate(zip(mine, gathered, encoded)):
        own = dataclasses.replace(group, name=group.name and f"{group.name}_dense_{t}")
        in_rows = functools.partial(m.in_rows, payload, left, norms, counts[t], scale)
        as_dense = functools.partial(m.as_dense, op, predivide, scale, own)
        found.append(RowsReduction(*_either(dense[t], m, as_dense, in_rows)))
    return found


def _either(dense: tf.Tensor, mine: _Mine, as_dense: Callable[[], Any], in_rows: Callable[[], Any]) -> Any:
    """What holds for this step; without the branch that cannot."""
    table = mine.table
    # One more than all of them: see `merge`.
    possible = table.most_rows < table.ranks * (table.shape[0] + 1)
    return tf.cond(dense, as_dense, in_rows) if possible else in_rows()


class _Mine(NamedTuple):
    """One table on this rank."""

    table: Table
    merged: Merged
    feedback: Feedback

    def nothing(self) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """In place of `encode`."""
        payload = tf.zeros([0, self.table.rows.nbytes], tf.uint8)
        return payload, tf.zeros([0, self.table.columns], self.table.wide), tf.zeros([2])

    def encode(self, predivide: float) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """The rows as bytes, what these leave out, and the norms of `RowsReduction`."""
        rows, values, _ = self.merged
        residual, decay, seeds = self.feedback
        if predivide != 1.0:
            values = values / predivide
        if residual is not None:
            kept = tf.reshape(tf.cast(tf.gather(residual, rows), tf.float32), [-1, self.table.columns])
            values += kept if decay == 1.0 else decay * kept
        payload, left = self.table.rows.encode(rows, values, seeds)
        return payload, left, tf.stack([_norm(values), _norm(left)])

    def in_rows(
        self, gathered: tf.Tensor, left: tf.Tensor, norms: tf.Tensor, counts: tf.Tensor, scale: float
    ) -> RowsReduction:
        """The sum of what all ranks sent, rank after rank."""
        payload = tf.ensure_shape(gathered, [None, self.table.rows.nbytes])
        rows, values = self.table.rows.decode(payload)
        distinct, place = tf.unique(rows, tf.int64)
        values = tf.cast(values, self.table.wide)
        total = tf.zeros([tf.size(distinct), self.table.columns], self.table.wide)
        with tf.device("CPU"):
            ends = tf.unstack(tf.cumsum(counts))
        for begin, end in zip([tf.zeros_like(ends[0]), *ends], ends):
            total = tf.tensor_scatter_nd_add(total, place[begin:end, None], values[begin:end])
        if scale != 1.0:
            exact = tf.float64 if total.dtype.is_integer else total.dtype
            total = tf.cast(tf.cast(total, exact) * scale, total.dtype)
        return RowsReduction(distinct, total, self.merged.rows, left, norms)

    def as_dense(self, op: Any, predivide: float, scale: float, group: Group) -> RowsReduction:
        """The sum of the dense tensors that all ranks' slices stand for."""
        table, (rows, values, _) = self.table, self.merged
        every = tf.range(table.shape[0], dtype=tf.int64)
        dense = tf.scatter_nd(rows[:, None], values, [table.shape[0], table.columns])
        if table.compressor.uncompressed:
            (total,) = uncompressed.reduce([tf.cast(dense, table.dtype)], op, predivide, group).tensors
            norms = tf.stack([_norm(dense), 0.0])
            return RowsReduction(every, tf.cast(total, table.wide), every[:0], values[:0], norms)
        residual, decay, seeds = self.feedback
        layout, ranks = table.layout, group.size
        dense = dense if predivide == 1.0 else dense / predivide
        chunks = layout.cut([dense], range(layout.count))
        residuals: list[Any] = [None] * layout.count
        if residual is not None:
            residuals = layout.cut([residual.read_value()], range(layout.count))
        totals, lefts = [], []
        for b, run in enumerate(layout.in_buckets(table.limit)):
            here = slice(run.start, run.stop)
            drawn = Seeds(*(noise.fold(seed, b) for seed in (seeds.shared, seeds.local)))
            share = LocalInput(chunks[here], residuals[here], decay, True, drawn)
            pattern = choice.choose(table.compressor, layout.shapes[here], ranks)
            own = dataclasses.replace(group, name=group.name and f"{group.name}_{b}")
            found = pattern.reduce(table.compressor, share, scale, own)
            totals += found.chunks
            lefts += found.residuals
        (total,), (left,) = (layout.join(some, [tf.float32]) for some in (totals, lefts))
        total, left = (tf.reshape(tensor, [table.shape[0], table.columns]) for tensor in (total, left))
        added = [chunk if r is None else chunk + decay * r for chunk, r in zip(chunks, residuals)]
        return RowsReduction(every, total, every, left, tf.stack([_norm(*added), _norm(left)]))


def _norm(*tensors: tf.Tensor) -> tf.Tensor:
    return tf.sqrt(tf.add_n([2.0 * tf.nn.l2_loss(tf.cast(tensor, tf.float32)) for tensor in tensors]))
