"""Matrices of low rank."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import tensorflow as tf

from .. import formats
from ..formats.base import Shape
from ..kernels import subspace as low_rank
from ..kernels.compile import fed_back
from . import error_feedback as _residual
from .base import BuiltinCompressor, Encoded, Seeds


@dataclasses.dataclass(frozen=True)
class PowerSGD(formats.PowerSGD, BuiltinCompressor):
    """Two factors of `rank` vectors in place of each matrix (Vogels, Karimireddy and Jaggi 2019, PowerSGD).

    Update rule (Algorithm 1): the matrix M becomes P Q^T, with P = orthonormal(M Q0) and Q = M^T P; Q0 is the Q of
    the step before (warm start), at first random numbers that are the same on all ranks. In training, M Q0 and
    M^T P are means over the ranks, from two allreduces for the whole model, and each rank's residual (Algorithm 2)
    is what its own M lacks: M - P (M^T P)^T. By itself, as in `compress`, it starts from the random Q0.

    A tensor is seen as the matrix whose rows and columns add up to the least (a kernel of 3 x 3 x 64 x 128 as
    576 x 128). Vectors, and matrices whose factors would be no smaller than they, go uncompressed.

    Wire size: 4 rank (rows + columns) bytes, twice as much in a ring of many ranks as of any allreduce; 4 n bytes
    of what goes uncompressed.

    Error: P P^T is a projection, so ||error||^2 = ||M||^2 - ||Q||^2: a contraction, fed back. With the start of the
    step before, P comes near to the largest singular vectors within some steps (Vogels et al., Theorem I).

    Attributes:
        rank: Vectors in each factor, 1 to 32.
    """

    def initial_factors(self, shapes: Sequence[Shape]) -> tf.Tensor:
        """The right factors of the first step, of all matrices end to end; float32, the same on all ranks."""
        sizes = [len(members) * rank * matrix.columns for members, matrix, rank in self.batches(shapes)]
        return low_rank.start(tf.constant(0), sum(sizes))

    def noise_loss(self, shapes: Sequence[Shape]) -> float:
        """The expected share of the energy of white noise that is lost from a random start.

        With a Gaussian matrix M of m x n and a start Q of r columns, all of M's part in the span of Q gets through, r m
        of m n; the rest of M is independent of M Q, whose span lets r of its m dimensions through: r (n - r).
        """
        through = 0
        for shape in shapes:
            matrix = self.matrix(shape)
            if matrix is None:
                through += math.prod(shape)
            else:
                through += self.rank * (matrix.rows + matrix.columns - self.rank)
        return 1.0 - through / sum(map(math.prod, shapes))

    def lost_share(self, x: tf.Tensor) -> tf.Tensor:
        """The share of its energy that a tensor by itself loses from the random start, a float32 scalar."""
        matrix = self.matrix(tuple(x.shape.as_list()))
        if matrix is None:
            return tf.constant(0.0)
        x = tf.reshape(x, matrix)
        n = self.rank * matrix.columns
        # A number depends on its position only: compiled for each power of two, not for each shape.
        start = low_rank.start(tf.constant(0), 2 ** math.ceil(math.log2(n)))[:n]
        return 1.0 - low_rank.through(x, tf.reshape(start, [self.rank, matrix.columns]))

    def encode(
        self,
        gradient: tf.Tensor,
        seeds: Seeds,
        residual: tf.Tensor | None = None,
        decay: float = 1.0,
        keep: bool = False,
    ) -> Encoded:
        """Factors the tensor by itself, from random numbers; see `Compressor.encode`."""
        shape = tuple(gradient.shape.as_list())
        matrix = self.matrix(shape)
        if matrix is None:
            x = _residual.add(gradient, residual, decay)
            left = tf.zeros_like(x) if keep else None
            return Encoded([tf.reshape(x, [-1])], shape, left, _residual.all_finite(x))
        x = tf.reshape(fed_back(gradient, residual, decay), matrix)
        start = low_rank.start(seeds.shared, self.rank * matrix.columns)
        product = low_rank.left(x, tf.reshape(start, [self.rank, matrix.columns]))
        (p,) = low_rank.orthonormal([product[None]])
        q = low_rank.right(x, p[0])
        lost = tf.reshape(low_rank.lost(x, p[0], q), shape) if keep else None
        # Where the matrix is not finite, its product with any factor is not, either.
        finite = _residual.all_finite(product) & _residual.all_finite(q)
        return Encoded([p[0], q], shape, lost, finite)

    def decode_sum(self, ranks: Sequence[Sequence[tf.Tensor]], ctx: Shape, scale: tf.Tensor) -> tf.Tensor:
        """Multiplies the factors, and sums."""
        if self.matrix(ctx) is None:
            return tf.reshape(tf.add_n([parts[0] for parts in ranks]) * scale, ctx)
        found = [low_rank.product(p, scale * q) for p, q in ranks]
        return tf.reshape(found[0] if len(found) == 1 else tf.add_n(found), ctx)
