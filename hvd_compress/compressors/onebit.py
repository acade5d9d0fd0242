"""Signs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import tensorflow as tf

from ..kernels import bitpack, blocks
from ..kernels.compile import compiled
from .base import BuiltinCompressor, Seeds, Shape, size_of

BLOCK = 1024


@dataclasses.dataclass(frozen=True)
class OneBit(BuiltinCompressor):
    """Each value becomes its sign; a block's signs share one magnitude, its mean |x|.

    Update rule: x is decoded as sign(x) * mean|block|, with sign(0) = +1 (Seide et al. 2014; scaled as
    in EF-SignSGD, Karimireddy et al. 2019, Algorithm 1).

    Wire size, with b = min(1024, n rounded up to 8): ceil(n / b) * (b / 8 + 4) bytes.

    Error: ||error||^2 = ||x||_2^2 - ||x||_1^2 / b per block, so it is a contraction with factor
    1 - ||x||_1^2 / (b ||x||_2^2) (Karimireddy et al. 2019, Lemma 8), and is fed back. Blocks of one
    magnitude are exact (a last block that is not full: to float32 rounding); zero blocks too.
    """

    name: ClassVar[str] = "onebit"

    def layout(self, shape: Shape) -> list[tf.TensorSpec]:
        """The magnitude of each block, then the signs."""
        n = size_of(shape)
        block = blocks.block_size(n, BLOCK)
        rows = blocks.block_count(n, block)
        return [tf.TensorSpec([rows, 1], tf.float32), tf.TensorSpec([rows, block // 8], tf.uint8)]

    def encode(self, x: tf.Tensor, seeds: Seeds) -> tuple[list[tf.Tensor], Shape]:
        """Takes signs and means."""
        return _encode(tf.reshape(x, [-1])), tuple(x.shape.as_list())

    def decode(self, parts: Sequence[tf.Tensor], ctx: Shape) -> tf.Tensor:
        """Spreads the means with their signs."""
        return self.decode_sum([part[None] for part in parts], ctx, tf.constant(1.0))

    def decode_sum(self, parts: Sequence[tf.Tensor], ctx: Shape, scale: tf.Tensor) -> tf.Tensor:
        """Spreads and sums in one pass."""
        return tf.reshape(_decode_sum(list(parts), size_of(ctx), scale), ctx)


@compiled
def _encode(flat: tf.Tensor) -> list[tf.Tensor]:
    n = flat.shape[0]
    block = blocks.block_size(n, BLOCK)
    values = blocks.to_blocks(flat, block)
    rows, repeated = values.shape[0], -n % block
    real = block - repeated * tf.cast(tf.range(rows)[:, None] == rows - 1, tf.int32)
    magnitude = tf.where(tf.range(block) < real, tf.abs(values), 0.0)
    # Scaled by a power of two, 1 / BLOCK, as the sum itself may overflow.
    mean = blocks.halving(magnitude * (1.0 / BLOCK), tf.add) / tf.cast(real, tf.float32) * float(BLOCK)
    return [mean, *bitpack.pack(tf.cast(values < 0.0, tf.uint8), 1)]


@compiled
def _decode_sum(parts: list[tf.Tensor], n: int, scale: tf.Tensor) -> tf.Tensor:
    mean, signs = parts
    values = tf.where(bitpack.unpack([signs], 1) > 0, -mean, mean)
    total = values[0]
    for rank in range(1, values.shape[0]):
        total += values[rank]
    return blocks.from_blocks(total * scale, n)
