"""Linear quantization with 2 bits, in small blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from .. import formats
from ..formats.base import Shape
from ..formats.int2 import BLOCK
from ..kernels import blocks, headers, linear
from ..kernels.compile import Terms, compiled, fed_back
from ..kernels.native import NativeFormat
from .base import ChunkInput, Compressor, Encoded
from .builtin import BuiltinCompressor
from .hadamard import Hadamard
from .quantize import decode_matrix, quantize_blocks
from .registry import register


@register
@dataclasses.dataclass(frozen=True)
class Int2(formats.Int2, BuiltinCompressor):
    """Sends each value as one of four evenly spaced levels, one of which is zero.

    It has as many bytes as `quantize:bits=2`, and blocks of 64 elements in place of 256: beside an outlier, 63 values
    round to zero, and not 255. Outliers and zeros stay what they are, which `hadamard` spreads over a block. An
    optimizer that divides by the size of past gradients, such as Adam, takes large steps where these are small, so
    noise costs most there.

    Update rule, for a block with minimum m <= 0 and maximum M >= 0 (zero is counted with its values): step =
    (M - m) / 3, rounded to 7 significant bits; base = round(m / step), from -3 to 0; code = round(x / step) - base,
    from 0 to 3; decoded as (base + code) * step.

    Wire size: ceil(n / 64) * 18 bytes.

    Error: |error| <= 0.53 step, and |error| <= |x|, as zero is a level: it is a contraction, with error feedback
    (Karimireddy et al. 2019, Assumption A). As with `quantize`, blocks whose values are all tiny (under 1e-36) or so
    large that a level would overflow (over 2e38) decode to zero.
    """

    @property
    def native_format(self) -> NativeFormat | None:
        """Native operations encode it."""
        return NativeFormat("int2")

    def for_rows(self) -> Compressor:
        """`hadamard`: what rounds to zero in the row of a rare word would wait until the row is looked up again."""
        return Hadamard()

    def _encode_chunk(self, chunk: ChunkInput) -> Encoded:
        terms = chunk.terms(lambda x: blocks.to_full_blocks(x, BLOCK))
        header, step, base, finite = _grid(terms)
        codes, new_residual = quantize_blocks(terms, step, base, 2, None, chunk.keep)
        if new_residual is not None:
            new_residual = blocks.from_blocks(new_residual, chunk.shape)
        return Encoded([header, *codes], chunk.shape, new_residual, finite)

    def decode_sum(self, ranks: Sequence[Sequence[tf.Tensor]], ctx: Shape, scale: tf.Tensor) -> tf.Tensor:
        """Unpacks, dequantizes and sums in one pass."""
        return blocks.from_blocks(_decode_sum([list(parts) for parts in ranks], scale), ctx)


@compiled
def _grid(terms: Terms) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
    low, high, finite = linear.extremes(fed_back(*terms))
    header = headers.of_extremes(low, high)
    return tf.cast(header, tf.uint16), *headers.step_and_base(header), finite


@compiled
def _decode_sum(ranks: Sequence[list[tf.Tensor]], scale: tf.Tensor) -> tf.Tensor:
    return decode_matrix([[*headers.step_and_base(header), codes] for header, codes in ranks], 2, scale)
