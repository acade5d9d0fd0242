"""Sparsification: few elements are sent, without rounding."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import tensorflow as tf

from .. import formats
from ..formats.base import Shape, num_kept, size_of
from ..kernels import blocks, indices, noise, select
from ..kernels.compile import compiled
from ..kernels.native import NativeFormat
from . import error_feedback as feedback
from .base import ChunkInput, Encoded
from .builtin import BuiltinCompressor
from .registry import register


@register
@dataclasses.dataclass(frozen=True)
class TopK(formats.TopK, BuiltinCompressor):
    """Keeps the k = max(1, ceil(ratio * n)) elements of largest magnitude, exactly.

    Wire size: 4 k bytes of values plus the indices: 2 k bytes (and 4 ceil(n / 65536) where n > 65536),
    or a bitmap of ceil(n / 1024) * 128 bytes (ceil(n / 64) * 8 if n <= 1024) if that is smaller.

    Error: ||error||^2 <= (1 - k / n) ||x||^2 (Stich et al. 2018, Lemma A.1), a contraction: with error feedback.

    Attributes:
        ratio: The share that is kept, above 0 and at most 1.
    """

    @property
    def native_format(self) -> NativeFormat | None:
        """Native operations encode it."""
        return NativeFormat("topk", 0, self.ratio)

    def _encode_chunk(self, chunk: ChunkInput) -> Encoded:
        x = chunk.sum()
        flat = tf.reshape(x, [-1])
        parts, rest = encode_rows(flat, flat, self.ratio, chunk.keep)
        new_residual = None if rest is None else tf.reshape(rest, chunk.shape)
        return Encoded(parts, chunk.shape, new_residual, feedback.all_finite(x))

    def decode_sum(self, ranks: Sequence[Sequence[tf.Tensor]], ctx: Shape, scale: tf.Tensor) -> tf.Tensor:
        """Adds the elements to zeros, one rank after another."""
        return tf.reshape(scatter_sum(ranks, size_of(ctx), scale), ctx)


@register
@dataclasses.dataclass(frozen=True)
class BlockTopK(formats.BlockTopK, BuiltinCompressor):
    """Keeps the largest element of each of k = max(1, ceil(ratio * n)) strided blocks.

    Block j holds elements j, j + k, j + 2 k, ...: B = ceil(n / k) elements across the whole vector, so
    that every block holds elements of every layer. Nothing is sorted, and an index fits in one byte for B <= 256.
    Keeps 0.85 to 0.97 of the energy that exact top-k keeps.

    Wire size: k * (4 + i) bytes, with i = 1 for B <= 256, 2 for B <= 65536, else 4.

    Error: ||error||^2 <= (1 - 1 / B) ||x||^2 for each block (as top-1; up to 2**-15 for near ties), hence
    for the tensor (Stich et al. 2018, Lemma A.1 with k = 1). A contraction: with error feedback.

    Attributes:
        ratio: The share that is kept, above 0 and at most 1.
    """

    @property
    def native_format(self) -> NativeFormat | None:
        """Native operations encode it."""
        return NativeFormat("block_topk", 0, self.ratio)

    def _encode_chunk(self, chunk: ChunkInput) -> Encoded:
        k = num_kept(self.ratio, size_of(chunk.shape))
        terms = chunk.terms(lambda x: select.strided(tf.reshape(x, [-1]), k))
        rows, values, finite = select.strided_top1(terms)
        parts, sent = self._encode_selected(values, rows, chunk)
        new_residual = None
        if chunk.keep:
            new_residual = blocks.from_blocks(select.strided_rest(terms, rows, sent), chunk.shape)
        return Encoded(parts, chunk.shape, new_residual, finite)

    def _encode_selected(
        self, values: tf.Tensor, rows: tf.Tensor, chunk: ChunkInput
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """The parts for the selected values and their rows, and what the values are decoded to (if wanted)."""
        return [values, rows], values

    def decode_sum(self, ranks: Sequence[Sequence[tf.Tensor]], ctx: Shape, scale: tf.Tensor) -> tf.Tensor:
        """Places and sums the values in one pass."""
        return select.spread([(values, rows) for values, rows in ranks], ctx, scale)


@register
@dataclasses.dataclass(frozen=True)
class RandomK(formats.RandomK, BuiltinCompressor):
    """Keeps one random element of each of k = max(1, ceil(ratio * n)) strided blocks.

    All ranks draw the same elements from a shared seed, different ones in each step. No index is sent,
    and the values are summed in a plain allreduce. Outside training (`compress`, or in stock Horovod),
    the elements depend on `seed` only.

    Wire size: 4 k bytes.

    Error: E||error||^2 = (1 - k / n) ||x||^2 where k divides n, within one part in B otherwise (Stich et
    al. 2018, Lemma A.1): with error feedback. With `unbiased=True` the values are scaled by their block's
    size (n / k), so that E[decoded] = x and E||error||^2 = (n / k - 1) ||x||^2: without error feedback.

    Attributes:
        ratio: The share that is kept, above 0 and at most 1.
        unbiased: Whether to scale up the values, without error feedback.
        seed: Selects another sequence of random elements.
    """

    @property
    def error_feedback(self) -> bool:  # type: ignore[override]
        """False when unbiased."""
        return not self.unbiased

    def _encode_chunk(self, chunk: ChunkInput) -> Encoded:
        x = tf.reshape(chunk.sum(), [-1])
        n = x.shape[0]
        k = num_kept(self.ratio, n)
        seeds = chunk.seeds
        rows = select.strided_random(n, k, noise.fold(noise.fold(seeds.shared, seeds.chunk), self.seed))
        values = _take(x, rows, self.unbiased)
        new_residual = None
        if chunk.keep:
            rest = select.strided_rest((select.strided(x, k), None, 1.0), rows, values)
            new_residual = blocks.from_blocks(rest, chunk.shape)
        return Encoded([values], (chunk.shape, rows), new_residual, feedback.all_finite(x))

    def decode_sum(
        self, ranks: Sequence[Sequence[tf.Tensor]], ctx: tuple[Shape, tf.Tensor], scale: tf.Tensor
    ) -> tf.Tensor:
        """Places and sums the values in one pass."""
        shape, rows = ctx
        return select.spread([(values, rows) for (values,) in ranks], shape, scale)


@compiled
def _take(flat: tf.Tensor, rows: tf.Tensor, unbiased: bool) -> tf.Tensor:
    values = tf.gather(flat, select.strided_indices(rows))
    counts = select.strided_counts(flat.shape[0], rows.shape[0])
    return values * tf.cast(counts, tf.float32) if unbiased else values


def encode_rows(
    rows: tf.Tensor, scores: tf.Tensor, ratio: float, keep: bool
) -> tuple[list[tf.Tensor], tf.Tensor | None]:
    """Those of `rows` [n, ...] whose scores [n] are of largest magnitude, and their packed indices.

    Also returns `rows` with zeros in place of these, if wanted (`keep`).
    """
    n = rows.shape[0]
    selected = select.top_k(scores, num_kept(ratio, n))
    rest = None
    if keep:
        zeros = tf.zeros([*selected.shape, *rows.shape[1:]])
        rest = tf.tensor_scatter_nd_update(rows, selected[:, None], zeros)
    return [tf.gather(rows, selected), *indices.pack(selected, n)], rest


def scatter_sum(ranks: Sequence[Sequence[tf.Tensor]], n: int, scale: tf.Tensor) -> tf.Tensor:
    """The scaled sum, [n, ...], of the parts that `encode_rows` made of `n` rows on each rank.

    All elements are NaN if any indices are damaged, unless all their values are 0, as those of a rank that has called
    `hvd.join()`. Ranks are added one after another: the indices of each are distinct, so that the order of additions is
    fixed.
    """
    values = ranks[0][0]
    unpacked = [indices.unpack(packed, n, values.shape[0]) for _, *packed in ranks]
    harmless = [valid | tf.reduce_all(part[0] == 0.0) for part, (_, valid) in zip(ranks, unpacked)]
    scale = tf.where(tf.reduce_all(tf.stack(harmless)), scale, math.nan)
    # Not just zeros: a NaN must reach every element. Not 0.0 * scale: TensorFlow's optimizer makes that zero.
    initial = tf.where(tf.math.is_nan(scale), scale, tf.zeros_like(scale))
    total = tf.fill([n, *values.shape[1:]], initial)
    for (values, *_), (selected, _) in zip(ranks, unpacked):
        total = tf.tensor_scatter_nd_add(total, selected[:, None], values * scale)
    return total
