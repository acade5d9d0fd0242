"""How long a training step takes, predicted: the cost model, and buckets that queue behind the backward pass."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .. import formats
from ..auto import choices
from ..auto.usual_progress import usual
from ..cost import CostModel, Prediction
from ..exchange import choice, volume
from ..exchange.hierarchical import HostCounts
from ..formats import Format, NoCompression
from ..formats.auto import CANDIDATES, MAX_SLOWDOWN
from .network import Network
from .workload import Bucket, Workload, buckets_of


@dataclasses.dataclass(frozen=True)
class Forecast:
    """A step with one compressor, or with those that `auto` would choose. Times are seconds."""

    compressor: str  # its spec string, or "auto"
    step: float
    # All buckets' exchanges, one after the other. A bucket's encoding does not count as long as messages of the bucket
    # before are on their way.
    exchange: float
    exposed: float  # the part of the exchange that the backward pass does not hide
    encode: float
    wire: float  # inside of hosts included
    decode: float
    sent: int  # bytes that each rank sends; with the two-level exchange, those that it sends to other hosts
    plain: int  # bytes that it would send uncompressed
    lost: float  # the share of the energy of white noise that a step leaves to later ones; see `noise_lost`
    progress: float  # of a step, relative to an uncompressed one; see `expected_progress`
    per_progress: float  # seconds of training for the progress of an uncompressed step; see `choices.cost_of`
    chosen: tuple[tuple[int, str], ...]  # the bytes and the compressor of each bucket


def forecast(spec: str, work: Workload, network: Network, ranks: int, rate: float | None = None) -> Forecast:
    """A step with this compressor.

    Raises:
        ValueError: The spec string or its cost is not known, or the network does not fit the ranks.
    """
    of_step = _exchanges_of(work, formats.parse(spec), ranks, network.compressed_by(ranks))
    return _forecast(spec, work, _model(network, ranks, rate), of_step)


def forecast_auto(work: Workload, network: Network, ranks: int) -> Forecast:
    """A step with what `compression="auto"` would choose once its first steps are over.

    That is the best of its candidates, or of mixtures by its rule. Each is taken to make its `expected_progress`.
    """
    alone = [forecast(spec, work, network, ranks) for spec in CANDIDATES]
    best_one = min([_mixture(work, network, ranks), *alone], key=lambda forecast: forecast.per_progress)
    return dataclasses.replace(best_one, compressor="auto")


def _mixture(work: Workload, network: Network, ranks: int) -> Forecast:
    """A step with the best choice of a candidate of `auto` for each bucket, without those for all buckets at once."""
    model, workers = _model(network, ranks, None), network.compressed_by(ranks)
    candidates = tuple(c for c in map(formats.parse, CANDIDATES) if not c.model_wide)
    buckets = buckets_of(work, candidates, ranks, workers)
    chosen: list[Format] = [NoCompression()] * len(buckets)
    compressible = [i for i, bucket in enumerate(buckets) if not bucket.dense]
    if compressible:
        exchanges = [[_exchange(buckets[i], c, ranks, workers) for c in candidates] for i in compressible]
        picks = best(
            uncompressed=[candidate.uncompressed for candidate in candidates],
            waits=np.diff(work.backward * np.array([buckets[i].ready for i in compressible]), prepend=0.0),
            seconds=np.array([[_cost(model, e).sustained.total for e in row] for row in exchanges]),
            nbytes=np.array([buckets[i].nbytes for i in compressible], np.float64),
            rest=work.rest,
            progress=np.array([expected_progress(candidate) for candidate in candidates]),
            lost=np.array([noise_lost(candidate) for candidate in candidates]),
        )
        for i, pick in zip(compressible, picks):
            chosen[i] = candidates[pick]
    return _forecast("auto", work, model, _exchanges(buckets, chosen, ranks, workers))


def best(
    uncompressed: Sequence[bool],
    waits: np.ndarray,
    seconds: np.ndarray,
    nbytes: np.ndarray,
    rest: float,
    progress: np.ndarray,
    lost: np.ndarray,
) -> np.ndarray:
    """The choice of `auto` with its default settings: the candidate of each bucket, [B].

    Arguments are those of `choices.options` and `choices.cost_of`.
    """
    options = choices.options(uncompressed, [False] * len(uncompressed), len(nbytes))
    return options[np.argmin(choices.cost_of(np, options, waits, seconds, nbytes, rest, progress, lost, MAX_SLOWDOWN))]


def per_progress(step: float, progress: float, lost: float) -> float:
    """Seconds of training for the progress of an uncompressed step, of steps that take `step` seconds.

    It is what `auto` minimizes, `choices.cost_of`, of a single exchange.
    """
    one, none, progresses, losses = np.ones(1), np.zeros(1), np.array([progress]), np.array([lost])
    pick, seconds = np.zeros([1, 1], np.int32), np.array([[step]])
    return float(choices.cost_of(np, pick, none, seconds, one, 0.0, progresses, losses, MAX_SLOWDOWN)[0])


class _Exchange(NamedTuple):
    """How a bucket is exchanged with a compressor, on any network."""

    nbytes: int
    compressor: Format
    payload: int
    pattern: str
    sent: int


class _Exchanges(NamedTuple):
    """The exchanges of a step, on any network. Most buckets of a large model are alike."""

    different: list[_Exchange]
    places: np.ndarray  # of each bucket's exchange among the different ones, [B]
    ready: np.ndarray  # the share of the backward pass after which each bucket is complete, [B]


def _exchanges(buckets: Sequence[Bucket], compressors: Sequence[Format], ranks: int, workers: int) -> _Exchanges:
    found: dict[tuple[Bucket, Format], int] = {}
    places = [found.setdefault(pair, len(found)) for pair in zip(buckets, compressors)]
    different = [_exchange(bucket, compressor, ranks, workers) for bucket, compressor in found]
    return _Exchanges(different, np.array(places), np.array([bucket.ready for bucket in buckets]))


@functools.lru_cache(maxsize=256)
def _exchanges_of(work: Workload, compressor: Format, ranks: int, workers: int) -> _Exchanges:
    buckets = buckets_of(work, (compressor,), ranks, workers)
    return _exchanges(buckets, [NoCompression() if b.dense else compressor for b in buckets], ranks, workers)


@functools.lru_cache(maxsize=4096)
def _exchange(bucket: Bucket, compressor: Format, ranks: int, workers: int) -> _Exchange:
    nbytes, shapes = bucket.nbytes, bucket.shapes
    hosts = HostCounts(ranks // workers, workers) if workers > 1 else None
    collective = choice.choose(compressor, shapes, ranks, hosts)
    if compressor.uncompressed:
        sent = volume.ring_bytes(nbytes, ranks)
    else:
        sent = collective.bytes_sent(compressor, shapes, ranks)
    return _Exchange(nbytes, compressor, volume.payload_bytes(compressor, shapes), collective.name, sent)


def _model(network: Network, ranks: int, rate: float | None) -> CostModel:
    return CostModel(network.link(rate or network.rate), ranks, network.topology(ranks, rate), network.kernels)


def _cost(model: CostModel, exchange: _Exchange) -> Prediction:
    return model.predict(exchange.compressor, exchange.nbytes, exchange.pattern, payload=exchange.payload)


@functools.cache
def noise_lost(compressor: Format) -> float:
    """The share of the energy of white noise that one step loses, from samples. Most gradients lose less."""
    return compressor.estimated_noise_loss(np.random.default_rng(0).standard_normal(2**18))


def expected_progress(compressor: Format) -> float:
    """The progress of a step, relative to an uncompressed one, where nothing was measured."""
    return usual(noise_lost(compressor), compressor.name)


def _forecast(name: str, work: Workload, model: CostModel, of_step: _Exchanges) -> Forecast:
    exchanges, places = of_step.different, of_step.places
    costs = [_cost(model, exchange) for exchange in exchanges]

    def of_buckets(values: Sequence[float]) -> np.ndarray:
        return np.array(values, np.float64)[places]

    # Only the first exchange begins after a pause.
    wire, total = (of_buckets([getattr(cost.sustained, part) for cost in costs]) for part in ("wire", "total"))
    wire[0], total[0] = costs[places[0]].wire, costs[places[0]].total
    encode, latency = (of_buckets([getattr(cost, part) for cost in costs]) for part in ("encode", "latency"))
    # The encoding that passes while messages of the bucket before are on their way.
    hidden = np.minimum(encode, np.concatenate([[0.0], latency[:-1]]))
    seconds = total - hidden
    done = float(choices.makespan(np, np.diff(work.backward * of_step.ready + hidden, prepend=0.0), seconds))
    sizes = of_buckets([exchange.nbytes for exchange in exchanges])
    lost = float(np.average(of_buckets([noise_lost(e.compressor) for e in exchanges]), weights=sizes))
    progress = float(np.average(of_buckets([expected_progress(e.compressor) for e in exchanges]), weights=sizes))
    specs = [exchange.compressor.spec for exchange in exchanges]
    return Forecast(
        compressor=name,
        step=work.rest + done,
        exchange=float(seconds.sum()),
        exposed=done - work.backward,
        encode=float(encode.sum()),
        wire=float(wire.sum() + of_buckets([cost.inside for cost in costs]).sum()),
        decode=float(of_buckets([cost.decode for cost in costs]).sum()),
        sent=sum(exchanges[i].sent for i in places.tolist()),
        plain=volume.ring_bytes(4 * work.numel, model.ranks),
        lost=lost,
        progress=progress,
        per_progress=per_progress(work.rest + done, progress, lost),
        chosen=tuple((exchanges[i].nbytes, specs[i]) for i in places.tolist()),
    )
