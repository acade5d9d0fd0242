"""The networks that `plan` looks at: of any number of ranks and any rate."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ..cost import Calibration, FatTree, KernelCost, Link, Topology, TwoLevel
from ..cost.calibration import Measured
from ..cost.defaults import KERNELS
from ..cost.model import SHAPES


@dataclasses.dataclass(frozen=True)
class Network:
    """A network and the machines on it.

    Attributes:
        rate: Bits per second of a link.
        latency: Seconds per message.
        shape: "ring", "star", "tree", "fat-tree" or "two-level".
        workers: With two levels: the workers of each host.
        local: With two levels: the link inside of a host.
        between: With two levels: the shape of the network between hosts.
        hierarchical: With two levels: whether float32 is summed inside of hosts, and compressed between them.
        ranks_per_leaf: With a fat tree: the ranks at a leaf switch, or the hosts if it is the network between these.
        oversubscription: With a fat tree: that of its leaves.
        measured: The calibrated link of each collective, if there is a calibration. Their rates belong to `rate`.
        kernels: What encoding costs, by spec string or name.
    """

    rate: float
    latency: float = 0.0
    shape: str = "ring"
    workers: int = 1
    local: Link | None = None
    between: str = "ring"
    hierarchical: bool = False
    ranks_per_leaf: int = 1
    oversubscription: float = 1.0
    measured: Mapping[str, Link] | None = None
    kernels: Mapping[str, KernelCost] = dataclasses.field(default_factory=lambda: dict(KERNELS))

    def compressed_by(self, ranks: int) -> int:
        """Among how many workers of a host each bucket is divided before it is compressed; 1 if it is not."""
        return self.workers if self.hierarchical and ranks > self.workers else 1

    def link(self, rate: float) -> Link:
        """A link of this rate."""
        return Link.of_rate(rate, self.latency)

    def topology(self, ranks: int, rate: float | None = None) -> Topology:
        """The network between so many ranks, and at another rate if one is given.

        Raises:
            ValueError: The workers of a host do not divide the ranks.
        """
        rate = self.rate if rate is None else rate
        if self.measured is not None:
            # Each collective goes on to reach its own part of the rate.
            scaled = {
                name: dataclasses.replace(link, beta=link.beta * self.rate / rate)
                for name, link in self.measured.items()
            }
            return Measured(scaled, ranks)
        if self.shape == "two-level":
            assert self.local is not None
            if ranks % self.workers:
                raise ValueError(f"{ranks} ranks do not fill hosts of {self.workers} workers")
            hosts = ranks // self.workers
            link, between = self.link(rate), self._flat(self.between, hosts, rate)
            return TwoLevel(link, self.local, hosts, self.workers, between)
        return self._flat(self.shape, ranks, rate)

    def _flat(self, shape: str, ranks: int, rate: float) -> Topology:
        if shape == "fat-tree":
            return FatTree(self.link(rate), ranks, self.ranks_per_leaf, self.oversubscription)
        return SHAPES[shape](self.link(rate), ranks)


def calibrated(calibration: Calibration, network: Network | None) -> Network:
    """A network with this machine's kernels: the one that was measured, unless another one is given.

    Raises:
        ValueError: The measured link has no limit.
    """
    kernels = {**KERNELS, **calibration.kernels}
    if network is not None:
        return dataclasses.replace(network, kernels=kernels)
    link = calibration.links["allreduce"]
    if not link.beta:
        raise ValueError("the calibration saw no limit of the link's rate: give --bandwidth")
    return Network(8.0 / link.beta, link.alpha, measured=calibration.links, kernels=kernels)
