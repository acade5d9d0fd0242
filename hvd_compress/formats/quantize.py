"""Formats of `compressors.quantize` and `compressors.onebit`."""

from __future__ import annotations

import dataclasses
import numbers
from typing import ClassVar

from ..common.error_text import error_text
from .base import Format, Part, Shape, check_integer, check_seed, size_of
from .sizes import block_count, block_size, fields

# The fewer elements share a step, the fewer small ones round to zero beside an outlier; a block's header of
# 8 bytes costs a quarter of a bit per element.
BLOCK = 256
SIGN_BLOCK = 1024


@dataclasses.dataclass(frozen=True)
class Quantize(Format):
    """Codes of `bits` bits, with step and base of each block."""

    name: ClassVar[str] = "quantize"
    # Whole blocks, whose parts begin at multiples of 64 bytes.
    alignment = 16 * BLOCK
    bits: int
    rounding: str = "nearest"
    clip: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "bits", check_integer(self.bits, "bits", self.name, 8))
        if not isinstance(self.rounding, str) or self.rounding not in ("nearest", "stochastic"):
            raise ValueError(
                f"quantize: rounding must be 'nearest' or 'stochastic', got {error_text(self.rounding)}"
            )
        if self.clip is not None:
            bad = isinstance(self.clip, bool) or not isinstance(self.clip, numbers.Real)
            if bad or not 0.0 < self.clip <= 100.0:
                raise ValueError(
                    f"quantize: clip must be None or a percentile above 0 and at most 100, got {error_text(self.clip)}"
                )
            object.__setattr__(self, "clip", self.clip if isinstance(self.clip, int) else float(self.clip))
        object.__setattr__(self, "seed", check_seed(self.seed, self.name))

    @property
    def value_bits(self) -> int:  # type: ignore[override]
        """The same as `bits`."""
        return self.bits

    def parts(self, shape: Shape) -> list[Part]:
        """Step and base of each block, then the packed codes, a part per field of the width."""
        return block_parts(size_of(shape), self.bits)


def block_parts(n: int, bits: int) -> list[Part]:
    """What `n` elements become in blocks of their own step and base."""
    block = block_size(n, BLOCK)
    rows = block_count(n, block)
    scale = Part((rows, 1), "float32")
    return [scale, scale, *(Part((rows, block * width // 8), "uint8") for width in fields(bits))]


@dataclasses.dataclass(frozen=True)
class OneBit(Format):
    """Signs, and a magnitude per block."""

    name: ClassVar[str] = "onebit"
    value_bits = 1
    alignment = SIGN_BLOCK

    def parts(self, shape: Shape) -> list[Part]:
        """The magnitude of each block, then the signs."""
        n = size_of(shape)
        block = block_size(n, SIGN_BLOCK)
        rows = block_count(n, block)
        return [Part((rows, 1), "float32"), Part((rows, block // 8), "uint8")]
