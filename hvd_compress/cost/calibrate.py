"""Measuring the link and the kernels at hand."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from .. import payload as _payload
from ..compression import CompressionLike, resolve
from ..compressors import Compressor, NoCompression
from ..compressors.base import no_seeds
from ..exchange import common
from .calibration import COLLECTIVES, Calibration
from .kernels import KernelCost
from .link import Link
from .topology import Ring

CANDIDATES = ("none", "int8", "int4", "hybrid:ratio=0.01,bits=4")
# Bytes that each rank brings. Those that would take too long on a slow link are left out.
_SIZES = (2**12, 2**16, 2**19, 2**21, 2**23)
_FEWEST = 2
_REPEATS = 9
_REPEATS_OF_LARGE = 3
_LARGE = 2**19
# Seconds that the next larger size may take.
_PATIENCE = 0.1
# Elements on which kernels are timed: 1 MB of gradient.
_ELEMENTS = 2**18


def calibrate(
    compressors: Sequence[CompressionLike] = CANDIDATES, process_set: Any = hvd.global_process_set
) -> Calibration:
    """Measures the collectives between the ranks, and the compressors' kernels.

    Takes some seconds, most of them for compiling the kernels.
    A collective call: all ranks of the process set must make it.

    Args:
        compressors: Whose kernels to time.
        process_set: Between which ranks.

    Returns:
        The same calibration on every rank: of each time the slowest rank's counts.

    Raises:
        ValueError: Horovod is not initialized, or this rank is not in the process set.
    """
    hvd.size()  # raises Horovod's own error where hvd.init() was not called
    if not process_set.included():
        raise ValueError("calibrate: this rank is not in the process set")
    group = common.Group(process_set, "hvdc_calibrate")
    links = {name: _measure_link(name, group) for name in COLLECTIVES}
    chosen = [resolve(compressor) for compressor in compressors]
    # Kernels cost what they cost on the slowest rank, or ranks would predict different times.
    call = _call_time()
    local = np.array([_time_kernels(compressor, call) for compressor in chosen], np.float64)
    slowest = _slowest(local, group, "_kernels")
    return Calibration(
        group.size, links, {c.spec: KernelCost(*map(float, row)) for c, row in zip(chosen, slowest)}
    )


def _slowest(values: np.ndarray, group: common.Group, phase: str) -> np.ndarray:
    if group.size == 1:
        return values
    return np.asarray(hvd.allreduce(tf.constant(values), op=hvd.Max, **group.keywords(phase)))


def _measure_link(name: str, group: common.Group) -> Link:
    """Alpha and beta of one collective, as those of a ring."""
    n = group.size
    if n == 1:
        return Link(0.0, 0.0)
    sizes: list[int] = []
    seconds: list[float] = []
    for size in _SIZES:
        # Decided by a number that is the same on all ranks.
        if len(sizes) >= _FEWEST and seconds[-1] * size / sizes[-1] > _PATIENCE:
            break
        run = _collective(name, size, group)
        run()
        repeats = _REPEATS if size < _LARGE else _REPEATS_OF_LARGE
        # The slowest rank of each time, then the usual one of them.
        times = _slowest(np.array([_timed(run, group) for _ in range(repeats)]), group, "_times")
        sizes.append(size)
        seconds.append(_typical(times))
    per_message, per_byte = fit(sizes, seconds)
    messages = getattr(Ring(Link(1.0, 0.0), n), name)(0)
    share = getattr(Ring(Link(0.0, 1.0), n), name)(1)
    return Link(per_message / messages, per_byte / share)


def _collective(name: str, size: int, group: common.Group) -> Callable[[], Any]:
    data = tf.zeros([size], tf.uint8)

    @tf.function(autograph=False)
    def run() -> Any:
        if name == "allreduce":
            return hvd.allreduce(tf.bitcast(tf.reshape(data, [-1, 4]), tf.float32), op=hvd.Sum, **keywords)
        if name == "allgather":
            return common.allgather(data, group, f"_{name}_{size}")
        part = data[: size // group.size]
        return common.alltoall([part] * (group.size - 1), group, f"_{name}_{size}")

    keywords = group.keywords(f"_{name}_{size}")
    return run


def _timed(run: Callable[[], Any], group: common.Group) -> float:
    hvd.allreduce(tf.zeros([1]), op=hvd.Sum, **group.keywords("_barrier"))
    start = time.perf_counter()
    tf.nest.map_structure(lambda tensor: tensor.numpy(), run())
    return time.perf_counter() - start


def fit(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Seconds per call and per byte, neither below zero, with the least squares of relative errors.

    Relative, as otherwise the largest size alone would decide.
    """
    rows = np.stack([np.ones(len(sizes)), np.asarray(sizes, np.float64)], 1) / np.asarray(seconds)[:, None]
    (per_call, per_byte), *_ = np.linalg.lstsq(rows, np.ones(len(sizes)), rcond=None)
    if per_call < 0:
        per_call, per_byte = 0.0, _scale(rows[:, 1])
    elif per_byte < 0:
        per_call, per_byte = _scale(rows[:, 0]), 0.0
    return float(per_call), float(per_byte)


def _scale(column: np.ndarray) -> float:
    return float(column.sum() / (column**2).sum())


def _time_kernels(compressor: Compressor, call: float) -> tuple[float, float, float, float]:
    """The fields of a `KernelCost`, where an empty call takes `call` seconds."""
    if isinstance(compressor, NoCompression):
        return 0.0, 0.0, 0.0, 0.0  # nothing is encoded
    shape = (512, _ELEMENTS // 512) if compressor.per_tensor else (_ELEMENTS,)
    gradient = tf.random.stateless_normal(shape, [1, 2])
    residual = tf.random.stateless_normal(shape, [3, 4]) if compressor.error_feedback else None
    seeds = no_seeds()

    @tf.function(autograph=False)
    def encode() -> Any:
        encoded = compressor.encode(gradient, seeds, residual, 1.0, residual is not None)
        return _payload.join(encoded.parts), [] if residual is None else encoded.residual

    encoded = compressor.encode(gradient, seeds, residual, 1.0, False)

    def decode(ranks: int) -> Callable[[], Any]:
        @tf.function(autograph=False)
        def run() -> Any:
            return common.decode_sum(compressor, [encoded.parts] * ranks, encoded.ctx, tf.constant(1.0))

        return run

    nbytes = 4 * _ELEMENTS
    encoding, one, three = (_time_of(run) for run in (encode, decode(1), decode(3)))
    per_rank = max(0.0, (three - one) / 2 / nbytes)
    return (
        call,
        max(0.0, encoding - call) / nbytes,
        max(0.0, (one - call) / nbytes - per_rank),
        per_rank,
    )


def _call_time() -> float:
    small = tf.zeros([16])

    @tf.function(autograph=False)
    def run() -> tf.Tensor:
        return small + 1.0

    return _time_of(run)


def _time_of(run: Callable[[], Any]) -> float:
    run()
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return _typical(times)


def _typical(times: Sequence[float] | np.ndarray) -> float:
    """The lower quartile: what disturbs a measurement only ever makes it longer."""
    return float(np.quantile(times, 0.25))
