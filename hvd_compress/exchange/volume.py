"""How many bytes payloads and rings take.

A compressor is a `hvdc.Compressor` or a format (`hvd_compress.formats`): anything with `wire_bytes`.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload

from ..formats.base import Shape, is_summed

# Elements of a chunk at most; see `engine.layout` for the reasons.
LARGEST = 2**20
LARGEST_ON_GPU = 2**24
# The default of `hvdc.DistributedOptimizer`.
BUCKET_BYTES = 25 * 2**20


@dataclasses.dataclass(frozen=True)
class Alike(Sequence[Shape]):
    """`number` times the same shape. A million of them take no more time than one."""

    shape: Shape
    number: int

    def __len__(self) -> int:
        return self.number

    def __iter__(self) -> Iterator[Shape]:
        return (self.shape for _ in range(self.number))

    @overload
    def __getitem__(self, index: int) -> Shape: ...

    @overload
    def __getitem__(self, index: slice) -> Alike: ...

    def __getitem__(self, index: int | slice) -> Shape | Alike:
        of_range = range(self.number)[index]
        return Alike(self.shape, len(of_range)) if isinstance(of_range, range) else self.shape


def counts(shapes: Sequence[Shape]) -> Mapping[Shape, int]:
    """How often each of the shapes occurs."""
    return {shapes.shape: len(shapes)} if isinstance(shapes, Alike) and shapes else Counter(shapes)


def are_alike(shapes: Sequence[Shape]) -> bool:
    """Whether there are shapes, all of them the same."""
    return len(counts(shapes)) == 1


def are_summed(compressor: Any, shapes: Sequence[Shape]) -> bool:
    """Whether payloads of tensors of these shapes are summed as they are, see `formats.base.is_summed`."""
    return not compressor.model_wide and is_summed(compressor, list(counts(shapes)))


def payload_bytes(compressor: Any, shapes: Sequence[Shape]) -> int:
    """The bytes to which tensors of these shapes are encoded."""
    return sum(count * int(compressor.wire_bytes(shape)) for shape, count in counts(shapes).items())


def flagged_bytes(nbytes: int) -> int:
    """The length of a payload of `nbytes` with its flag: a multiple of 64, unless the payload is short."""
    return nbytes + 1 if nbytes < 4096 else 64 * (nbytes // 64 + 1)


def ring_bytes(nbytes: int, ranks: int) -> int:
    """Bytes that each rank of a ring sends to allreduce `nbytes`: 2 (n - 1) / n of them."""
    return round(2 * (ranks - 1) / ranks * nbytes)
