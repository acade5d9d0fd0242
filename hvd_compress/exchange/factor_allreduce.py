"""Allreduce of the factors of matrices (Vogels et al. 2019, PowerSGD, Algorithms 1 and 2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..formats.base import Shape
from . import volume
from .collective import Collective, Phases, Reduction

if TYPE_CHECKING:
    import tensorflow as tf

    from .group import Group
    from .local_input import LocalInput


class FactorAllreduce(Collective):
    """Two allreduces: of the left factors of all matrices, and then of the right ones.

    Both products below are linear in the matrix, so the sum of the ranks' products is the product of the summed
    matrix: all ranks make the same step of subspace iteration of the summed matrix. Tensors that are no matrices are
    summed as they are, together with the left factors.

    1. Each rank multiplies its matrices M, residuals added, by the right factors Q of the last step.
    2. Allreduce of M Q. Each rank makes an orthonormal P of the sum.
    3. Each rank multiplies M^T P. Allreduce: the new Q, and the mean of the matrices that P was made with.
    4. During that allreduce each rank computes its residual M - P (M^T P)^T.
    5. Each rank decodes P Q^T, with the P that the mean matrices make.

    Ranks may round differently in step 2: two processes on one GPU did. If each decoded with its own P, their weights
    would drift apart.

    As in the paper, the residual is taken from the rank's own product. Over all ranks it sums to the same as with the
    mean product, but it stays small where ranks differ. A value that is not finite makes the sum of step 2 not finite,
    so all ranks notice it.
    """

    name = "low_rank"

    def fits(self, compressor: Any, shapes: Sequence[Shape], ranks: int) -> bool:
        """Whether the compressor sends factors."""
        return bool(compressor.model_wide)

    def bytes_sent(self, compressor: Any, shapes: Sequence[Shape], ranks: int) -> int:
        """The bytes of a ring."""
        batches = compressor.batches(shapes)
        made_with = 4 * (sum(2 * batch.rank**2 * len(batch.members) for batch in batches) + 1) if batches else 0
        return volume.ring_bytes(volume.payload_bytes(compressor, shapes) + made_with, ranks)

    def phases(self, nbytes: float, payload: float, ranks: int) -> Phases:
        """Two allreduces of half the payload each, with few bytes more; the sum is decoded once."""
        return Phases([nbytes], [("allreduce", payload / 2.0)] * 2, [(nbytes, 1)])

    def reduce(self, compressor: Any, local_input: LocalInput, scale: float, group: Group) -> Reduction:
        """Sums the chunks over the ranks, times `scale`; starts with the initial factors if the input has none."""
        import tensorflow as tf

        from ..compressors import error_feedback
        from ..kernels import subspace
        from . import factors, flags, transfers
        from .send_order import next_can_start

        def allreduce(outgoing: tf.Tensor, phase: str) -> tf.Tensor:
            return tf.ensure_shape(transfers.allreduce(outgoing, group, phase), outgoing.shape)

        shapes = local_input.shapes
        batches = compressor.batches(shapes)
        matrix_chunks = [i for batch in batches for i in batch.members]
        other_chunks = sorted(set(range(len(shapes))) - set(matrix_chunks))
        new_factors = compressor.initial_factors(shapes) if local_input.factors is None else local_input.factors
        old_rights = factors.unpack(new_factors, batches, "columns")

        # 1. M Q, residuals added to M.
        gradients = [local_input.sum(i) for i in range(len(shapes))]
        matrices = [tf.reshape(gradients[i], batch.matrix) for batch in batches for i in batch.members]
        own_lefts = [subspace.left(m, right) for m, right in zip(matrices, factors.per_matrix(old_rights))]

        # 2. Allreduce, and P of the sum.
        outgoing = factors.pack([*own_lefts, *(gradients[i] for i in other_chunks)])
        left_sum = incoming = allreduce(outgoing, "_left")
        ok = error_feedback.all_finite(left_sum)
        residuals: list[tf.Tensor | None] = [None] * len(shapes)
        for i in other_chunks if local_input.keep else ():
            residuals[i] = tf.zeros_like(gradients[i])
        chunks, second_exchange = local_input.chunks, None
        if batches:
            left_sums = factors.unpack(left_sum, batches, "rows")
            orthonormal, made_with = subspace.orthonormal(left_sums)
            lefts = factors.per_matrix(orthonormal)

            # 3. M^T P, allreduce, and the new Q.
            own_rights = [subspace.right(matrix, left) for matrix, left in zip(matrices, lefts)]
            # A rank that has joined sends zeros, so the ranks are counted.
            packed_rights = factors.pack([*own_rights, *made_with, tf.ones([1])])
            second_exchange = left_sum, packed_rights
            incoming = allreduce(packed_rights, "_right")
            ok = flags.all_of([ok, error_feedback.all_finite(incoming)])
            rights = factors.unpack(incoming, batches, "columns")
            new_factors = factors.pack([subspace.next_start(*pair) for pair in zip(rights, old_rights)])

            # 4. The residuals, only after the send: otherwise nothing would cross until they are computed.
            if local_input.keep:
                with tf.control_dependencies([next_can_start(packed_rights)]):
                    matrices = [tf.identity(matrix) for matrix in matrices]
                for i, matrix, left, right in zip(matrix_chunks, matrices, lefts, own_rights):
                    residuals[i] = tf.reshape(subspace.lost(matrix, left, right), shapes[i])

        # 5. P Q^T, and the other tensors behind the left factors.
        factor = flags.scale_or_nan(scale, ok)
        if batches:
            means = [tensor / incoming[-1] for tensor in factors.unpack_last(incoming[:-1], made_with)]
            lefts = factors.per_matrix(subspace.transformed(left_sums, means))
            rights = factors.per_matrix(factors.unpack(incoming * factor, batches, "columns"))
            for i, left, right in zip(matrix_chunks, lefts, rights):
                chunks[i] = tf.reshape(subspace.product(left, right), shapes[i])
        start = sum(left.shape.num_elements() for left in own_lefts)
        for i in other_chunks:
            size = chunks[i].shape.num_elements()
            chunks[i] = tf.reshape(left_sum[start : start + size] * factor, shapes[i])
            start += size
        return Reduction(
            chunks, residuals, ok, outgoing, incoming, factors=new_factors, second_exchange=second_exchange
        )
