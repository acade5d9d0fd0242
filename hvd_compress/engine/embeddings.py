"""Gradients of embeddings (IndexedSlices), whose rows differ from rank to rank and from step to step.

1. Each rank sums its values for the same row (`merge`).
2. Each rank sends its number of rows along with the uncompressed gradients (`pack_counts`, `unpack_counts`).
3. Rows are exchanged in an allgather, each compressed by itself (`compressors.rows`). If there are so many rows that
   the dense gradient is less to send, that is exchanged instead. All ranks know all counts, and so choose the same.
4. Each rank sums the rows, rank after rank. As no rank sends a row twice, the order is the same on all ranks, also on a
   GPU.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from ..compressors import Seeds
from ..exchange import choice, uncompressed
from ..exchange.group import Group
from ..kernels import noise
from ..kernels.compile import fed_back
from . import norms
from .embedding_table import EmbeddingTable
from .packing import pack, unpack
from .pipeline import BucketInput, StepContext, reduce_bucket
from .plan import Plan
from .selector import FixedSelector
from .settings import Settings
from .state import NO_STATE
from .transforms import Predivide, Transform

# A count is sent as two float32, high * _LOW + low: a float32 holds 24 bits exactly.
_LOW = 4096


class Merged(NamedTuple):
    """A rank's slices of one embedding, after `merge`."""

    rows: tf.Tensor  # int64 [n], each row once
    values: tf.Tensor  # [n, columns], the sums, of dtype `EmbeddingTable.sum_dtype`
    given: tf.Tensor  # int64, the number of slices before `merge`


class RowsReduction(NamedTuple):
    """The reduced gradient of one embedding."""

    rows: tf.Tensor  # int64 [m], each row once; the same on all ranks
    values: tf.Tensor  # [m, columns], the scaled sums; the same on all ranks
    residual_rows: tf.Tensor  # int64 [k], the rows whose residuals change
    residuals: tf.Tensor  # [k, columns], their new residuals
    norms: tf.Tensor  # float32 [2], of gradient + residual on this rank, and of what compression lost


def merge(table: EmbeddingTable, slices: tf.IndexedSlices) -> Merged:
    """Sums the values of each row."""
    indices = tf.cast(slices.indices, tf.int64)
    # Indices outside of the table stay outside: the optimizer refuses or ignores them, as without this package.
    missing = tf.constant(table.shape[0], tf.int64)
    indices = tf.where((indices >= 0) & (indices < missing), indices, missing)
    rows, place = tf.unique(indices, tf.int64)
    values = tf.reshape(tf.cast(slices.values, table.sum_dtype), [-1, table.columns])
    sums = tf.math.unsorted_segment_sum(values, place, tf.size(rows))
    return Merged(rows, sums, tf.size(indices, out_type=tf.int64))


def pack_counts(merged: Sequence[Merged], group: Group) -> tf.Tensor:
    """This rank's number of rows of each embedding, float32 [2 * embeddings * ranks]; to be summed over the ranks."""
    counts = tf.stack([tf.size(m.rows, out_type=tf.int64) for m in merged])
    halves = tf.cast(tf.stack([counts // _LOW, counts % _LOW]), tf.float32)
    place = np.zeros(group.size, np.float32)
    place[group.rank] = 1.0
    return tf.reshape(halves[:, :, None] * place, [-1])


def unpack_counts(packed: tf.Tensor, embeddings: int, group: Group, averaged: bool) -> tf.Tensor:
    """The inverse of `pack_counts` after the sum or average: the rows of all ranks, int64 [embeddings, ranks]."""
    halves = tf.reshape(packed * float(group.size) if averaged else packed, [2, embeddings, group.size])
    high, low = tf.unstack(tf.cast(tf.round(halves), tf.int64))
    return high * _LOW + low


@dataclasses.dataclass(frozen=True)
class _Embedding:
    """One embedding in one step, on this rank."""

    table: EmbeddingTable
    slices: tf.IndexedSlices  # the gradient
    merged: Merged  # the same, each row once
    residual: tf.Variable | None  # in the table's shape; None without error feedback
    seeds: Seeds  # for stochastic rounding
    settings: Settings

    def nothing(self) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """The result in place of `encode` if the dense gradient is exchanged: no rows."""
        payload = tf.zeros([0, self.table.rows.nbytes], tf.uint8)
        return payload, tf.zeros([0, self.table.columns], self.table.sum_dtype), tf.zeros([2])

    def encode(self) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """The rows as bytes, their new residuals, and `RowsReduction.norms`."""
        rows, values, _ = self.merged
        predivide = self.settings.gradient_predivide_factor
        if predivide != 1.0:
            values = values / predivide
        if self.residual is not None:
            residuals = tf.reshape(tf.gather(self.residual, rows), [-1, self.table.columns])
            values = fed_back(values, residuals, self.settings.residual_decay)
        payload, new_residuals = self.table.rows.encode(rows, values, self.seeds)
        return payload, new_residuals, tf.stack([_norm(values), _norm(new_residuals)])

    def in_rows(self, gathered: tf.Tensor, residuals: tf.Tensor, norms_: tf.Tensor, counts: tf.Tensor) -> RowsReduction:
        """The sum of the gathered rows, rank after rank."""
        payload = tf.ensure_shape(gathered, [None, self.table.rows.nbytes])
        rows, values = self.table.rows.decode(payload)
        distinct, place = tf.unique(rows, tf.int64)
        values = tf.cast(values, self.table.sum_dtype)
        total = tf.zeros([tf.size(distinct), self.table.columns], self.table.sum_dtype)
        with tf.device("CPU"):
            ends = tf.unstack(tf.cumsum(counts))
        for begin, end in zip([tf.zeros_like(ends[0]), *ends], ends):
            total = tf.tensor_scatter_nd_add(total, place[begin:end, None], values[begin:end])
        if self.settings.scale != 1.0:
            exact = tf.float64 if total.dtype.is_integer else total.dtype
            total = tf.cast(tf.cast(total, exact) * self.settings.scale, total.dtype)
        return RowsReduction(distinct, total, self.merged.rows, residuals, norms_)

    def as_dense(self, group: Group) -> RowsReduction:
        """The sum of all ranks' dense gradients."""
        table, settings, (rows, values, _) = self.table, self.settings, self.merged
        every_row = tf.range(table.shape[0], dtype=tf.int64)
        dense = tf.scatter_nd(rows[:, None], values, [table.shape[0], table.columns])
        predivide, decay = settings.gradient_predivide_factor, settings.residual_decay
        if table.compressor.uncompressed:
            cast = tf.cast(dense, table.dtype)
            (total,) = uncompressed.reduce([cast], settings.op, predivide, group).tensors
            lost = tf.stack([_norm(dense), 0.0])
            return RowsReduction(every_row, tf.cast(total, table.sum_dtype), every_row[:0], values[:0], lost)
        layout = table.layout
        residuals: list[Any] = [None] * layout.count  # the norms need new ones all the same
        if self.residual is not None:
            residuals = pack(layout, [self.residual.read_value()], range(layout.count))
        transforms = Transform() if predivide == 1.0 else Predivide(predivide)
        context = StepContext(settings.scale, functools.partial(choice.choose, ranks=group.size), transforms, decay)

        def bucket(b: int, chunks: range) -> BucketInput:
            seeds = Seeds(*(noise.fold(seed, b) for seed in (self.seeds.shared, self.seeds.local)))
            own_group = group.among(group.process_set, f"_{b}")
            state = NO_STATE._replace(residuals=residuals[chunks.start : chunks.stop])
            return BucketInput(layout, chunks, FixedSelector(table.compressor), seeds, lambda _: own_group, state)

        chunks = layout.in_buckets(table.limit)
        results = [reduce_bucket(bucket(b, of_bucket), [dense], context) for b, of_bucket in enumerate(chunks)]
        totals = [chunk for result in results for chunk in result.chunks]
        new_residuals = [residual for result in results for residual in result.new_state.residuals]
        added = dense if predivide == 1.0 else dense / predivide
        if self.residual is not None:
            added = fed_back(added, tf.reshape(self.residual.read_value(), dense.shape), decay)
        total, lost = (
            tf.reshape(unpack(layout, tensors, [tf.float32])[0], dense.shape) for tensors in (totals, new_residuals)
        )
        return RowsReduction(every_row, total, every_row, lost, tf.stack([_norm(added), _norm(lost)]))


class Embeddings:
    """The IndexedSlices of one step.

    Attributes:
        counts: The result of `pack_counts`, to be reduced with the gradients' op; [] without IndexedSlices.
        bytes_sent: Bytes sent by this rank, and by stock Horovod, float64 [embeddings, 2]; after `reduce`.
    """

    def __init__(self, plan: Plan, slices: Sequence[tf.IndexedSlices], group: Group, seeds: Sequence[Seeds]) -> None:
        """Sums the values of each row. There are `seeds` for each embedding."""
        self._plan, self._slices, self._group, self._seeds = plan, slices, group, seeds
        self._tables = plan.embeddings
        # Rows that `auto` does not compress yet have residuals, but nothing is in them.
        states = zip(self._tables, plan.state.embeddings)
        self._residuals = [None if t.compressor.uncompressed else next(iter(s.residuals), None) for t, s in states]
        self._embeddings: list[_Embedding] = []
        self._reductions: list[RowsReduction] = []
        with tf.device(plan.settings.device_sparse):
            self._merged = [merge(*pair) for pair in zip(self._tables, slices)]
            self.counts = [pack_counts(self._merged, group)] if slices else []
        self.bytes_sent = tf.zeros([0, 2], tf.float64)

    def reduce(self, counts: Sequence[tf.Tensor]) -> list[tf.IndexedSlices]:
        """The reduced gradients; `counts` is the attribute of this name, reduced."""
        if not counts:
            return []
        settings = self._plan.settings
        rows = zip(self._tables, self._slices, self._merged, self._residuals, self._seeds)
        self._embeddings = [_Embedding(*row, settings) for row in rows]
        with tf.device(settings.device_sparse):
            with tf.device("CPU"):  # sizes, which TensorFlow needs there
                of_ranks = unpack_counts(counts[0], len(self._embeddings), self._group, settings.averages)
            self._reductions = _reduce(self._embeddings, of_ranks, self._group)
            reduced = [_like(e.slices, e.table.shape, result) for e, result in zip(self._embeddings, self._reductions)]
        with tf.device("CPU"):
            self._count(of_ranks)
        return reduced

    def _count(self, counts: tf.Tensor) -> None:
        """Assigns `State.embedding_counts` and sets `bytes_sent`; `counts` as for `_reduce`."""
        tables = [e.table for e in self._embeddings]
        dense = [tf.cast(t.is_dense(c), tf.int64) for t, c in zip(tables, tf.unstack(counts))]
        now = tf.stack([tf.reduce_sum(counts, 1), tf.stack(dense), tf.stack([m.given for m in self._merged])], 1)
        assert self._plan.state.embedding_counts is not None
        self._plan.state.embedding_counts.assign(now)
        sent = [tf.stack(table.bytes_sent(*tf.unstack(row))) for table, row in zip(tables, tf.unstack(now))]
        self.bytes_sent = tf.cast(tf.stack(sent), tf.float64)

    @property
    def has_residuals(self) -> bool:
        """Whether `assign_residuals` has anything to do."""
        return any(residual is not None for residual in self._residuals)

    def assign_residuals(self) -> None:
        """Assigns the new residuals of the rows that were sent."""
        for e, reduction in zip(self._embeddings, self._reductions):
            if e.residual is not None:
                new = tf.reshape(tf.cast(reduction.residuals, e.residual.dtype), [-1, *e.residual.shape[1:]])
                e.residual.scatter_nd_update(reduction.residual_rows[:, None], new)

    def norms(self, sample: tf.Tensor) -> list[tf.Tensor]:
        """The norms of each embedding, as in `norms.NORMS`; the gradient's norm is that of its rows."""
        return [
            norms.lossless(sample)
            if e.table.compressor.uncompressed
            else tf.cond(sample, functools.partial(_norms, e, reduction), norms.not_sampled)
            for e, reduction in zip(self._embeddings, self._reductions)
        ]


def _reduce(embeddings: Sequence[_Embedding], counts: tf.Tensor, group: Group) -> list[RowsReduction]:
    """Sums the rows of all ranks; `counts`: the number of rows of each rank, int64 [embeddings, ranks]."""
    with tf.device("CPU"):
        dense = [e.table.is_dense(count) for e, count in zip(embeddings, tf.unstack(counts))]
    encoded = [_either(d, e.table, e.nothing, e.encode) for d, e in zip(dense, embeddings)]
    gathered = hvd.grouped_allgather(
        [tf.ensure_shape(payload, [None, e.table.rows.nbytes]) for e, (payload, *_) in zip(embeddings, encoded)],
        **group.keywords("_rows"),
    )
    reductions = []
    for t, (e, payload, (_, residuals, lost)) in enumerate(zip(embeddings, gathered, encoded)):
        as_dense = functools.partial(e.as_dense, group.among(group.process_set, f"_dense_{t}"))
        in_rows = functools.partial(e.in_rows, payload, residuals, lost, counts[t])
        reductions.append(RowsReduction(*_either(dense[t], e.table, as_dense, in_rows)))
    return reductions


def _either(dense: tf.Tensor, table: EmbeddingTable, as_dense: Callable[[], Any], in_rows: Callable[[], Any]) -> Any:
    """Calls `as_dense` or `in_rows`; no branch in the graph if the dense exchange can never send less."""
    # `merge` maps all missing rows to one row more than the table has.
    possible = table.most_rows < table.ranks * (table.shape[0] + 1)
    return tf.cond(dense, as_dense, in_rows) if possible else in_rows()


def _like(own: tf.IndexedSlices, shape: Sequence[int], reduction: RowsReduction) -> tf.IndexedSlices:
    """The reduction as IndexedSlices with the dtypes of `own`, for an embedding of this shape."""
    values = tf.cast(tf.reshape(reduction.values, [-1, *shape[1:]]), own.dtype)
    return tf.IndexedSlices(values, tf.cast(reduction.rows, own.indices.dtype), own.dense_shape)


def _norms(embedding: _Embedding, reduction: RowsReduction) -> tf.Tensor:
    residuals = [] if embedding.residual is None else [embedding.residual]
    gradient, residual = norms.norm_of([embedding.merged.values]), norms.norm_of(residuals)
    return tf.concat([[gradient], reduction.norms, [residual]], 0)


def _norm(tensor: tf.Tensor) -> tf.Tensor:
    return tf.sqrt(2.0 * tf.nn.l2_loss(tf.cast(tensor, tf.float32)))
