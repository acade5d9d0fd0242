"""What each rank sends for a bucket, pattern by pattern, and which pattern sends least: numbers only.

A compressor here is a `hvdc.Compressor` or a format (`hvd_compress.formats`): what has `wire_bytes`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from .formats.base import Shape, is_summed
from .formats.low_rank import PowerSGD

# Scatter-reduce takes one more collective than an allgather: a few milliseconds of Horovod's scheduling, in
# which a link of 1 Gbit/s sends about this many bytes.
_WORTH_A_COLLECTIVE = 2**18


def payload_bytes(compressor: Any, shapes: Sequence[Shape]) -> int:
    """Bytes that tensors of these shapes become."""
    return sum(count * int(compressor.wire_bytes(shape)) for shape, count in Counter(shapes).items())


def flagged_bytes(nbytes: int) -> int:
    """The length of a payload of `nbytes` with its flag: a multiple of 64, unless it is short."""
    return nbytes + 1 if nbytes < 4096 else 64 * (nbytes // 64 + 1)


def ring_bytes(nbytes: int, ranks: int) -> int:
    """What each rank of a ring sends to allreduce `nbytes`: 2 (n - 1) / n of them."""
    return round(2 * (ranks - 1) / ranks * nbytes)


def allreduce(compressor: Any, shapes: Sequence[Shape], ranks: int) -> int:
    """What each rank of a ring sends, the flag included."""
    return ring_bytes(payload_bytes(compressor, shapes) + 4, ranks)


def allgather(compressor: Any, shapes: Sequence[Shape], ranks: int) -> int:
    """What each rank of a ring sends: n - 1 payloads."""
    return (ranks - 1) * flagged_bytes(payload_bytes(compressor, shapes))


def scatter_reduce(compressor: Any, shapes: Sequence[Shape], ranks: int) -> int:
    """What each rank sends: n - 1 payloads of 1 / n of the bucket, twice."""
    part = len(shapes) // ranks * payload_bytes(compressor, shapes[:1])
    return 2 * (ranks - 1) * flagged_bytes(part)


def low_rank(compressor: Any, shapes: Sequence[Shape], ranks: int) -> int:
    """What each rank of a ring sends: left factors and then right ones, each in an allreduce."""
    return ring_bytes(payload_bytes(compressor, shapes), ranks)


PATTERNS: dict[str, Callable[[Any, Sequence[Shape], int], int]] = {
    "allreduce": allreduce,
    "allgather": allgather,
    "scatter_reduce": scatter_reduce,
    "low_rank": low_rank,
}


def choose(compressor: Any, shapes: Sequence[Shape], ranks: int) -> str:
    """The pattern for pieces of these shapes: the one in which a rank sends least."""
    if isinstance(compressor, PowerSGD):
        return "low_rank"
    distinct = list(dict.fromkeys(shapes))
    if is_summed(compressor, distinct):
        return "allreduce"
    if ranks > 2 and len(shapes) % ranks == 0 and len(distinct) == 1:
        saved = allgather(compressor, shapes, ranks) - scatter_reduce(compressor, shapes, ranks)
        if saved > _WORTH_A_COLLECTIVE:
            return "scatter_reduce"
    return "allgather"
