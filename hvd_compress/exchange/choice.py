"""The register of collectives, and the choice of one for a bucket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..formats.base import Shape
from . import volume
from .allgather import Allgather
from .allreduce import Allreduce
from .collective import Collective
from .factor_allreduce import FactorAllreduce
from .gathering import GatheringCollective
from .hierarchical import Hierarchical, HostCounts
from .scatter_reduce import ScatterReduce

if TYPE_CHECKING:
    from .hosts import Hosts

# The register. Which of them `fits` follows from the compressor and the shapes of the chunks.
FLAT: tuple[Collective, ...] = (FactorAllreduce(), Allreduce(), Allgather(), ScatterReduce())


def collectives(hosts: Hosts | HostCounts | None = None) -> list[Collective]:
    """All collectives: the flat ones and, if there are several hosts of several workers, the hierarchical ones."""
    hierarchical: list[Collective] = []
    if hosts is not None:
        hierarchical = [Hierarchical(hosts, c) for c in FLAT if isinstance(c, GatheringCollective)]
    return [*FLAT, *hierarchical]


def choose(compressor: Any, shapes: Sequence[Shape], ranks: int, hosts: Hosts | HostCounts | None = None) -> Collective:
    """The collective for chunks of these shapes: a hierarchical one if possible; of several, the one that sends least.

    Args:
        compressor: A compressor or its format.
        shapes: Of the chunks of a bucket.
        ranks: The number of ranks.
        hosts: The hosts between which hierarchical collectives are possible, or None.
    """
    possible = [c for c in collectives(hosts) if c.fits(compressor, shapes, ranks)]
    preferred = [c for c in possible if c.hierarchical] or possible

    def cost(collective: Collective) -> int:
        transfers = collective.phases(0.0, 0.0, ranks).transfers
        return volume.with_scheduling(collective.bytes_sent(compressor, shapes, ranks), len(transfers))

    return preferred[0] if len(preferred) == 1 else min(preferred, key=cost)
