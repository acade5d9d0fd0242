"""What a format is, and how its arguments are checked."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

from ..common.error_text import error_text

Shape = tuple[int, ...]

# Bytes of an element.
_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2, "int32": 4, "uint16": 2, "uint8": 1}


class Part(NamedTuple):
    """One of the tensors that are sent."""

    shape: Shape
    dtype: str  # its name

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * _SIZES[self.dtype]


class Traits:
    """What the exchange, the cost model and the engine need to know of a compressor.

    Attributes:
        summable: Whether the payload is one tensor of floats that may be summed before it is decompressed; it is then
            exchanged in a plain allreduce.
        sparse: Whether most elements decode to zero, so that momentum correction makes sense.
        per_tensor: Whether it needs each gradient in its own shape rather than flat chunks.
        model_wide: Whether all gradients of the model are exchanged at once, as `powersgd` does.
        uncompressed: Whether gradients are left as they are, for Horovod's own allreduce.
        automatic: Whether it stands for a choice among `candidates` in each step.
        pure: Whether `encode` depends on nothing but its arguments, so that buckets of one shape share a function.
        value_bits: The bits of each value that is sent.
        alignment: Chunks whose size is a multiple of this are encoded without padding; others too.
    """

    summable: bool = False
    sparse: bool = False
    per_tensor: bool = False
    model_wide: bool = False
    uncompressed: bool = False
    automatic: bool = False
    pure: bool = False
    value_bits: int = 32
    alignment: int = 16

    @property
    def stages(self) -> tuple[Any, ...]:
        """The compressors that it is in the course of training, in their order; most are always the same."""
        return (self,)

    @property
    def candidates(self) -> tuple[Any, ...]:
        """The compressors that a bucket may get: itself, unless it is `automatic`."""
        return (self,)


class Format(Traits):
    """A built-in compressor's arguments and sizes.

    Attributes:
        name: The first word of its spec string.
    """

    name: ClassVar[str]

    def parts(self, shape: Shape) -> list[Part]:
        """What a tensor of this shape, with at least one element, becomes."""
        raise NotImplementedError

    def wire_bytes(self, shape: int | Sequence[int]) -> int:
        """The exact number of bytes that a tensor of this shape (or number of elements) becomes."""
        shape = as_shape(shape)
        return sum(part.nbytes for part in self.parts(shape)) if size_of(shape) else 0

    @property
    def spec(self) -> str:
        """One line that `hvdc.Compression.parse` turns back into this compressor."""
        from .specs import spec_of

        return spec_of(self)

    def default_of(self, field: dataclasses.Field[Any]) -> Any:
        """An argument's default, as it is kept."""
        return field.default

    def __str__(self) -> str:
        return self.spec


def is_summed(compressor: Any, shapes: Sequence[Shape]) -> bool:
    """Whether a compressor's payloads of tensors of these shapes are summed as they are.

    Not those of 16 bits, though they may be: sums would round at every rank.

    Args:
        compressor: A `Format` or a `hvdc.Compressor`.
        shapes: Of the tensors.
    """
    if not compressor.summable:
        return False
    parts_of = compressor.parts if isinstance(compressor, Format) else compressor.layout
    layouts = [parts_of(shape) for shape in shapes]
    return all(len(parts) == 1 and parts[0].dtype == "float32" for parts in layouts)


def as_shape(shape: int | Sequence[int]) -> Shape:
    """A shape, or a number of elements, as a shape."""
    return (int(shape),) if isinstance(shape, int) else tuple(int(size) for size in shape)


def size_of(shape: Shape) -> int:
    """The number of elements of a tensor of this shape."""
    return math.prod(shape)


def check_ratio(ratio: float, who: str) -> float:
    """`ratio` as a float.

    Raises:
        ValueError: It is not a number above 0 and at most 1.
    """
    if isinstance(ratio, bool) or not isinstance(ratio, numbers.Real) or not 0.0 < ratio <= 1.0:
        raise ValueError(f"{who}: ratio must be a number above 0 and at most 1, got {error_text(ratio)}")
    return float(ratio)


def check_integer(value: int, name: str, who: str, largest: float = math.inf, smallest: int = 1) -> int:
    """`value` as an int.

    Raises:
        ValueError: It is not a whole number from `smallest` to `largest`.
    """
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not whole or not smallest <= value <= largest:
        upto = "on" if largest == math.inf else f"to {largest}"
        raise ValueError(
            f"{who}: {name} must be a whole number from {smallest} {upto}, got {error_text(value)}"
        )
    return int(value)


def check_flag(value: bool, name: str, who: str) -> bool:
    """`value`, which is True or False.

    Raises:
        ValueError: It is something else.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{who}: {name} must be true or false, got {error_text(value)}")
    return value


def check_seed(value: int, who: str) -> int:
    """`value` as an int.

    Raises:
        ValueError: It is not a whole number of 32 bits.
    """
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not whole or not -(2**31) <= value < 2**31:
        raise ValueError(
            f"{who}: seed must be a whole number from -2**31 to 2**31 - 1, got {error_text(value)}"
        )
    return int(value)


def num_kept(ratio: float, n: int) -> int:
    """How many of `n` elements a ratio keeps: ratio * n rounded up, at least one."""
    # 0.07 * 100 is 7.000000000000001 and must give 7
    return max(1, min(n, math.ceil(ratio * n * (1.0 - 1e-12))))
