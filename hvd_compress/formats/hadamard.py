"""The format of `compressors.hadamard`."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from ..common import checks
from .base import Format, Part, Shape, size_of
from .registry import register
from .sizes import fields

# Each block has a scale of 2 bytes: a quarter of a bit per element.
BLOCK = 64

# Lloyd-Max quantizers of a standard normal variable: the positive levels for 1 to 4 bits, and the mean squared errors
# (Max 1960, Table I; here to more digits). Thresholds are midway between levels.
LEVELS = {
    1: (0.7978846,),
    2: (0.4527800, 1.5104176),
    3: (0.2450942, 0.7560053, 1.3439093, 2.1519457),
    4: (0.1283950, 0.3880483, 0.6567591, 0.9423405, 1.2562312, 1.6180464, 2.0690172, 2.7325896),
}  # fmt: skip
_ERRORS = {1: 0.3634, 2: 0.1175, 3: 0.03455, 4: 0.009501}


@register
@dataclasses.dataclass(frozen=True)
class Hadamard(Format):
    """Codes of `bits` bits of rotated blocks, with the scale of each block."""

    name = "hadamard"
    examples = ("hadamard:bits=2",)
    # Whole blocks, whose parts begin at multiples of 64 bytes.
    alignment = 32 * BLOCK
    bits: int

    def __post_init__(self) -> None:
        self._set(bits=checks.integer("hadamard: bits", self.bits, 1, 4))

    @property
    def value_bits(self) -> int:  # type: ignore[override]
        """The same as `bits`."""
        return self.bits

    def parts(self, shape: Shape) -> list[Part]:
        """The scale of each block, then the packed codes: one part per field of the width."""
        rows = math.ceil(size_of(shape) / BLOCK)
        codes = (Part((rows, BLOCK * width // 8), "uint8") for width in fields(self.bits))
        return [Part((rows, 1), "bfloat16"), *codes]

    def estimated_noise_loss(self, noise: np.ndarray) -> float:
        """That of the Lloyd-Max quantizer: rotated white noise is white noise."""
        return _ERRORS[self.bits]
