"""Sparsification: few elements are sent as they are, the rest not at all."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import tensorflow as tf

from ..kernels import indices, noise, select
from .base import BuiltinCompressor, Seeds, Shape, check_flag, check_ratio, check_seed, kept, size_of


@dataclasses.dataclass(frozen=True)
class TopK(BuiltinCompressor):
    """Keeps exactly the k = max(1, ceil(ratio * n)) elements of largest magnitude.

    Wire size: 4 k bytes of values plus the indices: 2 k bytes (and 4 ceil(n / 65536) where n > 65536),
    or a bitmap of ceil(n / 1024) * 128 bytes (ceil(n / 64) * 8 where n <= 1024) if that is less.

    Error: ||error||^2 <= (1 - k / n) ||x||^2 (Stich et al. 2018, Lemma A.1): a contraction, fed back.

    Attributes:
        ratio: The share that is kept, above 0 and at most 1.
    """

    name: ClassVar[str] = "topk"
    sparse = True
    ratio: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "ratio", check_ratio(self.ratio, self.name))

    def layout(self, shape: Shape) -> list[tf.TensorSpec]:
        """The values, then the indices."""
        n = size_of(shape)
        k = kept(self.ratio, n)
        return [tf.TensorSpec([k], tf.float32), *indices.specs(n, k)]

    def encode(self, x: tf.Tensor, seeds: Seeds) -> tuple[list[tf.Tensor], Shape]:
        """Selects."""
        flat = tf.reshape(x, [-1])
        n = flat.shape[0]
        chosen = select.top_k(flat, kept(self.ratio, n))
        return [tf.gather(flat, chosen), *indices.pack(chosen, n)], tuple(x.shape.as_list())

    def decode(self, parts: Sequence[tf.Tensor], ctx: Shape) -> tf.Tensor:
        """Scatters the values into zeros."""
        return self.decode_sum([part[None] for part in parts], ctx, tf.constant(1.0))

    def decode_sum(self, parts: Sequence[tf.Tensor], ctx: Shape, scale: tf.Tensor) -> tf.Tensor:
        """Scatters rank after rank: each rank's indices are distinct, so the order of sums is fixed."""
        n = size_of(ctx)
        total = tf.fill([n], 0.0 * scale)  # not zeros: a NaN must reach every element
        for rank in range(parts[0].shape[0]):
            values, *packed = (part[rank] for part in parts)
            where = indices.unpack(packed, n, values.shape[0])
            total = tf.tensor_scatter_nd_add(total, where[:, None], values * scale)
        return tf.reshape(total, ctx)


@dataclasses.dataclass(frozen=True)
class BlockTopK(BuiltinCompressor):
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

    name: ClassVar[str] = "block_topk"
    sparse = True
    ratio: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "ratio", check_ratio(self.ratio, self.name))

    def layout(self, shape: Shape) -> list[tf.TensorSpec]:
        """The values, then each block's row."""
        n = size_of(shape)
        k = kept(self.ratio, n)
        return [tf.TensorSpec([k], tf.float32), tf.TensorSpec([k], row_dtype(n, k))]

    def encode(self, x: tf.Tensor, seeds: Seeds) -> tuple[list[tf.Tensor], Shape]:
        """Selects."""
        flat = tf.reshape(x, [-1])
        values, rows = strided_selection(flat, kept(self.ratio, flat.shape[0]))
        return [values, rows], tuple(x.shape.as_list())

    def decode(self, parts: Sequence[tf.Tensor], ctx: Shape) -> tf.Tensor:
        """Puts the values into zeros."""
        return self.decode_sum([part[None] for part in parts], ctx, tf.constant(1.0))

    def decode_sum(self, parts: Sequence[tf.Tensor], ctx: Shape, scale: tf.Tensor) -> tf.Tensor:
        """Puts and sums in one pass."""
        values, rows = parts
        return tf.reshape(select.spread(values, tf.cast(rows, tf.int32), size_of(ctx), scale), ctx)

    def lost(self, x: tf.Tensor, parts: Sequence[tf.Tensor], ctx: Shape) -> tf.Tensor:
        """What was not chosen (all of it was sent as it is)."""
        flat = tf.reshape(x, [-1])
        return tf.reshape(select.remove(flat, tf.cast(parts[1], tf.int32)), x.shape)


@dataclasses.dataclass(frozen=True)
class RandomK(BuiltinCompressor):
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

    name: ClassVar[str] = "randomk"
    summable = True
    sparse = True
    ratio: float
    unbiased: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "ratio", check_ratio(self.ratio, self.name))
        object.__setattr__(self, "unbiased", check_flag(self.unbiased, "unbiased", self.name))
        object.__setattr__(self, "seed", check_seed(self.seed, self.name))

    @property
    def error_feedback(self) -> bool:  # type: ignore[override]
        """False when unbiased."""
        return not self.unbiased

    def layout(self, shape: Shape) -> list[tf.TensorSpec]:
        """The values."""
        return [tf.TensorSpec([kept(self.ratio, size_of(shape))], tf.float32)]

    def encode(self, x: tf.Tensor, seeds: Seeds) -> tuple[list[tf.Tensor], tuple[Shape, tf.Tensor]]:
        """Selects; the context carries the choice."""
        flat = tf.reshape(x, [-1])
        n = flat.shape[0]
        k = kept(self.ratio, n)
        rows = select.strided_random(n, k, noise.fold(seeds.shared, self.seed))
        values = tf.gather(flat, select.strided_indices(rows))
        if self.unbiased:
            values *= tf.cast(select.strided_counts(n, k), tf.float32)
        return [values], (tuple(x.shape.as_list()), rows)

    def decode(self, parts: Sequence[tf.Tensor], ctx: tuple[Shape, tf.Tensor]) -> tf.Tensor:
        """Puts the values into zeros."""
        return self.decode_sum([part[None] for part in parts], ctx, tf.constant(1.0))

    def decode_sum(
        self, parts: Sequence[tf.Tensor], ctx: tuple[Shape, tf.Tensor], scale: tf.Tensor
    ) -> tf.Tensor:
        """Sums the values, then puts them into zeros."""
        shape, rows = ctx
        values = tf.reduce_sum(parts[0], 0)
        return tf.reshape(select.spread(values, rows, size_of(shape), scale), shape)

    def lost(self, x: tf.Tensor, parts: Sequence[tf.Tensor], ctx: tuple[Shape, tf.Tensor]) -> tf.Tensor:
        """What was not chosen (all of it was sent as it is)."""
        if self.unbiased:
            return super().lost(x, parts, ctx)
        return tf.reshape(select.remove(tf.reshape(x, [-1]), ctx[1]), x.shape)


def row_dtype(n: int, k: int) -> tf.DType:
    """The shortest integer that holds a row of `k` strided blocks of `n` elements."""
    rows = select.stride_blocks(n, k)
    return tf.uint8 if rows <= 256 else tf.uint16 if rows <= 65536 else tf.int32


def strided_selection(flat: tf.Tensor, k: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Values (float32 [k]) and rows ([k], `row_dtype`) of the largest element of each strided block."""
    rows = select.strided_top1(flat, k)
    values = tf.gather(flat, select.strided_indices(rows))
    return values, tf.cast(rows, row_dtype(flat.shape[0], k))
