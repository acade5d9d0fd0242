"""The format of `compressors.hadamard`."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from .base import Format, Part, Shape, size_of
from .registry import register

# Elements of a block. Its scale of 2 bytes costs a quarter of a bit per element.
BLOCK = 64
# Elements of the blocks of short rows.
SMALL_BLOCK = 16

# The positive levels of the Lloyd-Max quantizer of 2 bits for a standard normal variable, the threshold midway between
# them, and the quantizer's mean squared error (Max 1960, Table I; here to more digits).
LOW, HIGH = 0.4527800, 1.5104176
THRESHOLD = (LOW + HIGH) / 2
ERROR = 0.1174818


@register
@dataclasses.dataclass(frozen=True)
class Hadamard(Format):
    """Codes of 2 bits of rotated blocks, with the scale of each block."""

    name = "hadamard"
    examples = ("hadamard",)
    value_bits = 2
    # Whole blocks, whose parts begin at multiples of 64 bytes.
    alignment = 32 * BLOCK

    def parts(self, shape: Shape) -> list[Part]:
        """The scale of each block, then the packed codes."""
        rows = math.ceil(size_of(shape) / BLOCK)
        return [Part((rows, 1), "bfloat16"), Part((rows, BLOCK // 4), "uint8")]

    def estimated_noise_loss(self, noise: np.ndarray) -> float:
        """That of the Lloyd-Max quantizer: rotated white noise is white noise."""
        return ERROR
