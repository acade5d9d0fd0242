"""Formats of `compressors.cast`."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from .base import Format, Part, Shape, size_of
from .registry import register


class Cast(Format):
    """Each value as `wire_type`."""

    summable = True
    wire_type: ClassVar[str]

    def parts(self, shape: Shape) -> list[Part]:
        """One part: the values."""
        return [Part((size_of(shape),), self.wire_type)]


@register
@dataclasses.dataclass(frozen=True)
class NoCompression(Cast):
    """Each value as it is."""

    name = "none"
    examples = ("none",)
    uncompressed = True
    wire_type = "float32"


@register
@dataclasses.dataclass(frozen=True)
class Float16(Cast):
    """Half precision."""

    name = "fp16"
    examples = ("fp16",)
    value_bits = 16
    wire_type = "float16"


@register
@dataclasses.dataclass(frozen=True)
class BFloat16(Cast):
    """The type bfloat16."""

    name = "bf16"
    examples = ("bf16",)
    value_bits = 16
    wire_type = "bfloat16"
