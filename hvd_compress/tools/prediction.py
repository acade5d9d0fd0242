"""How long a training step takes, predicted: the cost model, and buckets that queue behind the backward pass."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .. import formats
from ..auto.splits import divided
from ..cost import CostModel, Prediction
from ..engine import grouping as buckets
from ..engine import layout as geometry
from ..engine.grouping import Shape, TensorGroup
from ..engine.layout import BUCKET_BYTES, MIN_COMPRESS_SIZE
from ..exchange import choice, volume
from ..exchange.hierarchical import HostCounts
from ..formats import (
    BlockSparse,
    BlockTopK,
    Format,
    Hybrid,
    NoCompression,
    OneBit,
    PowerSGD,
    Quantize,
    RandomK,
    TopK,
)
from ..formats.auto import CANDIDATES, MAX_SLOWDOWN, TARGET
from .network import Network


@dataclasses.dataclass(frozen=True)
class Workload:
    """What is trained.

    Attributes:
        shapes: Of all gradients, first layer first.
        backward: Seconds of the backward pass. Gradients become ready evenly in it, byte by byte, last layer first.
        rest: Seconds of a step in which nothing can cross: forward pass, update.
        bucket_bytes: Of float32.
    """

    shapes: tuple[Shape, ...]
    backward: float = 0.0
    rest: float = 0.0
    bucket_bytes: int = BUCKET_BYTES

    @functools.cached_property
    def numel(self) -> int:
        """The number of parameters."""
        return sum(map(math.prod, self.shapes))

    def ready(self, first: int) -> float:
        """The share of the backward pass after which the gradients from this position on are there."""
        return 1.0 - self._before[first] / self.numel

    @functools.cached_property
    def _before(self) -> list[int]:
        """The parameters before each gradient."""
        return [0, *itertools.accumulate(map(math.prod, self.shapes))]

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.shapes, self.backward, self.rest, self.bucket_bytes))

    def __hash__(self) -> int:
        """Found once: it is looked up for each forecast, and there may be many gradients."""
        return self._hash


@dataclasses.dataclass(frozen=True)
class Crossing:
    """A bucket on its way.

    Attributes:
        nbytes: Of gradient, as float32.
        shapes: Of its chunks.
        ready: When its last gradient is there, as a share of the backward pass.
        dense: Whether it is never compressed.
    """

    nbytes: int
    shapes: tuple[Shape, ...]
    ready: float
    dense: bool = False


@dataclasses.dataclass(frozen=True)
class Forecast:
    """A step with one compressor, or with those that `auto` would choose.

    Attributes:
        compressor: Its spec string, or "auto".
        step: Seconds.
        exchange: Seconds of all buckets' exchanges, one after the other, but that each is encoded while messages of the
            one before are on their way: what they wait for is not the processor.
        exposed: Seconds of it that the backward pass does not hide.
        encode: Seconds of it.
        wire: Seconds of it, those inside of hosts included.
        decode: Seconds of it.
        sent: Bytes that each rank sends; of the two-level exchange those that it sends to other hosts.
        plain: Bytes that it would send uncompressed.
        lost: The share of the energy of white noise that a step leaves to later ones; see `noise_lost`.
        chosen: The compressor of each bucket.
    """

    compressor: str
    step: float
    exchange: float
    exposed: float
    encode: float
    wire: float
    decode: float
    sent: int
    plain: int
    lost: float
    chosen: tuple[tuple[int, str], ...]


def makespan(waits: np.ndarray, exchange: np.ndarray) -> np.ndarray:
    """As `auto.policy.makespan`, in NumPy: when the last bucket is there, [...], of [..., B] each.

    The backward pass makes the gradients of one bucket after the other, each after another `waits` seconds;
    meanwhile those before cross, one after the other, each in `exchange` seconds.
    """
    ready, crossed = np.cumsum(waits, -1), np.cumsum(exchange, -1)
    latest: np.ndarray = np.max(ready - crossed + exchange, -1) + crossed[..., -1]
    return latest


@functools.lru_cache(maxsize=1024)
def crossings(work: Workload, candidates: tuple[Format, ...], ranks: int, workers: int = 1) -> list[Crossing]:
    """The buckets of a step, in the order in which they cross, as `hvd_compress.plan` makes them.

    Args:
        work: What is trained.
        candidates: The compressors that may be used; all buckets but the uncompressed ones are theirs.
        ranks: Between how many.
        workers: On each host, where the exchange has two levels.
    """
    plain = all(isinstance(candidate, NoCompression) for candidate in candidates)
    everything = range(len(work.shapes))
    is_chosen = [not plain and geometry.is_compressed(shape, MIN_COMPRESS_SIZE) for shape in work.shapes]
    chosen = [i for i in everything if is_chosen[i]]
    dense = [
        Crossing(4 * bucket.numel, bucket.shapes, work.ready(min(bucket.members)), True)
        for bucket in _dense(work, [i for i in everything if not is_chosen[i]])
    ]
    if not chosen:
        return dense
    (members,) = buckets.assign(work.shapes, chosen, sys.maxsize)
    limit = geometry.bucket_limit(work.bucket_bytes, members.numel)
    layout: Any
    if candidates[0].per_tensor:
        layout = geometry.PerTensorLayout(members)
        limit = sys.maxsize if isinstance(candidates[0], PowerSGD) else limit
    else:
        layout = geometry.flat_layout(members, candidates, limit, ranks, workers)
    # Elements up to the end of each chunk, of all that are compressed.
    sizes = [math.prod(shape) for shape in layout.shapes]
    ends = np.minimum(np.cumsum(sizes), members.numel)
    through = np.cumsum(members.sizes)
    found = []
    for chunks in layout.in_buckets(limit):
        last = int(np.searchsorted(through, ends[chunks[-1]]))  # the gradient with which the bucket ends
        shapes = tuple(layout.shapes[chunks.start : chunks.stop])
        nbytes = 4 * sum(sizes[chunks.start : chunks.stop])
        found.append(Crossing(nbytes, shapes, work.ready(members.members[min(last, len(through) - 1)])))
    # The uncompressed ones go before the last bucket.
    return [*found[:-1], *dense, found[-1]]


def _dense(work: Workload, members: Sequence[int]) -> list[TensorGroup]:
    limit = geometry.bucket_limit(work.bucket_bytes, sum(math.prod(work.shapes[i]) for i in members))
    return buckets.assign(work.shapes, members, limit)


def forecast(spec: str, work: Workload, network: Network, ranks: int, rate: float | None = None) -> Forecast:
    """A step with this compressor.

    Raises:
        ValueError: The spec string is not known, or what it costs, or the network does not fit the ranks.
    """
    model = _model(network, ranks, rate)
    compressor, workers = formats.parse(spec), network.compressed_by(ranks)
    crossing = crossings(work, (compressor,), ranks, workers)
    used = [NoCompression() if c.dense else compressor for c in crossing]
    return _forecast(spec, work, model, crossing, used, workers)


def forecast_auto(work: Workload, network: Network, ranks: int, rate: float | None = None) -> Forecast:
    """A step with what `compression="auto"` would choose once its first steps are over.

    By its own rule (`auto.policy.best`), with the shares of white noise for what candidates let through.
    """
    model, workers = _model(network, ranks, rate), network.compressed_by(ranks)
    candidates = tuple(formats.parse(spec) for spec in CANDIDATES)
    crossing = crossings(work, candidates, ranks, workers)
    mine = [i for i, each in enumerate(crossing) if not each.dense]
    chosen: list[Format] = [NoCompression()] * len(crossing)
    if mine:
        seconds = np.array(
            [
                [_sustained(_cost(model, _with(crossing[i], c, ranks, workers))).total for c in candidates]
                for i in mine
            ]
        )
        lost = np.array([noise_lost(candidate) for candidate in candidates])
        ready = work.backward * np.array([crossing[i].ready for i in mine])
        sizes = np.array([crossing[i].nbytes for i in mine], np.float64)
        plain = [isinstance(candidate, NoCompression) for candidate in candidates]
        picks = best(plain, np.diff(ready, prepend=0.0), seconds, lost, sizes)
        for i, pick in zip(mine, picks):
            chosen[i] = candidates[pick]
    return _forecast("auto", work, model, crossing, chosen, workers)


def best(
    plain: Sequence[bool], waits: np.ndarray, seconds: np.ndarray, lost: np.ndarray, nbytes: np.ndarray
) -> np.ndarray:
    """As `auto.policy.best` with the default settings, in NumPy: the candidate for each bucket, [B].

    Args:
        plain: [C], whether candidates are no compression.
        waits: [B], seconds.
        seconds: [B, C], of each bucket's exchange.
        lost: [C], shares of the energy that do not get through.
        nbytes: [B], of gradient.
    """
    b, c = seconds.shape
    allowed = (1.0 - lost >= TARGET) | (lost <= lost.min())
    mixed = allowed & ~np.array(plain) if (allowed & ~np.array(plain)).any() else allowed
    fallback = np.where(mixed, seconds, np.inf).argmin(-1)  # of each bucket the fastest one
    options = divided(b, c)
    options = np.where(mixed[options], options, fallback)
    whole = [np.full((1, b), i, options.dtype) for i in range(c) if plain[i]]
    options = np.concatenate([options, *whole])
    missing = (lost[options] * nbytes).sum(-1) / nbytes.sum()
    price = makespan(waits, seconds[np.arange(b), options]) * (1.0 + MAX_SLOWDOWN * missing)
    found: np.ndarray = options[int(np.argmin(price))]
    return found


@functools.cache
def noise_lost(compressor: Format) -> float:
    """The share of the energy of white noise that one step loses, from samples; a gradient's is mostly less.

    Quantizers of evenly spaced levels lose step^2 / 12 per element, signs with a common magnitude
    1 - (mean |x|)^2 / mean x^2, sparse ones all that they leave out.
    """
    samples = np.random.default_rng(0).standard_normal(2**18)
    ratio = getattr(compressor, "ratio", 1.0)
    if isinstance(compressor, Quantize):
        rows = samples.reshape(-1, 256)
        return float(np.mean(np.square(np.ptp(rows, 1) / (2**compressor.bits - 1) / 12**0.5)))
    if isinstance(compressor, OneBit):
        return float(1.0 - np.mean(np.abs(samples)) ** 2 / np.mean(np.square(samples)))
    if isinstance(compressor, RandomK):
        return 1.0 - float(ratio)
    if isinstance(compressor, (Hybrid, BlockTopK)):
        block = round(1.0 / ratio)
        rows = samples[: samples.size // block * block].reshape(-1, block)
        return float(1.0 - np.mean(np.square(rows).max(1)) / block)
    if isinstance(compressor, (TopK, BlockSparse)):
        side = getattr(compressor, "block", 1)
        energy = np.square(samples[: samples.size // side**2 * side**2]).reshape(-1, side**2).sum(1)
        kept = np.sort(energy)[-max(1, round(ratio * energy.size)) :]
        return float(1.0 - kept.sum() / energy.sum())
    if isinstance(compressor, PowerSGD):  # of square matrices, once the start is good
        energy = np.square(np.linalg.svd(samples.reshape(512, 512), compute_uv=False))
        return float(1.0 - energy[: compressor.rank].sum() / energy.sum())
    return 0.0


class _Sent(NamedTuple):
    """A bucket's exchange, but for what it costs and when it begins."""

    nbytes: int
    compressor: Format
    payload: int
    pattern: str
    sent: int


@functools.lru_cache(maxsize=4096)
def _sent(nbytes: int, shapes: tuple[Shape, ...], compressor: Format, ranks: int, workers: int) -> _Sent:
    # Most buckets of a large model are alike.
    hosts = HostCounts(ranks // workers, workers) if workers > 1 else None
    collective = choice.choose(compressor, shapes, ranks, hosts)
    sent = collective.bytes_sent(compressor, shapes, ranks)
    if isinstance(compressor, NoCompression):
        sent = volume.ring_bytes(nbytes, ranks)
    payload = volume.payload_bytes(compressor, shapes)
    return _Sent(nbytes, compressor, payload, collective.name, sent)


def _model(network: Network, ranks: int, rate: float | None) -> CostModel:
    return CostModel(
        network.link(rate or network.rate), ranks, network.topology(ranks, rate), network.kernels
    )


def _cost(model: CostModel, one: _Sent) -> Prediction:
    return model.predict(one.compressor, one.nbytes, one.pattern, payload=one.payload)


def _sustained(cost: Prediction) -> Prediction:
    """As it is without a pause before."""
    return dataclasses.replace(cost, wire=cost.wire + cost.burst, burst=0.0)


def _with(crossing: Crossing, compressor: Format, ranks: int, workers: int) -> _Sent:
    return _sent(crossing.nbytes, crossing.shapes, compressor, ranks, workers)


def _forecast(
    name: str, work: Workload, model: CostModel, crossing: Sequence[Crossing], used: Sequence[Format], workers: int
) -> Forecast:  # fmt: skip
    exchanges = [_with(c, use, model.ranks, workers) for c, use in zip(crossing, used)]
    known = {one: _cost(model, one) for one in set(exchanges)}
    # Those after the first one follow without a pause.
    costs = [_sustained(known[one]) if i else known[one] for i, one in enumerate(exchanges)]
    encode = np.array([cost.encode for cost in costs])
    # What of it passes while messages of the bucket before are on their way; if its gradients are there by then.
    hidden = np.minimum(encode, [0.0, *(cost.latency for cost in costs[:-1])])
    seconds = np.array([cost.total for cost in costs]) - hidden
    ready = work.backward * np.array([each.ready for each in crossing])
    done = float(makespan(np.diff(ready + hidden, prepend=0.0), seconds))
    specs = {compressor: compressor.spec for compressor in set(used)}
    sizes = np.array([one.nbytes for one in exchanges], np.float64)
    lost = np.array([noise_lost(one.compressor) for one in exchanges])
    return Forecast(
        compressor=name,
        step=work.rest + done,
        exchange=float(seconds.sum()),
        exposed=done - work.backward,
        encode=float(encode.sum()),
        wire=sum(cost.wire + cost.inside for cost in costs),
        decode=sum(cost.decode for cost in costs),
        sent=sum(one.sent for one in exchanges),
        plain=volume.ring_bytes(4 * work.numel, model.ranks),
        lost=float((lost * sizes).sum() / sizes.sum()),
        chosen=tuple((one.nbytes, specs[one.compressor]) for one in exchanges),
    )
