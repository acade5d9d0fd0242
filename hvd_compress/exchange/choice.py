"""Which pattern a bucket's pieces cross in."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

from .. import traffic
from ..compressors import Compressor
from . import allgather, allreduce, low_rank, scatter_reduce
from .common import Shape

_MODULES = {
    "allgather": allgather, "allreduce": allreduce, "low_rank": low_rank, "scatter_reduce": scatter_reduce,
}  # fmt: skip


def choose(compressor: Compressor, shapes: Sequence[Shape], ranks: int) -> ModuleType:
    """The pattern for pieces of these shapes: the one in which a rank sends least."""
    return _MODULES[traffic.choose(compressor, shapes, ranks)]


def name_of(pattern: ModuleType) -> str:
    """What the cost model calls it."""
    return pattern.__name__.rpartition(".")[2]
