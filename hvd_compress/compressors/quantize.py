"""Linear quantization."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from .. import formats
from ..formats.base import Shape
from ..formats.quantize import BLOCK
from ..kernels import bitpack, blocks, linear, noise
from ..kernels.compile import compiled, fed_back
from . import error_feedback as _residual
from .base import BuiltinCompressor, Compressor, Encoded, Seeds


@dataclasses.dataclass(frozen=True)
class Quantize(formats.Quantize, BuiltinCompressor):
    """Each value becomes the number of a level, `bits` wide; levels are evenly spaced per block.

    Update rule, for a block with minimum m and maximum M: step = (M - m) / (2**bits - 1), code =
    round(x / step) - round(m / step), decoded as (code + round(m / step)) * step. Zero is always a
    level: what had no gradient gets none. See `kernels.linear`.

    Wire size, with b = min(256, n rounded up to 8) elements per block: ceil(n / b) * (b * bits / 8 + 8)
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

    @property
    def error_feedback(self) -> bool:  # type: ignore[override]
        """True with nearest rounding."""
        return self.rounding == "nearest"

    def for_rows(self) -> Compressor:
        """The same: each row has blocks of its own."""
        return self

    def encode(
        self,
        gradient: tf.Tensor,
        seeds: Seeds,
        residual: tf.Tensor | None = None,
        decay: float = 1.0,
        keep: bool = False,
    ) -> Encoded:
        """Quantizes and packs; see `Compressor.encode`."""
        shape = tuple(gradient.shape.as_list())
        seed = None
        if self.rounding == "stochastic":
            seed = noise.fold(noise.fold(seeds.local, seeds.chunk), self.seed)
        if self.clip is None:
            parts, left, finite = encode_blocks(gradient, residual, decay, self.bits, seed, keep)
            return Encoded(parts, shape, left, finite)
        x = _residual.add(gradient, residual, decay)
        clipped = tf.reshape(clip_to_percentile(tf.reshape(x, [-1]), self.clip), shape)
        parts, left, _ = encode_blocks(clipped, None, 1.0, self.bits, seed, keep)
        if left is not None:
            left += x - clipped
        return Encoded(parts, shape, left, _residual.all_finite(x))

    def decode_sum(self, ranks: Sequence[Sequence[tf.Tensor]], ctx: Shape, scale: tf.Tensor) -> tf.Tensor:
        """Unpacks, dequantizes and sums in one pass."""
        return decode_blocks(ranks, self.bits, ctx, scale)


def encode_blocks(
    gradient: tf.Tensor,
    residual: tf.Tensor | None,
    decay: float,
    bits: int,
    seed: tf.Tensor | None,
    keep: bool,
) -> tuple[list[tf.Tensor], tf.Tensor | None, tf.Tensor]:
    """Quantizes gradient + decay * residual: the parts, what they leave out, and whether all is finite."""
    gradients = blocks.of(gradient, BLOCK)
    residuals = None if residual is None else blocks.of(residual, BLOCK)
    parts, left, finite = encode_matrix(gradients, residuals, decay, bits, seed, keep)
    if left is not None:
        left = blocks.back(left, gradient.shape)
    return parts, left, finite


def encode_matrix(
    gradient: tf.Tensor,
    residual: tf.Tensor | None,
    decay: float,
    bits: int,
    seed: tf.Tensor | None,
    keep: bool,
) -> tuple[list[tf.Tensor], tf.Tensor | None, tf.Tensor]:
    """`encode_blocks` of what is in blocks already, float32 [blocks, block size]; as many as there are then."""
    step, base, finite = _grid(gradient, residual, decay, bits, seed is not None)
    codes, left = _quantize(gradient, residual, step, base, decay, bits, seed, keep)
    return [step, base, *codes], left, finite


@compiled
def _grid(
    gradient: tf.Tensor, residual: tf.Tensor | None, decay: float, bits: int, stochastic: bool
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    low, high, finite = linear.extremes(fed_back(gradient, residual, decay))
    return *linear.grid(low, high, bits, stochastic), finite


@compiled
def _quantize(
    gradient: tf.Tensor,
    residual: tf.Tensor | None,
    step: tf.Tensor,
    base: tf.Tensor,
    decay: float,
    bits: int,
    seed: tf.Tensor | None,
    keep: bool,
) -> tuple[list[tf.Tensor], tf.Tensor | None]:
    values = fed_back(gradient, residual, decay)
    draws = None
    if seed is not None:
        draws = tf.reshape(noise.uniform(seed, tf.size(values)), tf.shape(values))
    codes, decoded = linear.quantize(values, step, base, bits, draws)
    return bitpack.pack(codes, bits), values - decoded if keep else None


def decode_blocks(
    ranks: Sequence[Sequence[tf.Tensor]], bits: int, shape: Shape, scale: tf.Tensor
) -> tf.Tensor:
    """The scaled sum of what `encode_blocks` made of tensors of this shape on several ranks."""
    return blocks.back(decode_matrix(ranks, bits, scale), shape)


def decode_matrix(ranks: Sequence[Sequence[tf.Tensor]], bits: int, scale: tf.Tensor) -> tf.Tensor:
    """The scaled sum of what `encode_matrix` made on several ranks, float32 [blocks, a, b]: rows of a * b elements."""
    return _decode_sum([list(parts) for parts in ranks], bits, scale)


@compiled
def _decode_sum(ranks: Sequence[Sequence[tf.Tensor]], bits: int, scale: tf.Tensor) -> tf.Tensor:
    total = None
    for step, base, *packed in ranks:
        values = linear.dequantize(bitpack.unpack(packed, bits), step[:, None], base[:, None])
        total = values if total is None else total + values
    return total * scale


def clip_to_percentile(x: tf.Tensor, percentile: float) -> tf.Tensor:
    """Clips vectors, `x` [..., n], to plus and minus a percentile of their magnitudes, interpolated linearly."""
    n = x.shape[-1]
    ordered = tf.sort(tf.abs(x[..., :: max(1, n // 65536)]))
    last = ordered.shape[-1] - 1
    position = percentile / 100.0 * last
    below = int(position)
    above = min(below + 1, last)
    low, high = ordered[..., below, None], ordered[..., above, None]
    limit = low + (high - low) * (position - below)
    return tf.clip_by_value(x, -limit, limit)
