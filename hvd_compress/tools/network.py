"""The networks that `plan` looks at: of any number of ranks and any rate."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ..cost import Calibration, FatTree, KernelCost, Link, Topology, TwoLevel
from ..cost.calibration import Measured
from ..cost.defaults import CPU
from ..cost.model import SHAPES

_FREE = Link(0.0, 0.0)


@dataclasses.dataclass(frozen=True)
class Network:
    """A network and the machines on it."""

    rate: float  # bits per second of a link
    latency: float = 0.0  # seconds per message
    shape: str = "ring"  # or "star", "tree", "fat-tree", "two-level"
    measured: Mapping[str, Link] | None = None  # the calibrated link of each collective; their rates belong to `rate`
    kernels: Mapping[str, KernelCost] = dataclasses.field(default_factory=lambda: CPU.kernels)  # by spec string or name
    # With two levels:
    workers: int = 1  # of each host
    local: Link = _FREE  # inside of a host
    between: str = "ring"  # the shape of the network between hosts
    hierarchical: bool = False  # whether float32 is summed inside of hosts, and compressed between them
    # With a fat tree:
    ranks_per_leaf: int = 1  # ranks at a leaf switch, or hosts if it is the network between these
    oversubscription: float = 1.0  # of its leaves

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
            links = self.measured.items()
            scaled = {name: dataclasses.replace(link, beta=link.beta * self.rate / rate) for name, link in links}
            return Measured(scaled, ranks)
        if self.shape == "two-level":
            if ranks % self.workers:
                raise ValueError(f"{ranks} ranks do not fill hosts of {self.workers} workers")
            hosts = ranks // self.workers
            return TwoLevel(self.link(rate), self.local, hosts, self.workers, self._flat(self.between, hosts, rate))
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
    kernels = {**CPU.kernels, **calibration.kernels}
    if network is not None:
        return dataclasses.replace(network, kernels=kernels)
    link = calibration.links["allreduce"]
    if not link.beta:
        raise ValueError("the calibration saw no limit of the link's rate: give --bandwidth")
    return Network(8.0 / link.beta, link.alpha, measured=calibration.links, kernels=kernels)
