"""The cost model: predicts the time of a bucket's exchange."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Callable

from .. import formats
from ..exchange import choice, volume
from ..exchange.collective import Collective
from ..exchange.hierarchical import HostCounts
from ..formats.base import Format
from .defaults import CPU
from .kernels import KernelCost
from .link import Link, with_links
from .topology import Ring, Star, Topology, Tree

if TYPE_CHECKING:
    from ..compressors import Compressor

SHAPES: dict[str, Callable[[Link, int], Topology]] = {"ring": Ring, "star": Star, "tree": Tree}
FORMS = ("full", "alpha_beta", "bandwidth", "k_bit")


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Seconds of one bucket's exchange."""

    compressor: str  # the spec string
    pattern: str  # the name of the collective
    payload: int  # bytes to which the whole bucket is encoded
    encode: float
    wire: float  # transfers; with "two_level", those between hosts
    decode: float
    inside: float = 0.0  # transfers between the workers of a host, with "two_level"
    latency: float = 0.0  # the part of `wire` that does not grow with the bytes
    # By how much `wire` is shorter after a pause (see `Link.burst`). In a step this holds for the first bucket only.
    burst: float = 0.0

    @property
    def total(self) -> float:
        """Seconds in all, if nothing overlaps."""
        return self.encode + self.wire + self.decode + self.inside

    @property
    def sustained(self) -> Prediction:
        """The same exchange without a pause before."""
        return dataclasses.replace(self, wire=self.wire + self.burst, burst=0.0)


class CostModel:
    """Predicts how long the exchange of a bucket takes.

        model = hvdc.CostModel(link=hvdc.Link.of_rate(1e9, latency=1e-4), ranks=16)
        model.predict("int4", nbytes=25e6).total

    The bytes sent are not enough: by them, top-k at 10% would be 43% faster than in GRACE's published measurements.
    Encoding and decoding must be counted, too.

    Args:
        link: The link between ranks; between hosts if the topology has two levels.
        ranks: The number of ranks.
        topology: "ring", "star" or "tree" (of `link` between all ranks), or an object such as `TwoLevel`, which has
            links of its own.
        kernels: The cost of the kernels, by the compressor's spec string, or by its name for all of its kind.
            Default: measured on one core of a server (see `defaults`); calibrate for your machine.

    Attributes:
        sustained: The topology without the bursts of its links, which they grant only once in a step.

    Raises:
        ValueError: The topology is unknown, or has another number of ranks.
    """

    def __init__(
        self,
        link: Link,
        ranks: int,
        topology: str | Topology = "ring",
        kernels: Mapping[str, KernelCost] | None = None,
    ) -> None:
        if isinstance(topology, str):
            if topology not in SHAPES:
                raise ValueError(
                    f"CostModel: topology must be one of {', '.join(SHAPES)} or an object such as "
                    f"hvdc.cost.TwoLevel, got {topology!r}"
                )
            topology = SHAPES[topology](link, ranks)
        if topology.ranks != ranks:
            raise ValueError(f"CostModel: the topology is one of {topology.ranks} ranks, not of {ranks}")
        self.link = link
        self.topology = topology
        self.sustained = with_links(topology, lambda link: dataclasses.replace(link, burst=0.0))
        self.kernels = dict(CPU.kernels if kernels is None else kernels)

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.topology.ranks

    def patterns(self, compressor: str | Format | Compressor) -> tuple[str, ...]:
        """The names of the collectives that can carry this compressor's payloads."""
        return tuple(dict.fromkeys(collective.name for collective in self._collectives(_parse(compressor))))

    def _collectives(self, compressor: Any) -> list[Collective]:
        """The collectives that can carry chunks of one shape, if there are as many as ranks."""
        shapes = volume.Alike((1,), self.ranks)
        return [c for c in choice.collectives(_hosts(self.topology)) if c.fits(compressor, shapes, self.ranks)]

    def predict(
        self,
        compressor: str | Format | Compressor,
        nbytes: float,
        pattern: str | None = None,
        form: str = "full",
        payload: int | None = None,
    ) -> Prediction:
        """Predicts the time of one bucket's exchange.

        Args:
            compressor: A compressor, its format or its spec string.
            nbytes: Bytes of float32 gradient in the bucket.
            pattern: The name of a collective: "allreduce", "allgather", "scatter_reduce", "low_rank" (for `powersgd`),
                or "two_level" (needs a topology of several hosts of several workers). Default: the fastest possible.
            form: "full"; "alpha_beta" leaves out encoding and decoding; "bandwidth" also leaves out the time per
                message, that of summing, and the burst; "k_bit" is "bandwidth" for a payload without headers and
                indices, which holds only the bits of the values sent.
            payload: Bytes to which the bucket is encoded. Default: those of one flat chunk, or for `powersgd` of a
                square matrix.

        Returns:
            The seconds of each part. With a single rank nothing is exchanged, and all are zero.

        Raises:
            ValueError: The size is negative, or pattern, form or compressor are unknown or contradict each other.
        """
        chosen = _parse(compressor)
        if not nbytes >= 0:
            raise ValueError(f"CostModel.predict: nbytes must be from 0 on, got {nbytes!r}")
        if form not in FORMS:
            raise ValueError(f"CostModel.predict: form must be one of {', '.join(FORMS)}, got {form!r}")
        possible = [c for c in self._collectives(chosen) if pattern in (None, c.name)]
        if not possible:
            raise ValueError(
                f"CostModel.predict: {chosen.spec} between {self.ranks} ranks crosses as "
                f"{' or '.join(self.patterns(chosen))}, not as {pattern!r}"
            )
        if payload is None:
            payload = chosen.wire_bytes(_shape(chosen, max(1, round(nbytes / 4)))) if nbytes else 0
        if form == "k_bit" and not chosen.model_wide:  # has neither headers nor indices
            payload = round(nbytes / 32 * bits_per_element(chosen))
        predictions = [self._predict(chosen, nbytes, payload, collective, form) for collective in possible]
        return min(predictions, key=lambda prediction: prediction.total)

    def _predict(
        self, compressor: Format | Compressor, nbytes: float, payload: int, collective: Collective, form: str
    ) -> Prediction:
        if self.ranks == 1:
            return Prediction(compressor.spec, collective.name, payload, 0.0, 0.0, 0.0)
        topology: Any = self.topology
        sustained: Any = self.sustained
        if form in ("bandwidth", "k_bit"):
            topology = sustained = with_links(topology, lambda link: Link(0.0, link.beta))
        phases = collective.phases(nbytes, payload, self.ranks)
        inside = 0.0
        if phases.inside:
            inside = _seconds(topology.inside, phases.inside)
            topology, sustained = topology.across, sustained.across
        kernels = self.cost_of(compressor) if form == "full" else KernelCost()
        name, contributed = phases.transfers[0]
        burst = getattr(sustained, name)(contributed) - getattr(topology, name)(contributed)
        return Prediction(
            compressor.spec,
            collective.name,
            payload,
            encode=sum(kernels.encoding(size) for size in phases.encoded),
            wire=_seconds(sustained, phases.transfers) - burst,
            decode=sum(kernels.decoding(size, payloads) for size, payloads in phases.decoded),
            inside=inside,
            latency=_seconds(sustained, [(name, 0.0) for name, _ in phases.transfers]),
            burst=burst,
        )

    def cost_of(self, compressor: str | Format | Compressor) -> KernelCost:
        """The cost of this compressor's kernels: by its spec string, its name, or the name of a base class.

        Raises:
            ValueError: `kernels` has neither its spec string nor its name.
        """
        chosen = _parse(compressor)
        for key in (chosen.spec, *(getattr(cls, "name", "") for cls in type(chosen).__mro__)):
            if key in self.kernels:
                return self.kernels[key]
        raise ValueError(
            f"CostModel: no kernel cost is known for {chosen.spec}: add it to kernels, or calibrate with it"
        )


def bits_per_element(compressor: str | Format | Compressor) -> float:
    """Bits that a compressor sends per element of the gradient, without headers and indices."""
    chosen: Any = _parse(compressor)
    return float(chosen.value_bits * getattr(chosen, "ratio", 1.0))


def _hosts(topology: Any) -> HostCounts | None:
    """The hosts of a topology of several hosts of several workers, else None."""
    inside, across = getattr(topology, "inside", None), getattr(topology, "across", None)
    if inside is None or across is None or inside.ranks == 1 or across.ranks == 1:
        return None
    return HostCounts(across.ranks, inside.ranks)


def _seconds(topology: Any, transfers: Sequence[tuple[str, float]]) -> float:
    """Seconds of primitive collectives, one after the other."""
    return sum((getattr(topology, name)(nbytes) for name, nbytes in transfers), 0.0)


def _parse(compressor: str | Format | Compressor) -> Any:
    """The format of a spec string, which needs no TensorFlow; a compressor as it is."""
    return formats.parse(compressor) if isinstance(compressor, str) else compressor


def _shape(compressor: Any, elements: int) -> tuple[int, ...]:
    """The assumed shape of a bucket of so many elements."""
    if not compressor.model_wide:
        return (elements,)
    side = max(1, round(elements**0.5))
    return (side, math.ceil(elements / side))
