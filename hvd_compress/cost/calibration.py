"""Measured links and kernels, which are saved to files and make a cost model."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..common import checks
from ..common.error_text import error_text, one_line
from .kernels import KernelCost
from .link import Link
from .model import CostModel
from .topology import Ring

if TYPE_CHECKING:
    from ..compressors import Compressor

COLLECTIVES = ("allreduce", "allgather", "alltoall")
# Of a hierarchical exchange: within hosts, and between hosts.
INSIDE, ACROSS = ("reduce_scatter", "allgather"), ("allgather", "alltoall")
_FORMAT = "hvd_compress calibration 1"


@dataclasses.dataclass(frozen=True)
class Measured:
    """A measured network: for each collective a ring with a link of its own.

    Libraries do not reach the same part of a link's rate with every collective.
    """

    links: Mapping[str, Link]  # by collective
    ranks: int
    inside: Measured | None = None  # between the workers of a host, if there are several hosts of several workers
    across: Measured | None = None  # between the workers in one place on all hosts, all places at once

    def reduce_scatter(self, nbytes: float) -> float:
        """As `Ring.reduce_scatter`, with its own link."""
        return Ring(self.links["reduce_scatter"], self.ranks).reduce_scatter(nbytes)

    def allreduce(self, nbytes: float) -> float:
        """As `Ring.allreduce`, with its own link."""
        return Ring(self.links["allreduce"], self.ranks).allreduce(nbytes)

    def allgather(self, nbytes: float) -> float:
        """As `Ring.allgather`, with its own link."""
        return Ring(self.links["allgather"], self.ranks).allgather(nbytes)

    def alltoall(self, nbytes: float) -> float:
        """As `Ring.alltoall`, with its own link."""
        return Ring(self.links["alltoall"], self.ranks).alltoall(nbytes)


@dataclasses.dataclass(frozen=True)
class Levels:
    """The links within and between hosts, measured with the collectives of a hierarchical exchange."""

    hosts: int
    workers: int  # on each host
    inside: Mapping[str, Link]  # between the workers of a host, all hosts at once; beta includes summing
    across: Mapping[str, Link]  # between the workers in one place on all hosts, all places at once


@dataclasses.dataclass(frozen=True)
class Calibration:
    """The result of `hvdc.calibrate`, the same on all ranks.

    Attributes:
        ranks: The number of ranks that took part.
        links: The link of each collective, as in a ring.
        kernels: The cost of each compressor's kernels on the slowest rank, by its spec string.
        residuals: The root mean square, over all sizes, of the relative errors of each collective's link.
        levels: The links within and between hosts; None unless there are several hosts of several workers (see
            `hvdc.init`).
    """

    ranks: int
    links: Mapping[str, Link]
    kernels: Mapping[str, KernelCost]
    residuals: Mapping[str, float] = dataclasses.field(default_factory=dict)
    levels: Levels | None = None

    def model(self) -> CostModel:
        """The cost model of this network and these kernels."""
        topology = Measured(self.links, self.ranks)
        if self.levels is not None:
            inside = Measured(self.levels.inside, self.levels.workers)
            across = Measured(self.levels.across, self.levels.hosts)
            topology = dataclasses.replace(topology, inside=inside, across=across)
        return CostModel(self.links["allreduce"], self.ranks, topology, self.kernels)

    def unmeasured(self, compressors: Sequence[str | Compressor]) -> list[str]:
        """The spec strings of those compressors whose kernels were not measured."""
        model, missing = self.model(), list[str]()
        for compressor in compressors:
            try:
                model.cost_of(compressor)
            except ValueError:
                missing.append(str(compressor))
        return missing

    def __str__(self) -> str:
        lines = [f"calibration of {self.ranks} ranks"]
        links = dict(self.links)
        if self.levels is not None:
            lines[0] += f", {self.levels.hosts} hosts of {self.levels.workers} workers"
            links |= {f"{name} inside a host": link for name, link in self.levels.inside.items()}
            links |= {f"{name} across hosts": link for name, link in self.levels.across.items()}
        for name, link in links.items():
            rate = f"{8e-9 / link.beta:,.3g} Gbit/s" if link.beta else "no limit seen"
            burst = f" after {link.burst / 1e3:,.0f} kB at once" if link.burst else ""
            lines.append(f"  {name}: {link.alpha * 1e6:,.0f} us per message, {rate}{burst}")
        for spec, cost in self.kernels.items():
            encode, decode = 1e3 * cost.encoding(1e6), 1e3 * cost.decoding(1e6, self.ranks)
            lines.append(f"  {spec}: 1 MB of gradient encoded in {encode:.2f} ms, decoded in {decode:.2f} ms")
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
                f"{path} is not a calibration: {one_line(why)}; make one with hvdc.calibrate().save(path)"
            )

        try:
            fields = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"the calibration {path} cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError):
            raise refuse("it holds no JSON") from None
        if not isinstance(fields, dict) or fields.get("format") != _FORMAT:
            raise refuse(f"it does not say format: {_FORMAT!r}")
        try:
            checks.integer("calibration: ranks", fields["ranks"], 1)
            links = {name: Link(**fields["links"][name]) for name in COLLECTIVES}
            kernels = {spec: _kernel_cost(spec, cost) for spec, cost in fields["kernels"].items()}
            residuals = {name: float(value) for name, value in fields.get("residuals", {}).items()}
            levels = None if fields.get("levels") is None else _levels(fields["levels"], fields["ranks"])
        except KeyError as error:
            raise refuse(f"{error.args[0]} is missing") from None
        except (AttributeError, OverflowError, TypeError, ValueError) as error:
            raise refuse(str(error)) from None
        return cls(fields["ranks"], links, kernels, residuals, levels)


def _levels(fields: Mapping[str, Any], ranks: int) -> Levels:
    for name in ("hosts", "workers"):
        checks.integer(f"levels: {name}", fields[name], 1)
    if fields["hosts"] * fields["workers"] != ranks:
        raise ValueError(f"{fields['hosts']} hosts of {fields['workers']} workers are not {ranks} ranks")
    inside = {name: Link(**fields["inside"][name]) for name in INSIDE}
    across = {name: Link(**fields["across"][name]) for name in ACROSS}
    return Levels(fields["hosts"], fields["workers"], inside, across)


def _kernel_cost(spec: str, fields: Mapping[str, Any]) -> KernelCost:
    cost = KernelCost(**fields)
    for name, value in dataclasses.asdict(cost).items():
        if not checks.is_number(value) or not 0 <= value < math.inf:
            raise ValueError(f"{spec}: {name} must be a finite number of seconds from 0 on, got {error_text(value)}")
    return cost
