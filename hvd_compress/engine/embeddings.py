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
from . import norms
from .embedding_table import EmbeddingTable
from .layout import FlatLayout
from .packing import pack, unpack
from .pipeline import BucketInput, StepContext, reduce_bucket
from .selector import FixedSelector
from .settings import Settings
from .state import BucketState, GroupState
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
    """One embedding in one step, on this rank.

    Attributes:
        table: Its shape, dtype and compressor.
        merged: This rank's rows.
        residual: A variable in the table's shape; None without error feedback.
        decay: The factor of the residual.
        seeds: For stochastic rounding.
        settings: The user's settings.
    """

    table: EmbeddingTable
    merged: Merged
    residual: tf.Variable | None
    decay: float
    seeds: Seeds
    settings: Settings

    @property
    def scale(self) -> float:
        """The factor of the sum over the ranks."""
        return self.settings.scale

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
            residuals = tf.cast(tf.gather(self.residual, rows), tf.float32)
            residuals = tf.reshape(residuals, [-1, self.table.columns])
            values += residuals if self.decay == 1.0 else self.decay * residuals
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
        if self.scale != 1.0:
            exact = tf.float64 if total.dtype.is_integer else total.dtype
            total = tf.cast(tf.cast(total, exact) * self.scale, total.dtype)
        return RowsReduction(distinct, total, self.merged.rows, residuals, norms_)

    def as_dense(self, group: Group) -> RowsReduction:
        """The sum of all ranks' dense gradients."""
        table, (rows, values, _) = self.table, self.merged
        every_row = tf.range(table.shape[0], dtype=tf.int64)
        dense = tf.scatter_nd(rows[:, None], values, [table.shape[0], table.columns])
        predivide = self.settings.gradient_predivide_factor
        if table.compressor.uncompressed:
            cast = tf.cast(dense, table.dtype)
            (total,) = uncompressed.reduce([cast], self.settings.op, predivide, group).tensors
            lost = tf.stack([_norm(dense), 0.0])
            return RowsReduction(every_row, tf.cast(total, table.sum_dtype), every_row[:0], values[:0], lost)
        layout, everything = table.layout, range(table.layout.count)
        residuals: list[Any] = [None] * layout.count  # the norms need new ones all the same
        if self.residual is not None:
            residuals = pack(layout, [self.residual.read_value()], everything)
        transforms = Transform() if predivide == 1.0 else Predivide(predivide)
        step = StepContext(self.scale, functools.partial(choice.choose, ranks=group.size), transforms, self.decay)
        totals: list[tf.Tensor] = []
        new_residuals: list[tf.Tensor] = []
        for b, chunks in enumerate(layout.in_buckets(table.limit)):
            result = self._reduce_chunks(dense, chunks, residuals, step, b, group)
            totals += result.chunks
            new_residuals += result.new_state.residuals
        added = dense if predivide == 1.0 else dense / predivide
        if self.residual is not None:
            added += self.decay * tf.reshape(tf.cast(self.residual.read_value(), tf.float32), dense.shape)
        total, lost = (self._dense(layout, some) for some in (totals, new_residuals))
        return RowsReduction(every_row, total, every_row, lost, tf.stack([_norm(added), _norm(lost)]))

    def _reduce_chunks(
        self, dense: tf.Tensor, chunks: range, residuals: list[Any], step: StepContext, b: int, group: Group
    ) -> Any:
        seeds = Seeds(*(noise.fold(seed, b) for seed in (self.seeds.shared, self.seeds.local)))
        own = dataclasses.replace(group, name=group.name and f"{group.name}_{b}")
        bucket = BucketInput(
            self.table.layout,
            chunks,
            FixedSelector(self.table.compressor),
            seeds,
            lambda compressor: own,
            BucketState(residuals[chunks.start : chunks.stop], [], [], []),
        )
        return reduce_bucket(bucket, [dense], step)

    def _dense(self, layout: FlatLayout, chunks: Sequence[tf.Tensor]) -> tf.Tensor:
        (tensor,) = unpack(layout, chunks, [tf.float32])
        return tf.reshape(tensor, [self.table.shape[0], self.table.columns])


class Embeddings:
    """The IndexedSlices of one step.

    Attributes:
        counts: The result of `pack_counts`, to be reduced with the gradients' op; [] without IndexedSlices.
        bytes_sent: Bytes sent by this rank, and by stock Horovod, float64 [embeddings, 2]; after `reduce`.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingTable],
        states: Sequence[GroupState],
        slices: Sequence[tf.IndexedSlices],
        group: Group,
        settings: Settings,
    ) -> None:
        """Sums the values of each row."""
        self._tables, self._states, self._slices = tables, states, slices
        self._group, self._settings = group, settings
        self._reductions: list[RowsReduction] = []
        with tf.device(settings.device_sparse):
            self._merged = [merge(*pair) for pair in zip(tables, slices)]
            self.counts = [pack_counts(self._merged, group)] if self._merged else []
        self.bytes_sent = tf.zeros([0, 2], tf.float64)

    def reduce(
        self, counts: Sequence[tf.Tensor], seeds: Sequence[Seeds], seen: tf.Variable | None
    ) -> list[tf.IndexedSlices]:
        """The reduced gradients.

        Args:
            counts: The attribute `counts`, reduced.
            seeds: The seeds of each embedding.
            seen: `State.embedding_counts`; this function assigns it.
        """
        if not counts:
            return []
        settings = self._settings
        with tf.device(settings.device_sparse):
            with tf.device("CPU"):  # sizes, which TensorFlow needs there
                of_ranks = unpack_counts(counts[0], len(self._tables), self._group, settings.averages)
            embeddings = [
                _Embedding(
                    table,
                    merged,
                    state.residuals[0] if state.residuals else None,
                    settings.residual_decay,
                    of_embedding,
                    settings,
                )
                for table, merged, state, of_embedding in zip(self._tables, self._merged, self._states, seeds)
            ]
            self._reductions = _reduce(embeddings, of_ranks, self._group)
            rows = zip(self._tables, self._slices, self._reductions)
            reduced = [_like(own, table.shape, reduction) for table, own, reduction in rows]
        with tf.device("CPU"):
            self._count(of_ranks, seen)
        return reduced

    def _count(self, counts: tf.Tensor, seen: tf.Variable | None) -> None:
        dense = [tf.cast(t.is_dense(c), tf.int64) for t, c in zip(self._tables, tf.unstack(counts))]
        now = tf.stack([tf.reduce_sum(counts, 1), tf.stack(dense), tf.stack([m.given for m in self._merged])], 1)
        assert seen is not None
        seen.assign(now)
        rows = zip(self._tables, tf.unstack(now))
        sent = [tf.stack(table.bytes_sent(*tf.unstack(row))) for table, row in rows]
        self.bytes_sent = tf.cast(tf.stack(sent), tf.float64)

    @property
    def has_residuals(self) -> bool:
        """Whether `assign_residuals` has anything to do."""
        return any(state.residuals for state in self._states)

    def assign_residuals(self) -> None:
        """Assigns the new residuals of the rows that were sent."""
        for state, reduction in zip(self._states, self._reductions):
            for variable in state.residuals:
                new = tf.reshape(tf.cast(reduction.residuals, variable.dtype), [-1, *variable.shape[1:]])
                variable.scatter_nd_update(reduction.residual_rows[:, None], new)

    def norms(self, sample: tf.Tensor) -> list[tf.Tensor]:
        """The norms of each embedding, as in `norms.NORMS`; the gradient's norm is that of its rows."""
        return [
            norms.lossless(sample)
            if table.compressor.uncompressed
            else tf.cond(sample, functools.partial(_norms, *row), norms.not_sampled)
            for table, row in zip(self._tables, zip(self._merged, self._reductions, self._states))
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
        own = dataclasses.replace(group, name=group.name and f"{group.name}_dense_{t}")
        as_dense = functools.partial(e.as_dense, own)
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


def _norms(merged: Merged, reduction: RowsReduction, state: GroupState) -> tf.Tensor:
    gradient, residual = norms.norm_of([merged.values]), norms.norm_of(state.residuals)
    return tf.concat([[gradient], reduction.norms, [residual]], 0)


def _norm(tensor: tf.Tensor) -> tf.Tensor:
    return tf.sqrt(2.0 * tf.nn.l2_loss(tf.cast(tensor, tf.float32)))
