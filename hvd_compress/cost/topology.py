"""How long a collective takes on networks of several topologies.

`nbytes` is what one rank contributes: allreduce sums vectors of `nbytes`, allgather sends each rank's `nbytes` to all
others, alltoall divides each rank's `nbytes` evenly among all ranks (its own part stays). A link's burst is subtracted
from all bytes that a collective sends.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Protocol

from ..common import checks
from .link import Link


class Topology(Protocol):
    """A network between `ranks` ranks."""

    @property
    def ranks(self) -> int:
        """The number of ranks."""

    def allreduce(self, nbytes: float) -> float:
        """Seconds to sum vectors of `nbytes`."""

    def allgather(self, nbytes: float) -> float:
        """Seconds until each rank has the `nbytes` of all ranks."""

    def alltoall(self, nbytes: float) -> float:
        """Seconds until each rank has its part of the `nbytes` of all ranks."""


@dataclasses.dataclass(frozen=True)
class _OneLink:
    """Every rank has the same link."""

    link: Link
    ranks: int

    def __post_init__(self) -> None:
        checks.integer(f"{type(self).__name__}: ranks", self.ranks, 1)

    def carry(self, nbytes: float) -> float:
        """Seconds that so many bytes over the link take, without those per message."""
        return self.link.carry(nbytes)

    def _seconds(self, messages: float, carried: float, summed: float = 0.0) -> float:
        """Of a collective with so many messages, bytes over the link and bytes summed; a single rank sends nothing."""
        if self.ranks == 1:
            return 0.0
        return messages * self.link.alpha + self.carry(carried) + summed * self.link.gamma


class Ring(_OneLink):
    """Each rank sends to the next one, all at the same time.

    Allreduce is a reduce-scatter and an allgather, 2 (n - 1) steps of m / n bytes; allgather takes n - 1 steps (Thakur,
    Rabenseifner and Gropp 2005, sections 4.1 and 4.5). Alltoall is pairwise: in each of n - 1 steps every rank sends to
    a different one (section 4.3).
    """

    def allreduce(self, nbytes: float) -> float:
        """2 (n - 1) alpha + 2 (n - 1) / n m beta + (n - 1) / n m gamma."""
        part = (self.ranks - 1) / self.ranks * nbytes
        return self._seconds(2 * (self.ranks - 1), 2 * part, part)

    def reduce_scatter(self, nbytes: float) -> float:
        """(n - 1) (alpha + m / n (beta + gamma))."""
        part = (self.ranks - 1) / self.ranks * nbytes
        return self._seconds(self.ranks - 1, part, part)

    def allgather(self, nbytes: float) -> float:
        """(n - 1) (alpha + m beta)."""
        return self._seconds(self.ranks - 1, (self.ranks - 1) * nbytes)

    def alltoall(self, nbytes: float) -> float:
        """(n - 1) (alpha + m / n beta)."""
        return self._seconds(self.ranks - 1, (self.ranks - 1) / self.ranks * nbytes)


class Tree(_OneLink):
    """Partners at distance 1, 2, 4, ...: ceil(log2 n) steps (Thakur, Rabenseifner and Gropp 2005).

    Allreduce by recursive doubling sends the whole vector in each step (section 4.5). Allgather doubles what each rank
    has (section 4.1). Alltoall is Bruck's, which sends half of the vector in each step (section 4.3).
    """

    @property
    def steps(self) -> int:
        """ceil(log2 n)."""
        return math.ceil(math.log2(self.ranks))

    def allreduce(self, nbytes: float) -> float:
        """log2 n (alpha + m beta + m gamma)."""
        return self._seconds(self.steps, self.steps * nbytes, self.steps * nbytes)

    def allgather(self, nbytes: float) -> float:
        """log2 n alpha + (n - 1) m beta."""
        return self._seconds(self.steps, (self.ranks - 1) * nbytes)

    def alltoall(self, nbytes: float) -> float:
        """log2 n (alpha + m / 2 beta)."""
        return self._seconds(self.steps, self.steps * nbytes / 2)


class Star(_OneLink):
    """A parameter server: all ranks send to one machine, whose link they share, and it sends to all."""

    def allreduce(self, nbytes: float) -> float:
        """2 alpha + 2 n m beta + n m gamma: all vectors in, and the sum out to each rank."""
        return self._seconds(2, 2 * self.ranks * nbytes, self.ranks * nbytes)

    def allgather(self, nbytes: float) -> float:
        """2 alpha + n m beta + n (n - 1) m beta: each rank gets what the others sent."""
        return self._seconds(2, self.ranks**2 * nbytes)

    def alltoall(self, nbytes: float) -> float:
        """2 alpha + 2 (n - 1) m beta: all but the parts that stay, in and out."""
        return self._seconds(2, 2 * (self.ranks - 1) * nbytes)


@dataclasses.dataclass(frozen=True)
class TwoLevel:
    """Hosts of several workers: a ring within each host, and rings between hosts.

    Allreduce is a reduce-scatter within hosts, an allreduce of each part between hosts, where all workers of a host
    share its link, and an allgather within hosts (as NCCL's and Horovod's hierarchical allreduce; Jia et al. 2018,
    section 3.3). Allgather gathers within hosts, then between hosts, and distributes the result within hosts. Alltoall
    first sends the parts for the own host over the local link, and then the others over `link`.

    Attributes:
        link: The link between hosts, one per host.
        local: The link between the workers of one host, one per worker.
        hosts: The number of hosts.
        workers: The number of workers on each host.
        network: The network between hosts, if it is not a `Ring` of `link`: an object such as `FatTree` or `Tree`, with
            as many ranks as there are hosts.

    Raises:
        ValueError: A number is not a whole one from 1 on, or `network` has another number of hosts or is of another
            kind.
    """

    link: Link
    local: Link
    hosts: int
    workers: int
    network: Any = None

    def __post_init__(self) -> None:
        checks.integer("TwoLevel: hosts", self.hosts, 1)
        checks.integer("TwoLevel: workers", self.workers, 1)
        if self.network is None:
            return
        if isinstance(self.network, TwoLevel) or not isinstance(getattr(self.network, "link", None), Link):
            raise ValueError(
                f"TwoLevel: network must be a Ring, Star, Tree or FatTree between the hosts, got {self.network!r}"
            )
        if self.network.ranks != self.hosts:
            raise ValueError(f"TwoLevel: network is one between {self.network.ranks} hosts, not between {self.hosts}")

    @property
    def ranks(self) -> int:
        """The number of workers on all hosts."""
        return self.hosts * self.workers

    @property
    def inside(self) -> Ring:
        """The network between the workers of a host."""
        return Ring(self.local, self.workers)

    @property
    def between(self) -> Topology:
        """The network between the hosts."""
        return self.network or Ring(self.link, self.hosts)

    @property
    def across(self) -> Topology:
        """The network between the workers in one place on all hosts, while those in other places use it, too."""
        network: Any = self.between
        beta, burst = network.link.beta * self.workers, network.link.burst / self.workers
        return dataclasses.replace(network, link=dataclasses.replace(network.link, beta=beta, burst=burst))

    def allreduce(self, nbytes: float) -> float:
        """An allreduce of m within hosts, and one of m between hosts, of which each worker sends a part."""
        return self.inside.allreduce(nbytes) + self.between.allreduce(nbytes)

    def allgather(self, nbytes: float) -> float:
        """Three allgathers, for h hosts of w workers with m bytes each.

        Each host gathers its workers' bytes. The hosts then exchange w m bytes each. Each host gives its workers the
        (h - 1) w m bytes that have arrived.
        """
        seconds = self.inside.allgather(nbytes)
        if self.hosts > 1:
            seconds += self.between.allgather(self.workers * nbytes) + self.inside.allgather((self.hosts - 1) * nbytes)
        return seconds

    def alltoall(self, nbytes: float) -> float:
        """The parts for the own host, then those for the others."""
        return self.inside.alltoall(nbytes / self.hosts) + self.between.alltoall(self.workers * nbytes)
