"""The networks that `plan` looks at: of any number of ranks and any rate."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ..cost import Calibration, KernelCost, Link, Topology, TwoLevel
from ..cost.calibration import Measured
from ..cost.defaults import KERNELS
from ..cost.model import SHAPES


@dataclasses.dataclass(frozen=True)
class Network:
    """What is known of a network and of the machines on it.

    Attributes:
        rate: Of a link, bits per second.
        latency: Seconds per message.
        shape: "ring", "star", "tree" or "two-level".
        workers: On each host, if it has two levels.
        local: The link inside of a host, if it has two levels.
        measured: Each collective's link, where it was calibrated; they then stand for `rate`.
        kernels: What encoding costs, by spec string or name.
    """

    rate: float
    latency: float = 0.0
    shape: str = "ring"
    workers: int = 1
    local: Link | None = None
    measured: Mapping[str, Link] | None = None
    kernels: Mapping[str, KernelCost] = dataclasses.field(default_factory=lambda: dict(KERNELS))

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
            return TwoLevel(self.link(rate), self.local, ranks // self.workers, self.workers)
        return SHAPES[self.shape](self.link(rate), ranks)


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
