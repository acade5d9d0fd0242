"""The predicted time of a bucket's exchange: encode, wire, decode."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Callable

from .. import formats
from ..exchange import choice
from ..exchange.collective import Collective
from ..exchange.hierarchical import HostCounts
from ..formats.base import Format
from .defaults import KERNELS
from .kernels import KernelCost
from .link import Link
from .topology import Ring, Star, Topology, Tree

if TYPE_CHECKING:
    from ..compressors import Compressor

SHAPES: dict[str, Callable[[Link, int], Topology]] = {"ring": Ring, "star": Star, "tree": Tree}
FORMS = ("full", "alpha_beta", "bandwidth", "k_bit")


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Seconds of one bucket's exchange.

    Attributes:
        compressor: The spec string.
        pattern: How the payload crosses.
        payload: Bytes that the whole bucket becomes.
        encode: Seconds.
        wire: Seconds; in two levels those between hosts.
        decode: Seconds.
        inside: Seconds between the workers of a host, in two levels.
        latency: Seconds of `wire` that do not grow with the bytes.
        burst: Seconds by which `wire` is shorter after a pause (see `Link.burst`): of the buckets that follow each
            other in a step, the first one's is.
    """

    compressor: str
    pattern: str
    payload: int
    encode: float
    wire: float
    decode: float
    inside: float = 0.0
    latency: float = 0.0
    burst: float = 0.0

    @property
    def total(self) -> float:
        """Seconds, without overlap."""
        return self.encode + self.wire + self.decode + self.inside


class CostModel:
    """Predicts how long the exchange of a bucket takes.

        model = hvdc.CostModel(link=hvdc.Link.of_rate(1e9, latency=1e-4), ranks=16)
        model.predict("int4", nbytes=25e6).total

    Volume alone does not tell: from the bytes sent, top-k at 10% on GRACE's published measurements would be
    43% faster than it was; encode and decode must be counted.

    Args:
        link: Between ranks; between hosts where the topology has two levels.
        ranks: How many there are.
        topology: "ring", "star" or "tree" (of `link` between all ranks), or an object such as `TwoLevel`, which
            brings its own links.
        kernels: What encoding costs, by the compressor's spec string, or by its name for all of its kind.
            Default: what one core of a server took (see `defaults`); calibrate for the machine at hand.

    Raises:
        ValueError: The topology is not known, or is one of another number of ranks.
    """

    def __init__(
        self,
        link: Link,
        ranks: int,
        topology: str | Topology = "ring",
        kernels: Mapping[str, KernelCost] | None = None,
    ) -> None:
        if not isinstance(topology, str):
            found = topology
        elif topology in SHAPES:
            found = SHAPES[topology](link, ranks)
        else:
            raise ValueError(
                f"CostModel: topology must be one of {', '.join(SHAPES)} or an object such as "
                f"hvdc.cost.TwoLevel, got {topology!r}"
            )
        if found.ranks != ranks:
            raise ValueError(f"CostModel: the topology is one of {found.ranks} ranks, not of {ranks}")
        self.link = link
        self.topology = found
        self._sustained = _changed(found, lambda link: dataclasses.replace(link, burst=0.0))
        self.kernels = dict(KERNELS if kernels is None else kernels)

    @property
    def ranks(self) -> int:
        """How many there are."""
        return self.topology.ranks

    def patterns(self, compressor: str | Format | Compressor) -> tuple[str, ...]:
        """The patterns in which this compressor's payloads may cross."""
        return tuple(dict.fromkeys(collective.name for collective in self._collectives(_parse(compressor))))

    def _collectives(self, compressor: Any) -> list[Collective]:
        """The collectives that can carry chunks of one shape, if there are as many as ranks."""
        hosts = _hosts(self.topology)
        shapes = [(1,)] * self.ranks
        return [c for c in choice.collectives(hosts) if c.fits(compressor, shapes, self.ranks)]

    def predict(
        self,
        compressor: str | Format | Compressor,
        nbytes: float,
        pattern: str | None = None,
        form: str = "full",
        payload: int | None = None,
    ) -> Prediction:
        """The time of one bucket's exchange.

        Args:
            compressor: A compressor, its format or its spec string.
            nbytes: Bytes of float32 gradient in the bucket.
            pattern: "allreduce", "allgather" or "scatter_reduce" between all ranks, or "two_level" (needs a topology of
                several hosts of several workers); default: the fastest that is possible. That of `powersgd` is
                "low_rank".
            form: "full"; "alpha_beta" leaves encoding and decoding out; "bandwidth" also the time per message,
                that of summing, and the burst; "k_bit" is that of a payload without headers and indices: each kept
                value has its bits and nothing else.
            payload: Bytes that the bucket becomes; default: what a flat one becomes, or for `powersgd` a square
                matrix.

        Returns:
            Seconds for each part. On a single rank there is nothing to exchange, and all are zero.

        Raises:
            ValueError: The size is negative, or pattern, form or compressor are not known or do not go together.
        """
        chosen = _parse(compressor)
        if not nbytes >= 0:
            raise ValueError(f"CostModel.predict: nbytes must be from 0 on, got {nbytes!r}")
        if form not in FORMS:
            raise ValueError(f"CostModel.predict: form must be one of {', '.join(FORMS)}, got {form!r}")
        possible = self.patterns(chosen)
        if pattern is not None and pattern not in possible:
            raise ValueError(
                f"CostModel.predict: {chosen.spec} between {self.ranks} ranks crosses as "
                f"{' or '.join(possible)}, not as {pattern!r}"
            )
        if payload is None:
            payload = chosen.wire_bytes(_shape(chosen, max(1, round(nbytes / 4)))) if nbytes else 0
        if form == "k_bit" and not chosen.model_wide:  # has neither headers nor indices
            payload = round(nbytes / 32 * bits_per_element(chosen))
        predictions = [
            self._predict(chosen, nbytes, payload, collective, form)
            for collective in self._collectives(chosen)
            if pattern in (None, collective.name)
        ]
        return min(predictions, key=lambda prediction: prediction.total)

    def _predict(
        self,
        compressor: Format | Compressor,
        nbytes: float,
        payload: int,
        collective: Collective,
        form: str,
    ) -> Prediction:
        if self.ranks == 1:
            return Prediction(compressor.spec, collective.name, payload, 0.0, 0.0, 0.0)
        topology: Any = self.topology
        sustained: Any = self._sustained
        if form in ("bandwidth", "k_bit"):
            topology = sustained = _changed(topology, lambda link: Link(0.0, link.beta))
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
        """What this compressor's kernels cost: those of its spec string, of its name, or of what it is a kind of.

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
    """The bits of values that a compressor sends per element of the gradient, with neither headers nor indices."""
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
    """A compressor as it is; of a spec string the format, for which no TensorFlow is needed."""
    return formats.parse(compressor) if isinstance(compressor, str) else compressor


def _shape(compressor: Any, elements: int) -> tuple[int, ...]:
    """As what a bucket of so many elements is taken where its shape is not known."""
    if not compressor.model_wide:
        return (elements,)
    side = max(1, round(elements**0.5))
    return (side, math.ceil(elements / side))


def _changed(topology: Any, change: Callable[[Link], Link]) -> Any:
    """The same network with other links."""

    def changed(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: changed(link) for name, link in value.items()}
        if isinstance(value, Link):
            return change(value)
        return _changed(value, change)

    if not dataclasses.is_dataclass(topology) or isinstance(topology, type):  # somebody's own
        return topology
    fields = {f.name: getattr(topology, f.name) for f in dataclasses.fields(topology) if f.init}
    return dataclasses.replace(topology, **{name: changed(value) for name, value in fields.items()})
