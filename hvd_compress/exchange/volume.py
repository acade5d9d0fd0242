"""What each rank sends for a bucket, pattern by pattern, and which pattern sends least: numbers only.

A compressor here is a `hvdc.Compressor` or a format (`hvd_compress.formats`): what has `wire_bytes`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from ..formats.base import Shape, is_summed

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


def two_level(compressor: Any, shapes: Sequence[Shape], hosts: int, workers: int) -> int:
    """What each rank sends to other hosts: its share of the chunks, in the pattern that is best between so many."""
    part = shapes[: len(shapes) // workers]
    return PATTERNS[choose(compressor, part, hosts)](compressor, part, hosts)


def fits_two_levels(compressor: Any, shapes: Sequence[Shape], workers: int) -> bool:
    """Whether chunks of these shapes can cross in two levels between hosts of so many workers.

    Not what is summed in an allreduce, whose ring leaves each host but once in any case; nor whole tensors.
    """
    distinct = set(shapes)
    alike = len(distinct) == 1 and len(shapes) % workers == 0
    return alike and not compressor.per_tensor and not is_summed(compressor, list(distinct))


def leaving_host(compressor: Any, shapes: Sequence[Shape], hosts: int, workers: int, pattern: str) -> int:
    """What all workers of a host send to other hosts, with neighbours in the ring on the same host.

    Args:
        compressor: Of the chunks.
        shapes: Of the chunks.
        hosts: How many.
        workers: On each of them.
        pattern: One of `PATTERNS`, between all ranks, or "two_level".
    """
    ranks = hosts * workers
    if pattern == "two_level":
        return workers * two_level(compressor, shapes, hosts, workers)
    if pattern == "scatter_reduce":  # each to all on other hosts, then a ring
        once = flagged_bytes(len(shapes) // ranks * payload_bytes(compressor, shapes[:1]))
        return (workers * (ranks - workers) + ranks - 1) * once
    return PATTERNS[pattern](compressor, shapes, ranks)  # in a ring only one of them sends to another host


PATTERNS: dict[str, Callable[[Any, Sequence[Shape], int], int]] = {
    "allreduce": allreduce,
    "allgather": allgather,
    "scatter_reduce": scatter_reduce,
    "low_rank": low_rank,
}


def choose(compressor: Any, shapes: Sequence[Shape], ranks: int) -> str:
    """The pattern for chunks of these shapes: the one in which a rank sends least."""
    if compressor.model_wide:
        return "low_rank"
    distinct = list(dict.fromkeys(shapes))
    if is_summed(compressor, distinct):
        return "allreduce"
    if ranks > 2 and len(shapes) % ranks == 0 and len(distinct) == 1:
        saved = allgather(compressor, shapes, ranks) - scatter_reduce(compressor, shapes, ranks)
        if saved > _WORTH_A_COLLECTIVE:
            return "scatter_reduce"
    return "allgather"
