"""Factors of matrices, summed in two allreduces for all of them (Vogels et al. 2019, PowerSGD, Algorithms 1 and 2).

Both products are linear in the matrix, so that the sum of the ranks' products is that of the ranks' sum: all
ranks go through the same step of subspace iteration of the summed matrix.

1. Each rank multiplies its matrices M, residuals added, by the right factors Q of the step before; allreduce.
2. All ranks make the same orthonormal P of the sum; each multiplies M^T P; allreduce: the new Q.
3. Each rank keeps M - P (M^T P)^T while that crosses, and then decodes P Q^T.

The residual is that of the rank's own product, as in the paper: over all ranks the same is kept as with the mean in
its place, but it stays small where ranks differ. A value that is not finite makes the sum of step 1 not finite, so
that all ranks know of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import horovod.tensorflow as hvd
import tensorflow as tf

from ..compressors import PowerSGD
from ..compressors import error_feedback as residual
from ..formats.power_sgd import Batch
from ..kernels import subspace as low_rank
from . import common
from .common import Group, LocalInput, Reduction
from .send_order import at_once, next_turn
from .volume import low_rank as bytes_sent  # noqa: F401  (what each rank sends)


def reduce(compressor: PowerSGD, share: LocalInput, scale: float, group: Group) -> Reduction:
    """Sums the ranks' chunks, times `scale`; without `share.factors` from those of the first step."""
    shapes = [tuple(chunk.shape.as_list()) for chunk in share.chunks]
    batches = compressor.batches(shapes)
    order = [i for batch in batches for i in batch.members]
    whole = sorted(set(range(len(shapes))) - set(order))
    factors = compressor.initial_factors(shapes) if share.factors is None else share.factors
    old = _cut(factors, batches, "columns")

    brought = [share.sum(i) for i in range(len(shapes))]
    matrices = [tf.reshape(brought[i], batch.matrix) for batch in batches for i in batch.members]
    mine = [low_rank.left(matrix, right) for matrix, right in zip(matrices, _each(old))]
    outgoing = _flat([*mine, *(brought[i] for i in whole)])
    total = incoming = _allreduce(outgoing, group, "_left")
    ok = residual.all_finite(total)

    residuals: list[tf.Tensor | None] = [None] * len(shapes)
    for i in whole if share.keep else ():
        residuals[i] = tf.zeros_like(brought[i])
    lefts: list[tf.Tensor] = []
    between = None
    if batches:
        found = low_rank.orthonormal(_cut(total, batches, "rows"))
        lefts = _each(found)
        mine = [low_rank.right(matrix, left) for matrix, left in zip(matrices, lefts)]
        second = _flat(mine)
        between = total, second
        incoming = _allreduce(second, group, "_right")
        ok = common.all_of([ok, residual.all_finite(incoming)])
        new = [low_rank.scaled(right) for right in _cut(incoming, batches, "columns")]
        # Where nothing was found, the start is still good.
        factors = _flat([tf.where(is_new, x, before) for (x, is_new), before in zip(new, old)])
        if share.keep:
            with tf.control_dependencies([next_turn(second)]):  # or nothing would cross until it is done
                matrices = [tf.identity(matrix) for matrix in matrices]
            for i, matrix, left, right in zip(order, matrices, lefts, mine):
                residuals[i] = tf.reshape(low_rank.lost(matrix, left, right), shapes[i])

    times = common.factor(scale, ok)
    chunks: list[tf.Tensor] = list(share.chunks)
    for i, left, right in zip(order, lefts, _each(_cut(incoming * times, batches, "columns"))):
        chunks[i] = tf.reshape(low_rank.product(left, right), shapes[i])
    at = sum(_sizes(batches, "rows"))
    for i in whole:
        size = chunks[i].shape.num_elements()
        chunks[i] = tf.reshape(total[at : at + size] * times, shapes[i])
        at += size
    return Reduction(chunks, residuals, ok, outgoing, incoming, factors=factors, between=between)


def _allreduce(outgoing: tf.Tensor, group: Group, phase: str) -> tf.Tensor:
    total = hvd.allreduce(at_once(outgoing), op=hvd.Sum, **group.keywords(phase))
    return tf.ensure_shape(total, outgoing.shape)


def _each(factors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The factors of each matrix, batch after batch."""
    return [each for factor in factors for each in tf.unstack(factor)]


def _flat(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    flat = [tf.reshape(tensor, [-1]) for tensor in tensors]
    return tf.concat(flat, 0) if flat else tf.zeros([0])


def _sizes(batches: Sequence[Batch], side: str) -> list[int]:
    """Elements of each batch's left ("rows") or right ("columns") factors."""
    return [len(members) * rank * getattr(matrix, side) for members, matrix, rank in batches]


def _cut(flat: tf.Tensor, batches: Sequence[Batch], side: str) -> list[tf.Tensor]:
    """The factors [b, rank, n] of each batch, from all of them end to end, and maybe more behind them."""
    sizes = _sizes(batches, side)
    if not sizes:
        return []
    shapes = [[len(members), rank, getattr(matrix, side)] for members, matrix, rank in batches]
    return [tf.reshape(part, shape) for part, shape in zip(tf.split(flat[: sum(sizes)], sizes), shapes)]
