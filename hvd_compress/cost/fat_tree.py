"""A fat tree: leaf switches under an oversubscribed core."""

from __future__ import annotations

import dataclasses
import math

from ..common import checks
from .topology import Ring


@dataclasses.dataclass(frozen=True)
class FatTree(Ring):
    """Leaf switches under a core that carries less than all of them together.

    The links of a fat tree get wider towards the root (Leiserson 1985, section II). In a tree of switches, all ranks of
    a leaf together can send 1 / `oversubscription` of their rate through the core (Al-Fares, Loukissas and Vahdat 2008,
    section 2.1.2: the ratio of the worst achievable bandwidth between hosts to the bisection bandwidth). The model
    assumes that flows share these links evenly, as with multipath routing without collisions, and that all levels above
    the leaves are one.

    Ranks are placed in order: 0 to k - 1 at the first leaf, and so on, where k is `ranks_per_leaf`. Collectives are
    those of `Ring`. In a ring a single flow leaves each leaf, so the core hardly slows down allreduce and allgather:
    beta grows by max(1, o / k), where o is `oversubscription`. In round s of the pairwise alltoall, min(s, n - s, k) of
    a leaf's k ranks send to other leaves.

    Attributes:
        link: The link of a rank to its leaf.
        ranks: The number of ranks.
        ranks_per_leaf: Ranks at each leaf switch; the last leaf may have fewer, but has as many links to the core.
        oversubscription: The rate at which all ranks of a leaf can send, divided by the rate of the leaf's links to the
            core, at least 1; 1 is a non-blocking network.

    Raises:
        ValueError: A number of ranks is not a whole number from 1 on, or the oversubscription is below 1.
    """

    ranks_per_leaf: int
    oversubscription: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.integer("FatTree: ranks_per_leaf", self.ranks_per_leaf, 1)
        value = self.oversubscription
        if not checks.is_number(value) or not 1.0 <= value < math.inf:
            raise ValueError(f"FatTree: oversubscription must be a number from 1 on, got {value!r}")

    @property
    def leaves(self) -> int:
        """The number of leaf switches."""
        return math.ceil(self.ranks / self.ranks_per_leaf)

    def slowdown(self, flows: float) -> float:
        """The factor by which a message takes longer if so many flows leave each leaf at once."""
        return max(1.0, flows * self.oversubscription / self.ranks_per_leaf)

    def carry(self, nbytes: float) -> float:
        """Seconds that so many bytes over the link take, with beta max(1, o / k) if there are several leaves."""
        return self.link.carry(nbytes) * (self.slowdown(1) if self.leaves > 1 else 1.0)

    def alltoall(self, nbytes: float) -> float:
        """(n - 1) alpha + m / n beta sum over rounds s of max(1, min(s, n - s, k) o / k).

        The formula assumes that all ranks wait for each other between rounds.
        """
        n, k = self.ranks, self.ranks_per_leaf
        if self.leaves == 1:
            rounds = float(n - 1)
        else:
            most = min(k, n - k)  # flows that leave a full leaf at once, the same in n - 2 most + 1 rounds
            rising = sum(self.slowdown(flows) for flows in range(1, most))
            rounds = 2 * rising + (n - 2 * most + 1) * self.slowdown(most)
        return (n - 1) * self.link.alpha + self.link.carry(nbytes / n * rounds)
