"""Which pattern a bucket's pieces cross in."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

from ..compressors import Compressor
from ..compressors.base import is_summed
from . import allgather, allreduce, scatter_reduce
from .common import Shape

# Scatter-reduce takes one more collective than an allgather: a few milliseconds of Horovod's scheduling, in
# which a link of 1 Gbit/s sends about this many bytes.
_WORTH_A_COLLECTIVE = 2**18


def choose(compressor: Compressor, shapes: Sequence[Shape], ranks: int) -> ModuleType:
    """The pattern for pieces of these shapes: the one in which a rank sends least."""
    distinct = list(dict.fromkeys(shapes))
    if is_summed(compressor, distinct):
        return allreduce
    if ranks > 2 and len(shapes) % ranks == 0 and len(distinct) == 1:
        saved = allgather.bytes_sent(compressor, shapes, ranks)
        saved -= scatter_reduce.bytes_sent(compressor, shapes, ranks)
        if saved > _WORTH_A_COLLECTIVE:
            return scatter_reduce
    return allgather


def name_of(pattern: ModuleType) -> str:
    """What the cost model calls it."""
    return pattern.__name__.rpartition(".")[2]
