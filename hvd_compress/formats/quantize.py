"""Formats of `compressors.quantize` and `compressors.onebit`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from ..common import checks
from ..common.error_text import error_text
from .base import Format, Part, Shape, size_of
from .registry import register
from .sizes import block_shape, fields

# In smaller blocks, fewer small values round to zero beside an outlier. A block's header of 8 bytes costs a quarter
# of a bit per element.
BLOCK = 256
SIGN_BLOCK = 1024


@register
@dataclasses.dataclass(frozen=True)
class Quantize(Format):
    """Codes of `bits` bits, with the step and the base of each block."""

    name = "quantize"
    short_names: ClassVar[Mapping[str, str]] = {"quantize:bits=8": "int8", "quantize:bits=4": "int4"}
    examples = (
        "int8",
        "int4",
        "quantize:bits=1",
        "quantize:bits=3",
        "quantize:bits=4,clip=99",
        "quantize:bits=2,rounding=stochastic",
    )
    # Whole blocks, whose parts begin at multiples of 64 bytes.
    alignment = 16 * BLOCK
    bits: int
    rounding: str = "nearest"
    clip: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        self._set(bits=checks.integer("quantize: bits", self.bits, 1, 8))
        if not isinstance(self.rounding, str) or self.rounding not in ("nearest", "stochastic"):
            raise ValueError(f"quantize: rounding must be 'nearest' or 'stochastic', got {error_text(self.rounding)}")
        if self.clip is not None:
            if not checks.is_number(self.clip) or not 0.0 < self.clip <= 100.0:
                raise ValueError(
                    f"quantize: clip must be None or a percentile above 0 and at most 100, got {error_text(self.clip)}"
                )
            self._set(clip=self.clip if isinstance(self.clip, int) else float(self.clip))
        self._set(seed=checks.seed("quantize: seed", self.seed))

    @property
    def value_bits(self) -> int:  # type: ignore[override]
        """The same as `bits`."""
        return self.bits

    def parts(self, shape: Shape) -> list[Part]:
        """Step and base of each block, then the packed codes: one part per field of the width."""
        return block_parts(size_of(shape), self.bits)

    def estimated_noise_loss(self, noise: np.ndarray) -> float:
        """That of blocks of 256."""
        return noise_loss_of_blocks(noise, BLOCK, self.bits)


def noise_loss_of_blocks(noise: np.ndarray, block: int, bits: int) -> float:
    """The share of the energy that is lost of noise, float [n]: evenly spaced levels lose step^2 / 12 per element."""
    steps = np.ptp(noise.reshape(-1, block), 1) / (2**bits - 1)
    return float(np.mean(np.square(steps / 12**0.5)))


def block_parts(n: int, bits: int) -> list[Part]:
    """The parts of `n` elements that are quantized in blocks, each with its own step and base."""
    rows, block = block_shape(n, BLOCK)
    scale = Part((rows, 1), "float32")
    return [scale, scale, *(Part((rows, block * width // 8), "uint8") for width in fields(bits))]


@register
@dataclasses.dataclass(frozen=True)
class OneBit(Format):
    """Signs, and a magnitude per block."""

    name = "onebit"
    examples = ("onebit",)
    value_bits = 1
    alignment = SIGN_BLOCK

    def parts(self, shape: Shape) -> list[Part]:
        """The magnitude of each block, then the signs."""
        rows, block = block_shape(size_of(shape), SIGN_BLOCK)
        return [Part((rows, 1), "float32"), Part((rows, block // 8), "uint8")]

    def estimated_noise_loss(self, noise: np.ndarray) -> float:
        """Signs with a common magnitude lose 1 - (mean |x|)^2 / mean x^2."""
        return float(1.0 - np.mean(np.abs(noise)) ** 2 / np.mean(np.square(noise)))
