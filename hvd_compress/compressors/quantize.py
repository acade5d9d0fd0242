"""Linear quantization."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Sequence
from typing import ClassVar

import tensorflow as tf

from ..kernels import bitpack, blocks, linear, noise
from ..kernels.compile import compiled
from .base import BuiltinCompressor, Seeds, Shape, check_seed, check_whole, size_of

# Gradients have heavy tails: the fewer elements share a step, the fewer small ones round to zero beside an
# outlier, and Adam takes small gradients for as important as large ones. 128 cost half a bit per element.
BLOCK = 128


@dataclasses.dataclass(frozen=True)
class Quantize(BuiltinCompressor):
    """Each value becomes the number of a level, `bits` wide; levels are evenly spaced per block.

    Update rule, for a block with minimum m and maximum M: step = (M - m) / (2**bits - 1), code =
    round(x / step) - round(m / step), decoded as (code + round(m / step)) * step. Zero is always a
    level: what had no gradient gets none. See `kernels.linear`.

    Wire size, with b = min(128, n rounded up to 8) elements per block: ceil(n / b) * (b * bits / 8 + 8)
    bytes.

    Error: |error| <= step / 2 with nearest rounding, and never more than |x|; < step with stochastic
    rounding, for which step = (M - m) / (2**bits - 2) (M - m for one bit). Constant and zero blocks are
    exact. Stochastic rounding is unbiased, and for two bits or more E||error||^2 <=
    min(b / s^2, sqrt(b) / s) ||x||^2 per block, s = 2**(bits - 1) - 1 (QSGD, Alistarh et al. 2017,
    Lemma 3.1).

    With nearest rounding the error is fed back. Stochastic rounding with few bits is no contraction,
    and its error, zero on average, is not (GRACE, Xu et al. 2021, section V).

    Attributes:
        bits: 1 to 8.
        rounding: `"nearest"` or `"stochastic"`.
        clip: None, or a percentile (above 0, at most 100) of |x| over the whole tensor; values beyond it
            are clipped, so that a few outliers don't cost the others their resolution. From vectors of
            more than 65,536 elements the percentile is taken of an evenly spaced sample. Clipping is
            biased: with nearest rounding the residual makes up for it, with stochastic nothing does.
        seed: For stochastic rounding; each rank and step draws other noise from it.
    """

    name: ClassVar[str] = "quantize"
    bits: int
    rounding: str = "nearest"
    clip: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "bits", check_whole(self.bits, "bits", self.name, 8))
        if self.rounding not in ("nearest", "stochastic"):
            raise ValueError(f"quantize: rounding must be 'nearest' or 'stochastic', got {self.rounding!r}")
        if self.clip is not None:
            bad = isinstance(self.clip, bool) or not isinstance(self.clip, numbers.Real)
            if bad or not 0.0 < self.clip <= 100.0:
                raise ValueError(
                    f"quantize: clip must be None or a percentile above 0 and at most 100, got {self.clip!r}"
                )
        object.__setattr__(self, "seed", check_seed(self.seed, self.name))

    @property
    def error_feedback(self) -> bool:  # type: ignore[override]
        """True with nearest rounding."""
        return self.rounding == "nearest"

    def layout(self, shape: Shape) -> list[tf.TensorSpec]:
        """Step and base of each block, then the packed codes, a part per field of the width."""
        n = size_of(shape)
        block = blocks.block_size(n, BLOCK)
        rows = blocks.block_count(n, block)
        scale = tf.TensorSpec([rows, 1], tf.float32)
        fields = bitpack.fields(self.bits)
        return [scale, scale, *(tf.TensorSpec([rows, block * width // 8], tf.uint8) for width in fields)]

    def encode(self, x: tf.Tensor, seeds: Seeds) -> tuple[list[tf.Tensor], Shape]:
        """Quantizes and packs."""
        flat = tf.reshape(x, [-1])
        if self.clip is not None:
            flat = clip_to_percentile(flat, self.clip)
        seed = noise.fold(seeds.local, self.seed) if self.rounding == "stochastic" else None
        return _encode(flat, self.bits, seed), tuple(x.shape.as_list())

    def decode(self, parts: Sequence[tf.Tensor], ctx: Shape) -> tf.Tensor:
        """Unpacks and scales."""
        return self.decode_sum([part[None] for part in parts], ctx, tf.constant(1.0))

    def decode_sum(self, parts: Sequence[tf.Tensor], ctx: Shape, scale: tf.Tensor) -> tf.Tensor:
        """Unpacks, dequantizes and sums in one pass."""
        return tf.reshape(_decode_sum(list(parts), self.bits, size_of(ctx), scale), ctx)


@compiled
def _encode(flat: tf.Tensor, bits: int, seed: tf.Tensor | None) -> list[tf.Tensor]:
    values = blocks.to_blocks(flat, blocks.block_size(flat.shape[0], BLOCK))
    stochastic = seed is not None
    step, base = linear.grid(values, bits, stochastic)
    draws = None
    if stochastic:
        draws = tf.reshape(noise.uniform(seed, values.shape[0] * values.shape[1]), values.shape)
    return [step, base, *bitpack.pack(linear.to_codes(values, step, base, bits, draws), bits)]


@compiled
def _decode_sum(parts: list[tf.Tensor], bits: int, n: int, scale: tf.Tensor) -> tf.Tensor:
    step, base, *packed = parts
    values = linear.from_codes(bitpack.unpack(packed, bits), step, base)
    total = values[0]
    for rank in range(1, values.shape[0]):
        total += values[rank]
    return blocks.from_blocks(total * scale, n)


def clip_to_percentile(flat: tf.Tensor, percentile: float) -> tf.Tensor:
    """Clips `flat` [n] to plus and minus a percentile of its magnitudes, interpolated linearly."""
    n = flat.shape[0]
    ordered = tf.sort(tf.abs(flat[:: max(1, n // 65536)]))
    position = percentile / 100.0 * (ordered.shape[0] - 1)
    below = int(position)
    above = min(below + 1, ordered.shape[0] - 1)
    limit = ordered[below] + (ordered[above] - ordered[below]) * (position - below)
    return tf.clip_by_value(flat, -limit, limit)
