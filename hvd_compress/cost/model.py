"""The predicted time of a bucket's exchange: encode, wire, decode."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Callable

from .. import formats
from ..formats.base import Format, is_summed
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
        chosen = _parse(compressor)
        if chosen.model_wide:
            return ("low_rank",)
        if is_summed(chosen, [(1,)]):
            return ("allreduce",)
        flat = ("allgather", "scatter_reduce") if self.ranks > 2 else ("allgather",)
        levels = _levels(self.topology)
        return (*flat, "two_level") if levels and not chosen.per_tensor else flat

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
        some = [pattern] if pattern else possible
        found = [self._predict(chosen, nbytes, payload, each, form) for each in some]
        return min(found, key=lambda prediction: prediction.total)

    def _predict(
        self, compressor: Format | Compressor, nbytes: float, payload: int, pattern: str, form: str
    ) -> Prediction:
        if self.ranks == 1:
            return Prediction(compressor.spec, pattern, payload, 0.0, 0.0, 0.0)
        topology, sustained = self.topology, self._sustained
        if form in ("bandwidth", "k_bit"):
            topology = sustained = _changed(topology, lambda link: Link(0.0, link.beta))
        if pattern == "two_level":
            return self._predict_two_levels(compressor, nbytes, payload, topology, sustained, form)
        encode, decode = self._kernels(compressor, nbytes, pattern) if form == "full" else (0.0, 0.0)
        wire = _wire(topology, sustained, pattern, payload)
        return Prediction(compressor.spec, pattern, payload, encode, *wire[:1], decode, 0.0, *wire[1:])

    def _predict_two_levels(
        self,
        compressor: Format | Compressor,
        nbytes: float,
        payload: int,
        topology: Any,
        sustained: Any,
        form: str,
    ) -> Prediction:
        """Each worker sums and encodes its share, exchanges it with its like on the other hosts, and decodes all."""
        inside, across = topology.inside, topology.across
        cost = self.cost_of(compressor) if form == "full" else KernelCost()
        part, share, hosts = nbytes / inside.ranks, payload / inside.ranks, across.ranks
        summed = inside.reduce_scatter(nbytes)
        found = []
        for pattern in ("allgather", "scatter_reduce")[: 2 if hosts > 2 else 1]:
            encode, decode = _coding(cost, part, pattern, hosts)
            # Payloads of all hosts, or of their sum, are handed on and decoded.
            many = hosts if pattern == "allgather" else 1
            handed = inside.allgather(many * share)
            decode += cost.decoding(nbytes - part, many)
            wire = _wire(across, sustained.across, pattern, share)
            in_both = (encode, wire[0], decode, summed + handed)
            found.append(Prediction(compressor.spec, "two_level", payload, *in_both, *wire[1:]))
        return min(found, key=lambda prediction: prediction.total)

    def _kernels(self, compressor: Format | Compressor, nbytes: float, pattern: str) -> tuple[float, float]:
        return _coding(self.cost_of(compressor), nbytes, pattern, self.ranks)

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


def _coding(cost: KernelCost, nbytes: float, pattern: str, n: int) -> tuple[float, float]:
    """Seconds of encoding and of decoding between n ranks."""
    if pattern in ("allreduce", "low_rank"):
        return cost.encoding(nbytes), cost.decoding(nbytes, 1)
    if pattern == "allgather":
        return cost.encoding(nbytes), cost.decoding(nbytes, n)
    # The own part is not encoded at first, but the sum of it is; the others' are decoded for that.
    first, again = cost.encoding(nbytes * (n - 1) / n), cost.encoding(nbytes / n)
    return first + again, cost.decoding(nbytes / n, n - 1) + cost.decoding(nbytes, 1)


def _levels(topology: Any) -> bool:
    """Whether the topology is one of several hosts of several workers."""
    inside, across = getattr(topology, "inside", None), getattr(topology, "across", None)
    return inside is not None and across is not None and inside.ranks > 1 and across.ranks > 1


def _parse(compressor: str | Format | Compressor) -> Any:
    """A compressor as it is; of a spec string the format, for which no TensorFlow is needed."""
    return formats.parse(compressor) if isinstance(compressor, str) else compressor


def _shape(compressor: Any, elements: int) -> tuple[int, ...]:
    """As what a bucket of so many elements is taken where its shape is not known."""
    if not compressor.model_wide:
        return (elements,)
    side = max(1, round(elements**0.5))
    return (side, math.ceil(elements / side))


def _wire(
    topology: Topology, sustained: Topology, pattern: str, payload: float
) -> tuple[float, float, float]:
    """Seconds on the wire, how many of them are latency, and how many a burst saved the first collective.

    `sustained` is the same network without bursts.
    """
    collectives = _collectives(pattern, payload, topology.ranks)
    seconds, latency = (
        sum(getattr(sustained, name)(nbytes * some) for name, nbytes in collectives) for some in (1.0, 0.0)
    )
    name, nbytes = collectives[0]
    saved = getattr(sustained, name)(nbytes) - getattr(topology, name)(nbytes)
    return seconds - saved, latency, saved


def _collectives(pattern: str, payload: float, ranks: int) -> list[tuple[str, float]]:
    """Which follow each other, and what each rank brings."""
    if pattern == "low_rank":
        return [("allreduce", payload / 2.0)] * 2
    if pattern == "scatter_reduce":
        return [("alltoall", payload), ("allgather", payload / ranks)]
    return [(pattern, payload)]


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
