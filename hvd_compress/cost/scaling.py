"""Weak scaling: the batch of each rank stays the same while the number of ranks grows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple


class Scaled(NamedTuple):
    """A training step with a number of ranks.

    Attributes:
        ranks: The number of ranks.
        step: Seconds of the step.
        efficiency: The speed of each rank divided by its speed alone, from 0 to 1.
    """

    ranks: int
    step: float
    efficiency: float


def weak_scaling(step: Callable[[int], float], alone: float, ranks: Iterable[int]) -> list[Scaled]:
    """Computes step times and efficiencies for several numbers of ranks.

        link = hvdc.Link.of_rate(10e9, latency=50e-6)

        def step(n):
            network = hvdc.cost.FatTree(link, n, ranks_per_leaf=32, oversubscription=4)
            return 0.12 + hvdc.CostModel(link, n, network).predict("int8", nbytes=25e6).total

        hvdc.cost.weak_scaling(step, alone=0.12, ranks=[8, 64, 512, 4096])

    Args:
        step: Returns the seconds of a step with so many ranks; called for numbers above 1.
        alone: Seconds of a step with a single rank, which exchanges nothing.
        ranks: The numbers of ranks; each rank has the same work as alone.

    Raises:
        ValueError: `alone` is not above 0.
    """
    if not alone > 0:
        raise ValueError(f"weak_scaling: alone must be above 0 seconds, got {alone!r}")
    seconds = ((n, step(n) if n > 1 else alone) for n in ranks)
    return [Scaled(n, time, alone / time) for n, time in seconds]


def pays(plain: Sequence[Scaled], other: Sequence[Scaled]) -> list[int]:
    """The numbers of ranks for which a step with compression is faster.

    Args:
        plain: Steps without compression.
        other: Steps with compression, for the same numbers of ranks.

    Raises:
        ValueError: The numbers of ranks differ.
    """
    if [row.ranks for row in plain] != [row.ranks for row in other]:
        raise ValueError("pays: both must be of the same numbers of ranks")
    return [a.ranks for a, b in zip(plain, other) if b.step < a.step]
