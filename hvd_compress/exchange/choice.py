"""Which pattern a bucket's chunks cross in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..compressors import Compressor
from . import allgather, allreduce, scatter_reduce
from . import factor_allreduce as low_rank
from . import volume as traffic
from .common import Shape
from .hierarchical import TwoLevel
from .hosts import Hosts

_MODULES = {
    "allgather": allgather, "allreduce": allreduce, "low_rank": low_rank, "scatter_reduce": scatter_reduce,
}  # fmt: skip


def choose(compressor: Compressor, shapes: Sequence[Shape], ranks: int, hosts: Hosts | None = None) -> Any:
    """The pattern for chunks of these shapes: in two levels between `hosts`, if that is possible.

    Else the one in which a rank sends least. A pattern has `reduce` and `bytes_sent`.
    """
    if hosts is not None and traffic.fits_two_levels(compressor, shapes, hosts.workers):
        return TwoLevel(hosts)
    return _MODULES[traffic.choose(compressor, shapes, ranks)]


def name_of(pattern: Any) -> str:
    """What the cost model calls it."""
    return (
        "two_level"
        if isinstance(pattern, TwoLevel)
        else next(name for name, module in _MODULES.items() if module is pattern)
    )
