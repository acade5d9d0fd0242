"""Weak scaling: each rank keeps its batch, and more of them take part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple


class Scaled(NamedTuple):
    """A step between so many ranks.

    Attributes:
        ranks: How many.
        step: Seconds.
        efficiency: The share of its speed alone that each rank keeps, from 0 to 1.
    """

    ranks: int
    step: float
    efficiency: float


def weak_scaling(step: Callable[[int], float], alone: float, ranks: Iterable[int]) -> list[Scaled]:
    """Step times and efficiencies against the number of ranks.

        link = hvdc.Link.of_rate(10e9, latency=50e-6)

        def step(n):
            network = hvdc.cost.FatTree(link, n, ranks_per_leaf=32, oversubscription=4)
            return 0.12 + hvdc.CostModel(link, n, network).predict("int8", nbytes=25e6).total

        hvdc.cost.weak_scaling(step, alone=0.12, ranks=[8, 64, 512, 4096])

    Args:
        step: Seconds that a step takes between so many ranks; called for those above 1.
        alone: Seconds that it takes on a single rank, which exchanges nothing.
        ranks: How many take part, each with the same work as alone.

    Raises:
        ValueError: `alone` is not above 0.
    """
    if not alone > 0:
        raise ValueError(f"weak_scaling: alone must be above 0 seconds, got {alone!r}")
    seconds = ((n, step(n) if n > 1 else alone) for n in ranks)
    return [Scaled(n, time, alone / time) for n, time in seconds]


def pays(plain: Sequence[Scaled], other: Sequence[Scaled]) -> list[int]:
    """The numbers of ranks at which another way takes less time than the plain one.

    Args:
        plain: Without compression.
        other: With it, for the same numbers of ranks.

    Raises:
        ValueError: They are of different numbers of ranks.
    """
    if [row.ranks for row in plain] != [row.ranks for row in other]:
        raise ValueError("pays: both must be of the same numbers of ranks")
    return [a.ranks for a, b in zip(plain, other) if b.step < a.step]
