"""Linear quantization."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from .. import formats
from ..formats.base import Shape
from ..formats.quantize import BLOCK
from ..kernels import bitpack, blocks, linear, noise
from ..kernels.compile import Terms, compiled, fed_back
from ..kernels.native import NativeFormat
from . import error_feedback as feedback
from .base import ChunkInput, Compressor, Encoded, Seeds
from .builtin import BuiltinCompressor
from .registry import register


@register
@dataclasses.dataclass(frozen=True)
class Quantize(formats.Quantize, BuiltinCompressor):
    """Sends each value as a code of `bits` bits; a block's codes stand for evenly spaced levels.

    Update rule, for a block with minimum m and maximum M: step = (M - m) / (2**bits - 1), code =
    round(x / step) - round(m / step), decoded as (code + round(m / step)) * step. Zero is always a
    level, so that zero gradients stay zero. See `kernels.linear`.

    Wire size, with b = min(256, n rounded up to 8) elements per block: ceil(n / b) * (b * bits / 8 + 8) bytes.

    Error: |error| <= step / 2 and |error| <= |x| with nearest rounding; |error| < step with stochastic rounding, for
    which step = (M - m) / (2**bits - 2) (M - m for one bit). Constant and zero blocks are exact. Stochastic rounding is
    unbiased, and for two bits or more E||error||^2 <= min(b / s^2, sqrt(b) / s) ||x||^2 per block, with
    s = 2**(bits - 1) - 1 (QSGD, Alistarh et al. 2017, Lemma 3.1).

    Nearest rounding uses error feedback. Stochastic rounding does not: its error is zero on average, and
    with few bits it is not a contraction (GRACE, Xu et al. 2021, section V).

    Attributes:
        bits: 1 to 8.
        rounding: `"nearest"` or `"stochastic"`.
        clip: None, or a percentile (above 0, at most 100) of |x| over the tensor. Values beyond it are
            clipped, so that outliers do not make the steps of all other values larger. In vectors of more than
            65,536 elements, the percentile is that of an evenly spaced sample. Clipping is biased: with nearest
            rounding the residual corrects it, with stochastic rounding nothing does.
        seed: Selects other noise for stochastic rounding; noise differs between ranks and steps in any case.
    """

    @property
    def error_feedback(self) -> bool:  # type: ignore[override]
        """True with nearest rounding."""
        return self.rounding == "nearest"

    @property
    def native_format(self) -> NativeFormat | None:
        """Native operations encode it, but do not clip."""
        if self.clip is not None:
            return None
        return NativeFormat("quantize", self.bits, stochastic=self.rounding == "stochastic", salt=self.seed)

    def for_rows(self) -> Compressor:
        """The same: each row has its own blocks."""
        return self

    def _encode_chunk(self, chunk: ChunkInput) -> Encoded:
        seed = self.noise_seed(chunk.seeds)
        if self.clip is None:
            return encode_blocks(chunk, self.bits, seed)
        x = chunk.sum()
        clipped = tf.reshape(clip_to_percentile(tf.reshape(x, [-1]), self.clip), chunk.shape)
        encoded = encode_blocks(chunk._replace(gradient=clipped, residual=None), self.bits, seed)
        new_residual = encoded.residual + (x - clipped) if chunk.keep else None
        return encoded._replace(residual=new_residual, finite=feedback.all_finite(x))

    def noise_seed(self, seeds: Seeds) -> tf.Tensor | None:
        """The seed of stochastic rounding; None with nearest rounding."""
        if self.rounding == "nearest":
            return None
        return noise.fold(noise.fold(seeds.local, seeds.chunk), self.seed)

    def decode_sum(self, ranks: Sequence[Sequence[tf.Tensor]], ctx: Shape, scale: tf.Tensor) -> tf.Tensor:
        """Unpacks, dequantizes and sums in one pass."""
        return decode_blocks(ranks, self.bits, ctx, scale)


def encode_blocks(chunk: ChunkInput, bits: int, seed: tf.Tensor | None = None) -> Encoded:
    """Quantizes a chunk; `seed` is that of stochastic rounding."""
    terms = chunk.terms(lambda x: blocks.to_blocks(x, BLOCK))
    parts, new_residual, finite = encode_matrix(terms, bits, seed, chunk.keep)
    if new_residual is not None:
        new_residual = blocks.from_blocks(new_residual, chunk.shape)
    return Encoded(parts, chunk.shape, new_residual, finite)


def encode_matrix(
    terms: Terms, bits: int, seed: tf.Tensor | None, keep: bool
) -> tuple[list[tf.Tensor], tf.Tensor | None, tf.Tensor]:
    """`encode_blocks` for tensors that are divided into blocks already, float32 [blocks, block size].

    Returns the parts, the new residual, and whether all values are finite.
    """
    step, base, finite = _grid(terms, bits, seed is not None)
    codes, new_residual = quantize_blocks(terms, step, base, bits, seed, keep)
    return [step, base, *codes], new_residual, finite


@compiled
def _grid(terms: Terms, bits: int, stochastic: bool) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    low, high, finite = linear.extremes(fed_back(*terms))
    return *linear.grid(low, high, bits, stochastic), finite


@compiled
def quantize_blocks(
    terms: Terms, step: tf.Tensor, base: tf.Tensor, bits: int, seed: tf.Tensor | None, keep: bool
) -> tuple[list[tf.Tensor], tf.Tensor | None]:
    """The packed codes of blocks with these steps and bases, float32 [blocks, 1] each, and the new residual."""
    values = fed_back(*terms)
    uniform = None
    if seed is not None:
        uniform = tf.reshape(noise.uniform(seed, tf.size(values)), tf.shape(values))
    codes, decoded = linear.quantize(values, step, base, bits, uniform)
    return bitpack.pack(codes, bits), values - decoded if keep else None


def decode_blocks(ranks: Sequence[Sequence[tf.Tensor]], bits: int, shape: Shape, scale: tf.Tensor) -> tf.Tensor:
    """The scaled sum of the parts that `encode_blocks` made of a tensor of this shape on each rank."""
    return blocks.from_blocks(decode_matrix([list(parts) for parts in ranks], bits, scale), shape)


@compiled
def decode_matrix(ranks: Sequence[list[tf.Tensor]], bits: int, scale: tf.Tensor) -> tf.Tensor:
    """The scaled sum of the parts of `encode_matrix` of each rank, float32 [blocks, a, b]: blocks of a * b elements."""
    total = None
    for step, base, *packed in ranks:
        values = linear.dequantize(bitpack.unpack(packed, bits), step[:, None], base[:, None])
        total = values if total is None else total + values
    return total * scale


def clip_to_percentile(x: tf.Tensor, percentile: float) -> tf.Tensor:
    """Clips vectors, `x` [..., n], to plus and minus a percentile of their magnitudes, interpolated linearly."""
    n = x.shape[-1]
    magnitudes = tf.sort(tf.abs(x[..., :: max(1, n // 65536)]))
    last = magnitudes.shape[-1] - 1
    position = percentile / 100.0 * last
    below = int(position)
    above = min(below + 1, last)
    low, high = magnitudes[..., below, None], magnitudes[..., above, None]
    limit = low + (high - low) * (position - below)
    return tf.clip_by_value(x, -limit, limit)
