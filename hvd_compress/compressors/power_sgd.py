"""Low-rank approximation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import tensorflow as tf

from .. import formats
from ..formats.base import Shape
from ..kernels import subspace
from ..kernels.compile import fed_back
from . import error_feedback as feedback
from .base import ChunkInput, Encoded
from .builtin import BuiltinCompressor
from .registry import register


@register
@dataclasses.dataclass(frozen=True)
class PowerSGD(formats.PowerSGD, BuiltinCompressor):
    """Sends two factors of `rank` vectors instead of each matrix (Vogels, Karimireddy and Jaggi 2019, PowerSGD).

    Update rule (Algorithm 1): the matrix M is decoded as P Q^T, with P = orthonormal(M Q0) and Q = M^T P. Q0 is the Q
    of the previous step (warm start); in the first step it is random, the same on all ranks. In training, M Q0 and
    M^T P are means over the ranks, from two allreduces for the whole model, and each rank's residual (Algorithm 2)
    is the error of its own M: M - P (M^T P)^T. Outside training, as in `compress`, Q0 is random.

    A tensor is treated as a matrix with the smallest rows + columns (a kernel of 3 x 3 x 64 x 128 as 576 x 128).
    Vectors, and matrices whose factors would not be smaller, are sent uncompressed.

    Wire size: 4 rank (rows + columns) bytes, which a ring of many ranks sends twice, as in any allreduce; 4 n bytes
    for uncompressed tensors. In training, 8 rank^2 bytes for each matrix are added, with which all ranks make the same
    P. They do not count in the decision which tensors are sent uncompressed.

    Error: P P^T is a projection, so ||error||^2 = ||M||^2 - ||Q||^2, a contraction: with error feedback. With a warm
    start, P approaches the largest singular vectors within some steps (Vogels et al., Theorem I).

    Attributes:
        rank: Vectors in each factor, 1 to 32.
    """

    def initial_factors(self, shapes: Sequence[Shape]) -> tf.Tensor:
        """The right factors of the first step, those of all matrices concatenated; float32, the same on all ranks."""
        sizes = [len(members) * rank * matrix.columns for members, matrix, rank in self.batches(shapes)]
        return subspace.start(tf.constant(0), sum(sizes))

    def noise_loss(self, shapes: Sequence[Shape]) -> float:
        """The expected share of the energy of white noise that is lost from a random start.

        With a Gaussian matrix M of m x n and a start Q of r columns, the part of M in the span of Q is sent in full,
        which is r m of m n. The rest of M is independent of M Q, whose span holds r of its m dimensions: r (n - r) of
        it are sent.
        """
        matrices = map(self.matrix, shapes)
        sent = sum(math.prod(s) if m is None else self.rank * (sum(m) - self.rank) for s, m in zip(shapes, matrices))
        return 1.0 - sent / sum(map(math.prod, shapes))

    def encode_alone(self, x: tf.Tensor, factors: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """What one rank by itself loses of a tensor, in its shape, and the factors for the next step.

        `factors` are those of the step before, or `initial_factors` of the shape.
        """
        shape = tuple(x.shape.as_list())
        matrix = self.matrix(shape)
        if matrix is None:
            return tf.zeros_like(x), factors
        m = tf.reshape(x, matrix)
        _, p, q = self._factors(m, factors)
        new = subspace.next_start(q, tf.reshape(factors, q.shape))
        return tf.reshape(subspace.lost(m, p, q), shape), tf.reshape(new, [-1])

    def _factors(self, m: tf.Tensor, start: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """The matrix times the right factor of the step before, float32 [rank * columns], then P and Q."""
        product = subspace.left(m, tf.reshape(start, [self.rank, m.shape[1]]))
        (p,), _ = subspace.orthonormal([product[None]])
        return product, p[0], subspace.right(m, p[0])

    def _encode_chunk(self, chunk: ChunkInput) -> Encoded:
        matrix = self.matrix(chunk.shape)
        if matrix is None:
            x = chunk.sum()
            new_residual = tf.zeros_like(x) if chunk.keep else None
            return Encoded([tf.reshape(x, [-1])], chunk.shape, new_residual, feedback.all_finite(x))
        x = tf.reshape(fed_back(*chunk.terms()), matrix)
        start = subspace.start(chunk.seeds.shared, self.rank * matrix.columns)
        product, p, q = self._factors(x, start)
        new_residual = tf.reshape(subspace.lost(x, p, q), chunk.shape) if chunk.keep else None
        # If the matrix is not finite, neither is its product with any factor.
        finite = feedback.all_finite(product) & feedback.all_finite(q)
        return Encoded([p, q], chunk.shape, new_residual, finite)

    def decode_sum(self, ranks: Sequence[Sequence[tf.Tensor]], ctx: Shape, scale: tf.Tensor) -> tf.Tensor:
        """Multiplies the factors, and sums."""
        if self.matrix(ctx) is None:
            return tf.reshape(tf.add_n([parts[0] for parts in ranks]) * scale, ctx)
        matrices = [subspace.product(p, scale * q) for p, q in ranks]
        return tf.reshape(matrices[0] if len(matrices) == 1 else tf.add_n(matrices), ctx)
