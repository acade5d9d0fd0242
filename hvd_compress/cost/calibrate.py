"""Measuring the link and the kernels at hand."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from ..common import host_memory
from ..compressors import Compressor
from ..compressors import payload as _payload
from ..compressors.base import no_seeds
from ..compressors.resolve import CompressionLike, resolve
from ..exchange import coding, hosts, transfers, within_host
from ..exchange.group import Group
from ..exchange.volume import LARGEST
from ..formats.auto import CANDIDATES
from .calibration import ACROSS, COLLECTIVES, INSIDE, Calibration, Levels
from .kernels import KernelCost
from .link import Link
from .topology import Ring

# Bytes that each rank brings. Those that would take too long are left out, and on a fast link the
# middle one: there the rate shows only beyond what the processor's cache holds.
_SIZES = (2**12, 2**16, 2**19, 2**21, 2**23, 2**25)
_MIDDLE = 2**21
# What the smallest takes varies most, by what else the processor does.
_REPEATS = {2**12: 24, 2**16: 6, 2**19: 6}
_REPEATS_OF_LARGE = 3
# Seconds. What takes longer than the first is timed once, and is the last; after so many sizes it is left out.
_SHORT, _PATIENCE, _ENOUGH = 0.1, 0.2, 4
# Seconds that the middle size takes at least on a link that is not fast: 4 Gbit/s.
_FAST = 0.004
# A slow link may let through some 100 KB at a higher rate, and again after a pause. Where a size up to the first takes
# longer than the second, in seconds, all later ones are timed after a pause of the third: each time has the same
# share of it.
_PROBED, _SLOW, _PAUSE = 2**19, 0.015, 0.03
_LARGEST_BURST = 2**20
# Of gradient, on which kernels are timed.
_PIECES = 4
_REPEATS_OF_KERNELS = 5


def calibrate(
    compressors: Sequence[CompressionLike] = CANDIDATES,
    process_set: Any = hvd.global_process_set,
    elements: int = LARGEST,
    watch: Callable[[str], None] = lambda what: None,
) -> Calibration:
    """Measures the collectives between the ranks, and the compressors' kernels.

    Takes some seconds, most of them for compiling the kernels. After `hvdc.init()` on several hosts of several workers
    those inside of hosts and between hosts are measured, too.
    A collective call: all ranks of the process set must make it.

    Args:
        compressors: Whose kernels to time.
        process_set: Between which ranks.
        elements: Of the chunks of gradient on which kernels are timed.
        watch: Called with the name of each collective and compressor before it is measured.

    Returns:
        The same calibration on every rank: of each time the slowest rank's counts.

    Raises:
        ValueError: Horovod is not initialized, or this rank is not in the process set.
    """
    hvd.size()  # raises Horovod's own error where hvd.init() was not called
    if not process_set.included():
        raise ValueError("calibrate: this rank is not in the process set")
    group = Group(process_set, "hvdc_calibrate")
    links, residuals = {}, {}
    for name in COLLECTIVES:
        watch(name)
        links[name], residuals[name] = _measure_link(name, group, group)
    levels = None
    where = hosts.current() if process_set is hvd.global_process_set else None
    if where is not None:
        watch("inside and across hosts")
        local_group, across = group.among(where.local, "_local"), group.among(where.across, "_across")
        levels = Levels(
            where.count,
            where.workers,
            {name: _measure_link(name, local_group, group, _inside)[0] for name in INSIDE},
            {name: _measure_link(name, across, group)[0] for name in ACROSS},
        )
    chosen = [resolve(compressor) for compressor in compressors]
    host_memory.keep_freed_memory()
    # Kernels cost what they cost on the slowest rank, or ranks would predict different times.
    call = _call_time()
    times = []
    for each in chosen:
        watch(each.spec)
        times.append(_time_kernels(each, elements, group.size, call))
    local = np.array(times, np.float64)
    slowest = _slowest(local, group, "_kernels")
    kernels = {c.spec: KernelCost(*map(float, row)) for c, row in zip(chosen, slowest)}
    return Calibration(group.size, links, kernels, residuals, levels)


def _slowest(values: np.ndarray, group: Group, phase: str) -> np.ndarray:
    if group.size == 1:
        return values
    return np.asarray(hvd.allreduce(tf.constant(values), op=hvd.Max, **group.keywords(phase)))


def _measure_link(
    name: str,
    group: Group,
    everyone: Group,
    collective: Callable[[str, int, Group], Callable[[], Any]] | None = None,
) -> tuple[Link, float]:
    """Alpha, beta and burst of one collective, as those of a ring, and the residual of the fit.

    In all groups such as this one, into which `everyone` is divided, at once.
    """
    collective = collective or _collective
    n = group.size
    if n == 1:
        return Link(0.0, 0.0), 0.0
    sizes: list[int] = []
    seconds: list[float] = []
    pause = 0.0
    for size in _SIZES:
        # Decided by a number that is the same on all ranks; what the smallest takes does not grow with the size.
        expected = (seconds[-1] - seconds[0]) * size / sizes[-1] if len(sizes) > 1 else 0.0
        if expected > (_PATIENCE if len(sizes) < _ENOUGH else _SHORT):
            break
        if size == _MIDDLE and expected < _FAST:
            continue
        run = collective(name, size, group)
        run()
        if sizes and size <= _PROBED:  # smaller ones may all have passed in a burst
            expected = float(_slowest(np.array(_timed(run, everyone)), everyone, "_times"))
            pause = _PAUSE if expected > _SLOW else 0.0
        repeats = _REPEATS.get(size, _REPEATS_OF_LARGE) if expected <= _SHORT else 1
        # The slowest rank of each time, then the usual one of them.
        times = _slowest(np.array([_timed(run, everyone, pause) for _ in range(repeats)]), everyone, "_times")
        sizes.append(size)
        seconds.append(midmean(times))
    per_message, per_byte, burst = fit(sizes, seconds)
    messages = getattr(Ring(Link(1.0, 0.0), n), name)(0)
    share = getattr(Ring(Link(0.0, 1.0), n), name)(1)
    fitted = per_message + per_byte * np.maximum(0.0, np.array(sizes) - burst)
    residual = float(np.sqrt(np.mean(np.square(fitted / np.array(seconds) - 1.0))))
    return Link(per_message / messages, per_byte / share, burst=burst * share), residual


def _collective(name: str, size: int, group: Group) -> Callable[[], Any]:
    data = tf.zeros([size], tf.uint8)

    @tf.function(autograph=False)
    def run() -> Any:
        if name == "allreduce":
            return hvd.allreduce(tf.bitcast(tf.reshape(data, [-1, 4]), tf.float32), op=hvd.Sum, **keywords)
        if name == "allgather":
            return transfers.allgather(data, group, f"_{name}_{size}")
        part = data[: size // group.size]
        return transfers.alltoall(transfers.concat([part] * (group.size - 1)), group, f"_{name}_{size}")

    keywords = group.keywords(f"_{name}_{size}")
    return run


def _inside(name: str, size: int, group: Group) -> Callable[[], Any]:
    """A collective between the workers of a host, see `exchange.inside`."""
    named = group.among(group.process_set, f"_{size}")
    payload = tf.zeros([size], tf.uint8)
    chunk = tf.zeros([max(1, size // 4 // group.size)])

    @tf.function(autograph=False)
    def run() -> Any:
        if name == "reduce_scatter":
            others = transfers.concat([chunk] * (group.size - 1))
            return within_host.reduce_scatter([chunk], [chunk], 1.0, others, named)[0]
        return within_host.allgather(payload, named)

    return run


def _timed(run: Callable[[], Any], group: Group, pause: float = 0.0) -> float:
    rest(pause)
    hvd.allreduce(tf.zeros([1]), op=hvd.Sum, **group.keywords("_barrier"))
    start = time.perf_counter()
    tf.nest.map_structure(lambda tensor: tensor.numpy(), run())
    return time.perf_counter() - start


def rest(seconds: float) -> None:
    """Keeps the network quiet but not the processor, which is busy between exchanges when it trains.

    After a sleep a small message takes up to twice as long.
    """
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def midmean(times: np.ndarray) -> float:
    """The mean of the middle half, as robust as the median, which it is of three and fewer.

    A small message takes one time slice of the scheduler or two, and the median of few jumps from one to the other.
    """
    if len(times) < 4:
        return float(np.median(times))
    quarter = len(times) // 4
    return float(np.mean(np.sort(times)[quarter : len(times) - quarter]))


def fit(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float, float]:
    """Seconds per call and per byte, and the bytes that pass at once, none of them below zero.

    Of three sizes and more, per byte is the slope between the two largest, and per call what the smallest takes. What
    this makes of the largest more than was measured passes at once, in the burst that a shaped link or
    a switch's buffer takes; beyond 1 MB it is rather that the time per byte grows, and nothing is taken off.
    Of two sizes, the first two have the least squares of relative errors.
    """
    times = np.asarray(seconds, np.float64)
    rows = np.stack([np.ones(len(sizes)), np.asarray(sizes, np.float64)], 1) / times[:, None]
    slope = (times[-1] - times[-2]) / (sizes[-1] - sizes[-2]) if len(sizes) > 2 else 0.0
    if slope > 0:
        burst = float(sizes[-1] - (times[-1] - times[0]) / slope)
        if 2 * sizes[0] < burst <= _LARGEST_BURST:  # of a line without one it is the smallest size
            return float(times[0]), float(slope), burst
        return max(0.0, float(times[0] - slope * sizes[0])), float(slope), 0.0
    (per_call, per_byte), *_ = np.linalg.lstsq(rows, np.ones(len(sizes)), rcond=None)
    if per_call < 0:
        per_call, per_byte = 0.0, _scale(rows[:, 1])
    elif per_byte < 0:
        per_call, per_byte = _scale(rows[:, 0]), 0.0
    return float(per_call), float(per_byte), 0.0


def _scale(column: np.ndarray) -> float:
    return float(column.sum() / (column**2).sum())


def _time_kernels(
    compressor: Compressor, elements: int, ranks: int, call: float
) -> tuple[float, float, float, float]:
    """The fields of a `KernelCost`, where an empty call takes `call` seconds.

    With payloads of `ranks` ranks, as the exchange decodes them, so that no kernel is compiled only for this.
    """
    if compressor.uncompressed:
        return 0.0, 0.0, 0.0, 0.0  # nothing is encoded
    rows = min(512, math.isqrt(elements))
    shape = (rows, elements // rows) if compressor.per_tensor else (elements,)
    gradients = [tf.random.stateless_normal(shape, [1, i]) for i in range(_PIECES)]
    residuals = [tf.zeros(shape) if compressor.error_feedback else None] * _PIECES
    keep = compressor.error_feedback
    nbytes = _PIECES * 4 * math.prod(shape)

    # In graphs only, as in training: kernels that are called eagerly would be compiled once more.
    @tf.function(autograph=False)
    def encode(gradients: Sequence[tf.Tensor], residuals: Sequence[tf.Tensor | None]) -> Any:
        found = [compressor.encode(g, no_seeds(), r, 1.0, keep) for g, r in zip(gradients, residuals)]
        return _payload.join([part for each in found for part in each.parts]), [
            e.residual for e in found if keep
        ]

    @tf.function(autograph=False)
    def decode(gradient: tf.Tensor, residual: tf.Tensor | None, several: int) -> Any:
        sample = compressor.encode(gradient, no_seeds(), residual, 1.0, keep)
        # Times another factor each: the same sum would be decoded once.
        factors = [tf.constant(1.0 + i) for i in range(_PIECES)]
        return [coding.decode_sum(compressor, [sample.parts] * several, sample.ctx, f) for f in factors]

    encoding = max(0.0, _time_of(lambda: encode(gradients, residuals)) - call)

    def decoding(several: int) -> float:
        seconds = _time_of(lambda: decode(gradients[0], residuals[0], several))
        return max(0.0, seconds - call - encoding / _PIECES)

    if compressor.model_wide:  # whose factors are summed before
        return call, encoding / nbytes, decoding(1) / nbytes, 0.0
    several = min(max(ranks, 2), coding.RANKS_PER_KERNEL)
    seconds = decoding(several)
    # Between two ranks there is no sum of one payload.
    one = decoding(1) if ranks > 2 else 2.0 / 3.0 * seconds
    per_rank = max(0.0, (seconds - one) / (several - 1))
    return call, encoding / nbytes, max(0.0, one - per_rank) / nbytes, per_rank / nbytes


def _call_time() -> float:
    small = tf.zeros([16])
    return _time_of(lambda: _add_one(small))


@tf.function(autograph=False)
def _add_one(x: tf.Tensor) -> tf.Tensor:
    return x + 1.0


def _time_of(run: Callable[[], Any]) -> float:
    run()
    times = []
    for _ in range(_REPEATS_OF_KERNELS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return float(np.median(times))
