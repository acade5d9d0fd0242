"""The base class of formats: a compressor's arguments, and the sizes of what it sends."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from .specs import format_spec

Shape = tuple[int, ...]

# Bytes of an element.
_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2, "int32": 4, "uint16": 2, "uint8": 1}


class Part(NamedTuple):
    """One of the tensors that are sent."""

    shape: Shape
    dtype: str  # its name

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * _SIZES[self.dtype]


class Traits:
    """What the exchange, the cost model and the engine need to know of a compressor.

    `hvdc.Compressor` describes `summable`, `sparse`, `per_tensor` and `alignment`.

    Attributes:
        model_wide: Whether all gradients of the model are exchanged at once, as with `powersgd`.
        uncompressed: Whether gradients are left as they are, for Horovod's own allreduce.
        automatic: Whether it stands for a choice among `candidates` in each step.
        counts: What `stages` are counted in: "steps", "epochs", the share of "training" so far, or a number that is
            "given" in each step.
        steps_per_count: The number of steps in an epoch or in training, where the user gives it; None where callbacks
            tell it.
        pure: Whether `encode` depends on its arguments only, so that buckets of one shape share a function.
        value_bits: The bits of each value that is sent.
    """

    summable: bool = False
    sparse: bool = False
    per_tensor: bool = False
    model_wide: bool = False
    uncompressed: bool = False
    automatic: bool = False
    counts: str = "epochs"
    pure: bool = False
    value_bits: int = 32
    alignment: int = 16

    @property
    def stages(self) -> tuple[Any, ...]:
        """The compressors that take turns in the course of training, in order; most compressors have one stage."""
        return (self,)

    @property
    def steps_per_count(self) -> int | None:
        """See the attributes above."""
        return None

    @property
    def candidates(self) -> tuple[Any, ...]:
        """The compressors that a bucket may get: itself, unless it is `automatic`."""
        return (self,)


class Format(Traits):
    """A built-in compressor's arguments and sizes, without TensorFlow.

    A subclass is a frozen dataclass whose fields are the compressor's arguments. It defines `name` and `parts`, checks
    its arguments in `__post_init__`, and is decorated with `@formats.registry.register`.

    Attributes:
        name: The first word of its spec string.
        short_names: Spec strings that have a shorter name, and this name.
        examples: Spec strings for the tests; together they exercise all branches of the compressor.
    """

    name: ClassVar[str]
    short_names: ClassVar[Mapping[str, str]] = {}
    examples: ClassVar[tuple[str, ...]] = ()

    def parts(self, shape: Shape) -> list[Part]:
        """The tensors that are sent for a tensor of this shape, which has at least one element."""
        raise NotImplementedError

    def wire_bytes(self, shape: int | Sequence[int]) -> int:
        """The exact number of bytes that are sent for a tensor of this shape (or number of elements)."""
        shape = as_shape(shape)
        return sum(part.nbytes for part in self.parts(shape)) if size_of(shape) else 0

    def estimated_noise_loss(self, noise: np.ndarray) -> float:
        """The share of the energy of white noise, float [n], that one step loses, without compressing it."""
        return 0.0

    @property
    def spec(self) -> str:
        """One line that `hvdc.Compression.parse` turns back into this compressor: its name and changed arguments."""
        values = [(field, getattr(self, field.name)) for field in dataclasses.fields(self)]  # type: ignore[arg-type]
        changed = {field.name: value for field, value in values if value != self.default_of(field)}
        spec = format_spec(self.name, changed)
        return self.short_names.get(spec, spec)

    def default_of(self, field: dataclasses.Field[Any]) -> Any:
        """An argument's default, as the compressor stores it."""
        return field.default

    def _set(self, **arguments: Any) -> None:
        """Stores checked arguments; for `__post_init__`, as the dataclass is frozen."""
        for name, value in arguments.items():
            object.__setattr__(self, name, value)

    def __str__(self) -> str:
        return self.spec


def is_summed(compressor: Any, shapes: Sequence[Shape]) -> bool:
    """Whether a compressor's or a format's payloads of tensors of these shapes are summed without decompression.

    Payloads of 16 bits are not, although they may be: the sum would be rounded at every rank.
    """
    if not compressor.summable:
        return False
    layouts = map(compressor.parts if isinstance(compressor, Format) else compressor.layout, shapes)
    return all(len(parts) == 1 and parts[0].dtype == "float32" for parts in layouts)


def as_shape(shape: int | Sequence[int]) -> Shape:
    """A shape, or a number of elements, as a shape."""
    return (int(shape),) if isinstance(shape, int) else tuple(int(size) for size in shape)


def size_of(shape: Shape) -> int:
    """The number of elements of a tensor of this shape."""
    return math.prod(shape)


def num_kept(ratio: float, n: int) -> int:
    """How many of `n` elements a ratio keeps: ratio * n rounded up, at least one."""
    # 0.07 * 100 is 7.000000000000001 and must give 7
    return max(1, min(n, math.ceil(ratio * n * (1.0 - 1e-12))))
