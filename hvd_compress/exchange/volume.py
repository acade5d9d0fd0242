"""How many bytes payloads and rings take.

A compressor is a `hvdc.Compressor` or a format (`hvd_compress.formats`): anything with `wire_bytes`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from ..formats.base import Shape, is_summed

# Elements of a chunk at most; see `engine.layout` for the reason.
LARGEST = 2**20


def are_alike(shapes: Sequence[Shape]) -> bool:
    """Whether there are shapes, all of them the same."""
    return bool(shapes) and shapes.count(shapes[0]) == len(shapes)


def are_summed(compressor: Any, shapes: Sequence[Shape]) -> bool:
    """Whether payloads of tensors of these shapes are summed as they are, see `formats.base.is_summed`."""
    return not compressor.model_wide and is_summed(compressor, list(set(shapes)))


def payload_bytes(compressor: Any, shapes: Sequence[Shape]) -> int:
    """The bytes to which tensors of these shapes are encoded."""
    return sum(count * int(compressor.wire_bytes(shape)) for shape, count in Counter(shapes).items())


def flagged_bytes(nbytes: int) -> int:
    """The length of a payload of `nbytes` with its flag: a multiple of 64, unless the payload is short."""
    return nbytes + 1 if nbytes < 4096 else 64 * (nbytes // 64 + 1)


def ring_bytes(nbytes: int, ranks: int) -> int:
    """Bytes that each rank of a ring sends to allreduce `nbytes`: 2 (n - 1) / n of them."""
    return round(2 * (ranks - 1) / ranks * nbytes)
