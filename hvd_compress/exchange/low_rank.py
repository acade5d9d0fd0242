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

from .. import residual
from ..compressors import PowerSGD
from ..formats.low_rank import Batch
from ..kernels import low_rank
from ..traffic import low_rank as bytes_sent  # noqa: F401  (what each rank sends)
from . import common
from .common import Group, Reduced, Shape, Share


def start(compressor: PowerSGD, shapes: Sequence[Shape]) -> tf.Tensor:
    """The right factors of the first step, the same on all ranks; float32 [elements of all of them]."""
    batches = compressor.batches(shapes)
    return _flat(
        [
            low_rank.start(tf.constant(i), len(members), matrix.rank, matrix.columns)
            for i, (members, matrix) in enumerate(batches)
        ]
    )


def reduce(compressor: PowerSGD, share: Share, scale: float, group: Group) -> Reduced:
    """Sums the ranks' pieces, times `scale`; without `share.factors` from those of the first step."""
    shapes = [tuple(piece.shape.as_list()) for piece in share.pieces]
    batches = compressor.batches(shapes)
    factored = {i for batch in batches for i in batch.members}
    whole = [i for i in range(len(shapes)) if i not in factored]
    pieces: list[tf.Tensor] = list(share.pieces)
    residuals: list[tf.Tensor | None] = [None] * len(pieces)
    for i in whole:
        pieces[i] = residual.add(pieces[i], share.residuals[i], share.decay)
        residuals[i] = tf.zeros_like(pieces[i]) if share.keep else None

    factors = start(compressor, shapes) if share.factors is None else share.factors
    old = _cut(factors, batches, False)
    products, matrices = [], []
    for batch, factor in zip(batches, old):
        mine, sums = _left(batch, share, factor)
        products.append(mine)
        matrices.append(sums)
    outgoing = _flat([*products, *(pieces[i] for i in whole)])
    total = hvd.allreduce(outgoing, op=hvd.Sum, **group.keywords("_left"))
    total = incoming = tf.ensure_shape(total, outgoing.shape)
    ok = residual.all_finite(total)

    if batches:
        lefts = low_rank.orthonormal(_cut(total, batches, True))
        own = [low_rank.right(sums, left) for sums, left in zip(matrices, lefts)]
        second = _flat(own)
        incoming = hvd.allreduce(second, op=hvd.Sum, **group.keywords("_right"))
        incoming = tf.ensure_shape(incoming, second.shape)
        ok = common.all_of([ok, residual.all_finite(incoming)])
        if share.keep:
            with tf.control_dependencies([second]):  # or nothing would cross until it is done
                own = [tf.identity(right) for right in own]
            for batch, sums, left, right in zip(batches, matrices, lefts, own):
                for i, lost in zip(batch.members, low_rank.lost(sums, left, right)):
                    residuals[i] = tf.reshape(lost, shapes[i])
        factors = _flat(low_rank.unit(_cut(incoming, batches, False), old))

    times = common.factor(scale, ok)
    if batches:
        for batch, left, right in zip(batches, lefts, _cut(incoming * times, batches, False)):
            for i, piece in zip(batch.members, low_rank.products(left, right)):
                pieces[i] = tf.reshape(piece, shapes[i])
    at = sum(_sizes(batches, True))
    for i in whole:
        size = pieces[i].shape.num_elements()
        pieces[i] = tf.reshape(total[at : at + size] * times, shapes[i])
        at += size
    return Reduced(pieces, residuals, ok, outgoing, incoming, factors)


def _left(batch: Batch, share: Share, factor: tf.Tensor) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """The left products of a batch, and its matrices with their residuals."""
    size = [batch.matrix.rows, batch.matrix.columns]
    matrices = [tf.reshape(share.pieces[i], size) for i in batch.members]
    kept = [share.residuals[i] for i in batch.members]
    added = [tf.reshape(r, size) for r in kept if r is not None] or None
    products, sums = low_rank.left(matrices, added, share.decay, factor)
    return products, sums or matrices


def _flat(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    flat = [tf.reshape(tensor, [-1]) for tensor in tensors]
    return tf.concat(flat, 0) if flat else tf.zeros([0])


def _sizes(batches: Sequence[Batch], is_left: bool) -> list[int]:
    """Elements of each batch's left or right factors."""
    return [
        len(members) * matrix.rank * (matrix.rows if is_left else matrix.columns)
        for members, matrix in batches
    ]


def _cut(flat: tf.Tensor, batches: Sequence[Batch], is_left: bool) -> list[tf.Tensor]:
    """The factors [b, rank, n] of each batch, from all of them end to end, and maybe more behind them."""
    sizes = _sizes(batches, is_left)
    if not sizes:
        return []
    parts = tf.split(flat[: sum(sizes)], sizes)
    return [
        tf.reshape(part, [len(members), matrix.rank, -1]) for part, (members, matrix) in zip(parts, batches)
    ]
