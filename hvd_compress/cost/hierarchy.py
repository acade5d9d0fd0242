"""The compressed exchange in two levels: float32 inside of hosts, payloads between them."""

from __future__ import annotations

from .topology import Ring, Topology, TwoLevel


def split(topology: Topology) -> TwoLevel:
    """The topology as one of two levels.

    Raises:
        ValueError: It has one.
    """
    if not isinstance(topology, TwoLevel):
        raise ValueError(
            f"CostModel.predict: the pattern 'two_level' needs a topology of hosts with several workers, such as "
            f"hvdc.cost.TwoLevel, not a {type(topology).__name__}"
        )
    return topology


def inside(topology: TwoLevel, nbytes: float) -> float:
    """Seconds inside of the hosts: reduce-scatter of m bytes of float32 before, allgather after the exchange.

    Each of w workers then has the sum of 1 / w of the gradient to exchange with the other hosts. Together these are
    one ring allreduce (Thakur, Rabenseifner and Gropp 2005, section 4.5).
    """
    return Ring(topology.local, topology.workers).allreduce(nbytes)
