"""How long a collective takes on some shapes of network.

In all of them `nbytes` is what one rank brings: allreduce sums vectors of `nbytes`, allgather hands each rank's
`nbytes` to all others, alltoall divides each rank's `nbytes` evenly among all (its own part stays). A link's
burst is taken off the bytes that a collective sends in all.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from typing import Any, Protocol

from .link import Link


class Topology(Protocol):
    """A network between `ranks` ranks."""

    @property
    def ranks(self) -> int:
        """How many take part."""

    def allreduce(self, nbytes: float) -> float:
        """Seconds to sum vectors of `nbytes`."""

    def allgather(self, nbytes: float) -> float:
        """Seconds until each has the `nbytes` of each."""

    def alltoall(self, nbytes: float) -> float:
        """Seconds until each has its part of each one's `nbytes`."""


@dataclasses.dataclass(frozen=True)
class Ring:
    """Each rank sends to the next one; all links carry at once.

    Allreduce as reduce-scatter and allgather, 2 (n - 1) steps of m / n bytes; allgather in n - 1 steps (Thakur,
    Rabenseifner and Gropp 2005, sections 4.1 and 4.5). Alltoall pairwise: in n - 1 steps each rank sends to
    another one (section 4.3).
    """

    link: Link
    ranks: int

    def __post_init__(self) -> None:
        check_count("Ring", "ranks", self.ranks)

    def allreduce(self, nbytes: float) -> float:
        """2 (n - 1) alpha + 2 (n - 1) / n m beta + (n - 1) / n m gamma."""
        n, link = self.ranks, self.link
        part = (n - 1) / n * nbytes
        return 2 * (n - 1) * link.alpha + link.carry(2 * part) + part * link.gamma

    def reduce_scatter(self, nbytes: float) -> float:
        """(n - 1) (alpha + m / n (beta + gamma))."""
        n, link = self.ranks, self.link
        part = (n - 1) / n * nbytes
        return (n - 1) * link.alpha + link.carry(part) + part * link.gamma

    def allgather(self, nbytes: float) -> float:
        """(n - 1) (alpha + m beta)."""
        return (self.ranks - 1) * self.link.alpha + self.link.carry((self.ranks - 1) * nbytes)

    def alltoall(self, nbytes: float) -> float:
        """(n - 1) (alpha + m / n beta)."""
        n, link = self.ranks, self.link
        return (n - 1) * link.alpha + link.carry((n - 1) / n * nbytes)


@dataclasses.dataclass(frozen=True)
class Tree:
    """Partners at distance 1, 2, 4, ...: ceil(log2 n) steps (Thakur, Rabenseifner and Gropp 2005).

    Allreduce by recursive doubling sends the whole vector in each step (section 4.5); allgather doubles what
    each holds (section 4.1); alltoall is Bruck's, half of the vector in each step (section 4.3).
    """

    link: Link
    ranks: int

    def __post_init__(self) -> None:
        check_count("Tree", "ranks", self.ranks)

    @property
    def steps(self) -> int:
        """ceil(log2 n)."""
        return math.ceil(math.log2(self.ranks))

    def allreduce(self, nbytes: float) -> float:
        """log2 n (alpha + m beta + m gamma)."""
        sent, link = self.steps * nbytes, self.link
        return self.steps * link.alpha + link.carry(sent) + sent * link.gamma

    def allgather(self, nbytes: float) -> float:
        """log2 n alpha + (n - 1) m beta."""
        return self.steps * self.link.alpha + self.link.carry((self.ranks - 1) * nbytes)

    def alltoall(self, nbytes: float) -> float:
        """log2 n (alpha + m / 2 beta)."""
        return self.steps * self.link.alpha + self.link.carry(self.steps * nbytes / 2)


@dataclasses.dataclass(frozen=True)
class Star:
    """A parameter server: all ranks send to one machine, whose link they share, and it answers all."""

    link: Link
    ranks: int

    def __post_init__(self) -> None:
        check_count("Star", "ranks", self.ranks)

    def allreduce(self, nbytes: float) -> float:
        """2 alpha + 2 n m beta + n m gamma: all vectors in, as many sums out."""
        if self.ranks == 1:
            return 0.0
        link, total = self.link, self.ranks * nbytes
        return 2 * link.alpha + link.carry(2 * total) + total * link.gamma

    def allgather(self, nbytes: float) -> float:
        """2 alpha + n m beta + n (n - 1) m beta: each gets what the others sent."""
        if self.ranks == 1:
            return 0.0
        return 2 * self.link.alpha + self.link.carry(self.ranks**2 * nbytes)

    def alltoall(self, nbytes: float) -> float:
        """2 alpha + 2 (n - 1) m beta: all but what each keeps, in and out."""
        if self.ranks == 1:
            return 0.0
        return 2 * self.link.alpha + self.link.carry(2 * (self.ranks - 1) * nbytes)


@dataclasses.dataclass(frozen=True)
class TwoLevel:
    """Hosts of several workers: rings inside of each host, rings between hosts.

    Allreduce reduces and scatters inside of the hosts, then sums part by part between them, all workers of a host
    sharing its link, then gathers inside (as NCCL's and Horovod's hierarchical allreduce; Jia et al. 2018,
    section 3.3). Allgather collects inside, exchanges between the hosts, and hands on inside. Alltoall moves
    what stays in the host over the local link and the rest over the other, one after the other.

    Attributes:
        link: Between hosts, one per host.
        local: Between the workers of one host, one per worker.
        hosts: How many.
        workers: On each host.
        network: Between hosts, where it is no `Ring` of `link`: an object such as `FatTree` or `Tree`, of as many
            ranks as there are hosts.

    Raises:
        ValueError: A number is not a whole one from 1 on, or `network` is one of another number of hosts or of
            another kind.
    """

    link: Link
    local: Link
    hosts: int
    workers: int
    network: Any = None

    def __post_init__(self) -> None:
        check_count("TwoLevel", "hosts", self.hosts)
        check_count("TwoLevel", "workers", self.workers)
        if self.network is None:
            return
        if isinstance(self.network, TwoLevel) or not isinstance(getattr(self.network, "link", None), Link):
            raise ValueError(
                f"TwoLevel: network must be a Ring, Star, Tree or FatTree between the hosts, got {self.network!r}"
            )
        if self.network.ranks != self.hosts:
            raise ValueError(
                f"TwoLevel: network is one between {self.network.ranks} hosts, not between {self.hosts}"
            )

    @property
    def ranks(self) -> int:
        """Workers on all hosts."""
        return self.hosts * self.workers

    @property
    def inside(self) -> Ring:
        """Between the workers of a host."""
        return Ring(self.local, self.workers)

    @property
    def between(self) -> Topology:
        """Between the hosts."""
        found: Topology = Ring(self.link, self.hosts) if self.network is None else self.network
        return found

    @property
    def across(self) -> Topology:
        """Between the workers of one place on all hosts, while those of the other places do the same."""
        network: Any = self.between
        beta, burst = network.link.beta * self.workers, network.link.burst / self.workers
        link = dataclasses.replace(network.link, beta=beta, burst=burst)
        found: Topology = dataclasses.replace(network, link=link)
        return found

    def allreduce(self, nbytes: float) -> float:
        """Local ring allreduce of m, and between hosts one of m, which its workers carry in parts."""
        return Ring(self.local, self.workers).allreduce(nbytes) + self.between.allreduce(nbytes)

    def allgather(self, nbytes: float) -> float:
        """Local allgather of m, between hosts of w m, then the others' (h - 1) w m inside."""
        per_host = self.workers * nbytes
        inside = Ring(self.local, self.workers)
        seconds = inside.allgather(nbytes)
        if self.hosts > 1:
            elsewhere = (self.hosts - 1) * per_host / self.workers
            seconds += self.between.allgather(per_host) + inside.allgather(elsewhere)
        return seconds

    def alltoall(self, nbytes: float) -> float:
        """Parts for the own host, then those for the others."""
        inside = Ring(self.local, self.workers).alltoall(nbytes / self.hosts)
        return inside + self.between.alltoall(self.workers * nbytes)


def check_count(who: str, name: str, value: int) -> None:
    """Refuses what is not a whole number from 1 on.

    Raises:
        ValueError: It is not.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
        raise ValueError(f"{who}: {name} must be a whole number from 1 on, got {value!r}")
