"""A measured link and measured kernels, as a file and as a model."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .kernels import KernelCost
from .link import Link
from .model import CostModel
from .topology import Ring, check_count

COLLECTIVES = ("allreduce", "allgather", "alltoall")
_FORMAT = "hvd_compress calibration 1"


@dataclasses.dataclass(frozen=True)
class Measured:
    """A network of which each collective was measured: a ring of another link for each.

    Libraries do not reach the same part of a link's rate with every collective.
    """

    links: Mapping[str, Link]
    ranks: int

    def allreduce(self, nbytes: float) -> float:
        """As `Ring.allreduce` over the link that allreduce was found to have."""
        return Ring(self.links["allreduce"], self.ranks).allreduce(nbytes)

    def allgather(self, nbytes: float) -> float:
        """As `Ring.allgather` over the link that allgather was found to have."""
        return Ring(self.links["allgather"], self.ranks).allgather(nbytes)

    def alltoall(self, nbytes: float) -> float:
        """As `Ring.alltoall` over the link that alltoall was found to have."""
        return Ring(self.links["alltoall"], self.ranks).alltoall(nbytes)


@dataclasses.dataclass(frozen=True)
class Calibration:
    """What `hvdc.calibrate` found; the same on all ranks.

    Attributes:
        ranks: Between how many it was measured.
        links: Each collective's alpha and beta, as a ring's.
        kernels: By the compressor's spec string; the slowest rank's.
        residuals: How far each collective's alpha and beta are from what was measured: the root mean square of
            the relative errors over all sizes.
    """

    ranks: int
    links: Mapping[str, Link]
    kernels: Mapping[str, KernelCost]
    residuals: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def model(self) -> CostModel:
        """The cost model of this network and these kernels."""
        link = self.links["allreduce"]
        return CostModel(link, self.ranks, Measured(self.links, self.ranks), self.kernels)

    def __str__(self) -> str:
        lines = [f"calibration of {self.ranks} ranks"]
        for name, link in self.links.items():
            rate = f"{8e-9 / link.beta:,.3g} Gbit/s" if link.beta else "no limit seen"
            lines.append(f"  {name}: {link.alpha * 1e6:,.0f} us per message, {rate}")
        for spec, cost in self.kernels.items():
            seconds = [cost.encoding(1e6), cost.decoding(1e6, self.ranks)]
            encode, decode = (f"{1e3 * value:.2f} ms" for value in seconds)
            lines.append(f"  {spec}: 1 MB of gradient encoded in {encode}, decoded in {decode}")
        return "\n".join(lines)

    def save(self, path: str | Path) -> None:
        """Writes it as JSON."""
        fields = {"format": _FORMAT, **dataclasses.asdict(self)}
        Path(path).write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Reads what `save` wrote.

        Raises:
            ValueError: The file cannot be read, or is not a calibration, or has impossible values.
        """

        def refuse(why: str) -> ValueError:
            return ValueError(
                f"{path} is not a calibration: {why}; make one with hvdc.calibrate().save(path)"
            )

        try:
            fields = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"the calibration {path} cannot be read: {error.strerror}") from None
        except ValueError:
            raise refuse("it holds no JSON") from None
        if not isinstance(fields, dict) or fields.get("format") != _FORMAT:
            raise refuse(f"it does not say format: {_FORMAT!r}")
        try:
            check_count("calibration", "ranks", fields["ranks"])
            links = {name: Link(**fields["links"][name]) for name in COLLECTIVES}
            kernels = {spec: _kernel_cost(spec, cost) for spec, cost in fields["kernels"].items()}
            residuals = {name: float(value) for name, value in fields.get("residuals", {}).items()}
        except KeyError as error:
            raise refuse(f"{error.args[0]} is missing") from None
        except (AttributeError, TypeError, ValueError) as error:
            raise refuse(str(error)) from None
        return cls(fields["ranks"], links, kernels, residuals)


def _kernel_cost(spec: str, fields: Mapping[str, Any]) -> KernelCost:
    cost = KernelCost(**fields)
    for name, value in dataclasses.asdict(cost).items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise ValueError(f"{spec}: {name} must be a finite number of seconds from 0 on, got {value!r}")
    return cost
