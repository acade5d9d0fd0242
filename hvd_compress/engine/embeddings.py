"""The IndexedSlices of one step: summed by row, exchanged, and what stays of them for the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from ..compressors import Seeds
from ..exchange import rows_gather as slices
from ..exchange.group import Group
from ..monitor import recorder
from .plan import Plan


class SparseGradients:
    """What a `Step` does with the IndexedSlices of its plan.

    Attributes:
        outgoing: What this rank tells the others before; to be summed over the ranks, or averaged where the
            gradients are. Empty where there are no IndexedSlices.
        bytes_sent: In this step: sent, and sent by stock Horovod, float64 [tables, 2]; once they are reduced.
    """

    def __init__(
        self, plan: Plan, gradients: Sequence[Any], group: Group, seeds: Callable[[int], Seeds]
    ) -> None:
        """Sums what is for the same row.

        Args:
            plan: The plan.
            gradients: All of them.
            group: For the collectives.
            seeds: Of a bucket's number; tables come after the buckets.
        """
        self._plan, self._group, self._seeds = plan, group, seeds
        self._given = [gradients[i] for i in plan.sparse]
        self._tables = [param_group.table for param_group in plan.embeddings]
        self._found: list[slices.RowsReduction] = []
        with tf.device(plan.settings.device_sparse):
            self._merged = [slices.merge(*pair) for pair in zip(self._tables, self._given)]
            self.outgoing = [slices.tell(self._merged, group)] if self._merged else []
        self.bytes_sent = tf.zeros([0, 2], tf.float64)

    def reduce(self, told: Sequence[tf.Tensor]) -> list[tf.IndexedSlices]:
        """The reduced gradients, in the order of `plan.sparse`; `told`: of `outgoing`, reduced."""
        if not told:
            return []
        plan, settings = self._plan, self._plan.settings
        averaged = settings.op == hvd.Average
        with tf.device(settings.device_sparse):
            with tf.device("CPU"):  # sizes, which TensorFlow needs there
                counts = slices.heard(told[0], len(self._tables), self._group, averaged)
            feedback = [
                slices.Feedback(
                    param_group.state.residuals[0] if param_group.state.residuals else None,
                    settings.residual_decay,
                    self._seeds(len(plan.buckets) + t),
                )
                for t, param_group in enumerate(plan.embeddings)
            ]
            predivide = settings.gradient_predivide_factor
            exchanged = (self._tables, self._merged, feedback, counts)
            self._found = slices.reduce(*exchanged, settings.op, predivide, self._group)
            rows = zip(self._tables, self._given, self._found)
            reduced = [_like(own, table.shape, found) for table, own, found in rows]
        with tf.device("CPU"):
            self._count(counts)
        return reduced

    def _count(self, counts: tf.Tensor) -> None:
        """Remembers what the step cost."""
        dense = [tf.cast(t.is_dense(c), tf.int64) for t, c in zip(self._tables, tf.unstack(counts))]
        seen = tf.stack(
            [tf.reduce_sum(counts, 1), tf.stack(dense), tf.stack([m.given for m in self._merged])], 1
        )
        assert self._plan.slices is not None
        self._plan.slices.assign(seen)
        rows = zip(self._tables, tf.unstack(seen))
        sent = [tf.stack(table.bytes_sent(*tf.unstack(row))) for table, row in rows]
        self.bytes_sent = tf.cast(tf.stack(sent), tf.float64)

    @property
    def has_residuals(self) -> bool:
        """Whether there is anything for `keep` to do."""
        return any(param_group.state.residuals for param_group in self._plan.embeddings)

    def keep(self) -> None:
        """Puts the new residuals in place of the old ones, of the rows that were sent."""
        for param_group, found in zip(self._plan.embeddings, self._found):
            for variable in param_group.state.residuals:
                left = tf.reshape(tf.cast(found.kept, variable.dtype), [-1, *variable.shape[1:]])
                variable.scatter_nd_update(found.kept_rows[:, None], left)

    def norms(self, due: tf.Tensor) -> list[tf.Tensor]:
        """For the recorder: see `recorder.norms_of`; the gradient's is that of its rows."""
        found = []
        for param_group, merged, reduced in zip(self._plan.embeddings, self._merged, self._found):
            if param_group.compressor.uncompressed:
                found.append(recorder.nothing_lost(due))
                continue

            def take(
                merged: Any = merged, reduced: Any = reduced, state: Any = param_group.state
            ) -> tf.Tensor:
                owed = recorder.norm_of(state.residuals)
                return tf.concat([[recorder.norm_of([merged.values])], reduced.norms, [owed]], 0)

            found.append(tf.cond(due, take, recorder.not_measured))
        return found


def _like(own: tf.IndexedSlices, shape: Sequence[int], found: slices.RowsReduction) -> tf.IndexedSlices:
    """What was found, in the dtypes of this rank's own slices of a table of this shape."""
    values = tf.cast(tf.reshape(found.values, [-1, *shape[1:]]), own.dtype)
    return tf.IndexedSlices(values, tf.cast(found.rows, own.indices.dtype), own.dense_shape)
