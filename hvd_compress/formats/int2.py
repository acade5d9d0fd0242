"""The format of `compressors.int2`."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from .base import Format, Part, Shape, size_of
from .quantize import noise_loss_of_blocks
from .registry import register

# Elements of a block. Its header of 2 bytes costs a quarter of a bit per element.
BLOCK = 64


@register
@dataclasses.dataclass(frozen=True)
class Int2(Format):
    """Codes of 2 bits, with the step and the base of each block in 16 bits."""

    name = "int2"
    examples = ("int2",)
    value_bits = 2
    # Whole blocks, whose parts begin at multiples of 64 bytes.
    alignment = 32 * BLOCK

    def parts(self, shape: Shape) -> list[Part]:
        """The header of each block, then the packed codes."""
        rows = math.ceil(size_of(shape) / BLOCK)
        return [Part((rows, 1), "uint16"), Part((rows, BLOCK // 4), "uint8")]

    def estimated_noise_loss(self, noise: np.ndarray) -> float:
        """As of `quantize`, in smaller blocks."""
        return noise_loss_of_blocks(noise, BLOCK, self.value_bits)
