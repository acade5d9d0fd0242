"""The register of collectives, and the choice of one for a bucket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..formats.base import Shape
from .allgather import Allgather, GatheringCollective
from .allreduce import Allreduce
from .collective import Collective
from .factor_allreduce import FactorAllreduce
from .hierarchical import Hierarchical, HostCounts
from .scatter_reduce import ScatterReduce

if TYPE_CHECKING:
    from .hosts import Hosts

# The register. Which of them `fits` follows from the compressor and the shapes of the chunks.
FLAT: tuple[Collective, ...] = (FactorAllreduce(), Allreduce(), Allgather(), ScatterReduce())

# Horovod takes a few milliseconds to schedule a collective. A link of 1 Gbit/s sends about this many bytes meanwhile.
_WORTH_A_COLLECTIVE = 2**18


def collectives(hosts: Hosts | HostCounts | None = None) -> list[Collective]:
    """All collectives: the flat ones and, if there are several hosts of several workers, the hierarchical ones."""
    if hosts is None:
        return list(FLAT)
    return [*FLAT, *(Hierarchical(hosts, c) for c in FLAT if isinstance(c, GatheringCollective))]


def choose(compressor: Any, shapes: Sequence[Shape], ranks: int, hosts: Hosts | HostCounts | None = None) -> Collective:
    """Returns the collective for chunks of these shapes.

    A hierarchical one is preferred, if `hosts` are given and one fits. Of several, this is the one that sends the
    fewest bytes, where each transfer counts as 256 KiB more.
    """
    possible = [c for c in collectives(hosts) if c.fits(compressor, shapes, ranks)]
    preferred = [c for c in possible if c.hierarchical] or possible

    def cost(collective: Collective) -> int:
        transfers = collective.phases(0.0, 0.0, ranks).transfers
        return collective.bytes_sent(compressor, shapes, ranks) + len(transfers) * _WORTH_A_COLLECTIVE

    return preferred[0] if len(preferred) == 1 else min(preferred, key=cost)
