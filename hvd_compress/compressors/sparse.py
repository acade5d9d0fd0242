"""Sparsification: few elements are sent as they are, the rest not at all."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Callable

import tensorflow as tf

from .. import formats
from ..formats.base import Shape, num_kept, size_of
from ..kernels import indices, noise, select
from ..kernels.compile import compiled
from . import error_feedback as _residual
from .base import BuiltinCompressor, Encoded, Seeds


@dataclasses.dataclass(frozen=True)
class TopK(formats.TopK, BuiltinCompressor):
    """Keeps exactly the k = max(1, ceil(ratio * n)) elements of largest magnitude.

    Wire size: 4 k bytes of values plus the indices: 2 k bytes (and 4 ceil(n / 65536) where n > 65536),
    or a bitmap of ceil(n / 1024) * 128 bytes (ceil(n / 64) * 8 where n <= 1024) if that is less.

    Error: ||error||^2 <= (1 - k / n) ||x||^2 (Stich et al. 2018, Lemma A.1): a contraction, fed back.

    Attributes:
        ratio: The share that is kept, above 0 and at most 1.
    """

    def encode(
        self,
        gradient: tf.Tensor,
        seeds: Seeds,
        residual: tf.Tensor | None = None,
        decay: float = 1.0,
        keep: bool = False,
    ) -> Encoded:
        """Selects; see `Compressor.encode`."""
        shape = tuple(gradient.shape.as_list())
        x = _residual.add(gradient, residual, decay)
        flat = tf.reshape(x, [-1])
        chosen = select.top_k(flat, num_kept(self.ratio, flat.shape[0]))
        left = tf.reshape(cleared(flat, chosen), shape) if keep else None
        return Encoded(taken(flat, chosen), shape, left, _residual.all_finite(x))

    def decode_sum(self, ranks: Sequence[Sequence[tf.Tensor]], ctx: Shape, scale: tf.Tensor) -> tf.Tensor:
        """Scatters rank after rank into zeros."""
        return tf.reshape(scattered_sum(ranks, size_of(ctx), scale), ctx)


@dataclasses.dataclass(frozen=True)
class BlockTopK(formats.BlockTopK, BuiltinCompressor):
    """Keeps the largest element of each of k = max(1, ceil(ratio * n)) strided blocks.

    Block j holds elements j, j + k, j + 2 k, ...: B = ceil(n / k) of them, spread over the whole vector, so
    that every layer takes part in every block. Needs no sort, and an index fits one byte for B <= 256.
    Keeps 0.85 to 0.97 of the energy that exact top-k keeps.

    Wire size: k * (4 + i) bytes, with i = 1 for B <= 256, 2 for B <= 65536, else 4.

    Error: per block ||error||^2 <= (1 - 1 / B) ||x||^2 (as top-1; up to 2**-15 for near ties), hence
    (1 - 1 / B) of the whole: a contraction, fed back (Stich et al. 2018, Lemma A.1 with k = 1).

    Attributes:
        ratio: The share that is kept, above 0 and at most 1.
    """

    def encode(
        self,
        gradient: tf.Tensor,
        seeds: Seeds,
        residual: tf.Tensor | None = None,
        decay: float = 1.0,
        keep: bool = False,
    ) -> Encoded:
        """Selects; see `Compressor.encode`."""
        rows, values, left, finite = select_strided(gradient, residual, decay, self.ratio)
        shape = tuple(gradient.shape.as_list())
        return Encoded([values, rows], shape, left(values) if keep else None, finite)

    def decode_sum(self, ranks: Sequence[Sequence[tf.Tensor]], ctx: Shape, scale: tf.Tensor) -> tf.Tensor:
        """Puts and sums in one pass."""
        pairs = [(values, rows) for values, rows in ranks]
        return tf.reshape(select.spread(pairs, size_of(ctx), scale), ctx)


@dataclasses.dataclass(frozen=True)
class RandomK(formats.RandomK, BuiltinCompressor):
    """Keeps one random element of each of k = max(1, ceil(ratio * n)) strided blocks.

    All ranks draw the same elements from a shared seed, another choice each step, so no index is sent
    and the values are summed in a plain allreduce. Called without a step (`compress`, or in stock
    Horovod) the choice is always that of `seed`.

    Wire size: 4 k bytes.

    Error: E||error||^2 = (1 - k / n) ||x||^2 where k divides n, within one part in B otherwise (Stich et
    al. 2018, Lemma A.1): fed back. With `unbiased=True` the values are scaled by their block's size
    (n / k), so that E[decoded] = x, E||error||^2 = (n / k - 1) ||x||^2, and nothing is fed back.

    Attributes:
        ratio: The share that is kept, above 0 and at most 1.
        unbiased: Scale up what is sent, and keep no residual.
        seed: From which the choice is drawn.
    """

    @property
    def error_feedback(self) -> bool:  # type: ignore[override]
        """False when unbiased."""
        return not self.unbiased

    def encode(
        self,
        gradient: tf.Tensor,
        seeds: Seeds,
        residual: tf.Tensor | None = None,
        decay: float = 1.0,
        keep: bool = False,
    ) -> Encoded:
        """Selects; the context carries the choice. See `Compressor.encode`."""
        shape = tuple(gradient.shape.as_list())
        x = tf.reshape(_residual.add(gradient, residual, decay), [-1])
        n = x.shape[0]
        k = num_kept(self.ratio, n)
        rows = select.strided_random(n, k, noise.fold(noise.fold(seeds.shared, seeds.chunk), self.seed))
        values = _take(x, rows, self.unbiased)
        left = None
        if keep:
            rest = select.strided_rest(select.strided(x, k), None, 1.0, rows, values)
            left = tf.reshape(select.unstrided(rest, n), shape)
        return Encoded([values], (shape, rows), left, _residual.all_finite(x))

    def decode_sum(
        self, ranks: Sequence[Sequence[tf.Tensor]], ctx: tuple[Shape, tf.Tensor], scale: tf.Tensor
    ) -> tf.Tensor:
        """Puts and sums in one pass."""
        shape, rows = ctx
        pairs = [(values, rows) for (values,) in ranks]
        return tf.reshape(select.spread(pairs, size_of(shape), scale), shape)


@compiled
def _take(flat: tf.Tensor, rows: tf.Tensor, unbiased: bool) -> tf.Tensor:
    values = tf.gather(flat, select.strided_indices(rows))
    counts = select.strided_counts(flat.shape[0], rows.shape[0])
    return values * tf.cast(counts, tf.float32) if unbiased else values


def taken(rows: tf.Tensor, chosen: tf.Tensor) -> list[tf.Tensor]:
    """The parts that say which of `rows` [n, ...] were chosen (int64 [k], ascending), and what they hold."""
    return [tf.gather(rows, chosen), *indices.pack(chosen, rows.shape[0])]


def cleared(rows: tf.Tensor, chosen: tf.Tensor) -> tf.Tensor:
    """`rows` [n, ...] with zeros where they were chosen."""
    nothing = tf.zeros([*chosen.shape, *rows.shape[1:]])
    return tf.tensor_scatter_nd_update(rows, chosen[:, None], nothing)


def scattered_sum(ranks: Sequence[Sequence[tf.Tensor]], n: int, scale: tf.Tensor) -> tf.Tensor:
    """The scaled sum, [n, ...], of what `taken` made of `n` rows on several ranks; NaN if any indices are damaged.

    Rank after rank: each one's indices are distinct, so the order of sums is fixed.
    """
    values = ranks[0][0]
    places = [indices.unpack(packed, n, values.shape[0]) for _, *packed in ranks]
    scale = tf.where(tf.reduce_all(tf.stack([good for _, good in places])), scale, math.nan)
    # Not just zeros: a NaN must reach every element. Not 0.0 * scale: TensorFlow's optimizer makes that zero.
    nothing = tf.where(tf.math.is_nan(scale), scale, tf.zeros_like(scale))
    total = tf.fill([n, *values.shape[1:]], nothing)
    for (values, *_), (where, _) in zip(ranks, places):
        total = tf.tensor_scatter_nd_add(total, where[:, None], values * scale)
    return total


def select_strided(
    gradient: tf.Tensor, residual: tf.Tensor | None, decay: float, ratio: float
) -> tuple[tf.Tensor, tf.Tensor, Callable[[tf.Tensor], tf.Tensor], tf.Tensor]:
    """The largest element of each strided block of gradient + decay * residual.

    Returns:
        Rows ([k]); values (float32 [k]); a function that tells what is left (float32 in the
        gradient's shape) when so much of each value was sent; whether all is finite.
    """
    n = gradient.shape.num_elements()
    k = num_kept(ratio, n)
    grid = select.strided(tf.reshape(gradient, [-1]), k)
    old = None if residual is None else select.strided(tf.reshape(residual, [-1]), k)
    rows, values, finite = select.strided_top1(grid, old, decay)

    def left(sent: tf.Tensor) -> tf.Tensor:
        rest = select.unstrided(select.strided_rest(grid, old, decay, rows, sent), n)
        return tf.reshape(rest, gradient.shape)

    return rows, values, left, finite
