"""`hvdc.calibrate`: measures the links and the compressors' kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import horovod.tensorflow as hvd
import numpy as np

from ..common import devices, host_memory
from ..common.phases import Phase
from ..compressors import Compressor
from ..compressors.resolve import CompressionLike, resolve
from ..exchange import hosts
from ..exchange.group import Group
from ..exchange.volume import BUCKET_BYTES, LARGEST
from ..formats.auto import CANDIDATES
from .calibration import ACROSS, COLLECTIVES, INSIDE, Calibration, Levels
from .kernels import KernelCost
from .link import Link
from .measure_kernels import call_time, default_costs, measure_kernels, measure_speed
from .measure_links import estimate_link, inside_host, measure_link, slowest
from .model import CostModel


def calibrate(
    compressors: Sequence[CompressionLike] = CANDIDATES,
    process_set: Any = hvd.global_process_set,
    elements: int | None = None,
    watch: Callable[[str], None] = lambda what: None,
) -> Calibration:
    """Measures the collectives between the ranks, and the compressors' kernels.

    Takes some seconds, most of them for compiling the kernels. After `hvdc.init()` on several hosts of several workers,
    the collectives within hosts and between hosts are measured, too.
    This is a collective call: all ranks of the process set must make it.

    Args:
        compressors: The compressors whose kernels are timed.
        process_set: The ranks.
        elements: Elements of the chunks of gradient on which kernels are timed. If None, 2**20 or, on a GPU, as many as
            a bucket of 25 MB has. 2**20 at most for compressors that need the shapes of gradients.
        watch: Called with the name of each collective and compressor before it is measured.

    Returns:
        The same calibration on every rank, with the times of the slowest rank.

    Raises:
        ValueError: Horovod is not initialized, or this rank is not in the process set.
    """
    hvd.size()  # raises Horovod's own error where hvd.init() was not called
    if not process_set.included():
        raise ValueError("calibrate: this rank is not in the process set")
    now = ""

    def begin(what: str) -> None:
        nonlocal now
        now = what
        watch(what)

    with Phase(lambda: f"calibrating: {now}", "usually some seconds in all", process_set.rank() == 0):
        return _calibrate([resolve(compressor) for compressor in compressors], process_set, elements, begin)


def _calibrate(
    compressors: Sequence[Compressor], process_set: Any, elements: int | None, watch: Callable[[str], None]
) -> Calibration:
    group = Group(process_set, "hvdc_calibrate")
    links, errors = {}, {}
    for name in COLLECTIVES:
        watch(name)
        links[name], errors[name] = measure_link(name, group, group)
    placed, levels = _placed(process_set), None
    if placed is not None:
        watch("inside and across hosts")
        levels = _measure_levels(group, placed, measure_link)
    host_memory.keep_freed_memory()
    call = call_time()
    times = []
    for compressor in compressors:
        watch(compressor.spec)
        of_chunk = elements or (BUCKET_BYTES // 4 if devices.has_gpu() else LARGEST)
        if compressor.per_tensor:
            of_chunk = min(of_chunk, LARGEST)
        times.append(measure_kernels(compressor, of_chunk, group.size, call))
    # Those of the slowest rank, so that all ranks predict the same.
    agreed = slowest(np.array(times, np.float64), group, "_kernels")
    kernels = {c.spec: KernelCost(*map(float, row)) for c, row in zip(compressors, agreed)}
    return Calibration(group.size, links, kernels, errors, levels)


def estimate(
    compressors: Sequence[Compressor], process_set: Any, elements: int, known: Link | None = None
) -> Calibration:
    """A calibration that takes a few tenths of a second, for `auto` to begin with.

    Allreduces are timed, with a few sizes. The other collectives are taken to be as fast, and the smallest allgather to
    take as long as the smallest allreduce: most of that time is not the link's, but Horovod's, which is the same for
    both. If the link is `known`, nothing is timed but the links inside of hosts of several workers. Kernels are taken
    to cost what `defaults` says, times the speed of this machine. Kernels that it does not know are timed.
    This is a collective call. `elements` are as for `calibrate`.
    """
    group = Group(process_set, "hvdc_estimate")
    link, error = (known, 0.0) if known else estimate_link("allreduce", group, group)
    placed = _placed(process_set)
    levels = None if placed is None else _measure_levels(group, placed, estimate_link, known)
    host_memory.keep_freed_memory()
    speed = measure_speed()
    costs = [_default_cost(compressor, elements, group.size, speed) for compressor in compressors]
    agreed = slowest(np.array([dataclasses.astuple(cost) for cost in costs], np.float64), group, "_kernels")
    kernels = {c.spec: KernelCost(*map(float, row)) for c, row in zip(compressors, agreed)}
    links = dict.fromkeys(COLLECTIVES, link)
    if known is None:  # an allgather has half as many messages
        links["allgather"] = dataclasses.replace(link, alpha=2.0 * link.alpha)
    return Calibration(group.size, links, kernels, dict.fromkeys(COLLECTIVES, error), levels)


def _default_cost(compressor: Compressor, elements: int, ranks: int, speed: float) -> KernelCost:
    try:
        defaults = default_costs()
        default = CostModel(Link(0.0, 0.0), ranks, kernels=defaults.kernels).cost_of(compressor)
    except ValueError:  # a compressor of the user's
        return KernelCost(*measure_kernels(compressor, elements, ranks, call_time()))
    call, *per_byte = dataclasses.astuple(default)
    if defaults.elements is not None and not compressor.per_tensor:
        per_byte = [seconds * defaults.elements / elements for seconds in per_byte]
    return KernelCost(*(seconds * speed for seconds in (call, *per_byte)))


def _placed(process_set: Any) -> hosts.Hosts | None:
    """The hosts, if there are several of several workers."""
    return hosts.current() if process_set is hvd.global_process_set else None


def _measure_levels(
    group: Group, placed: hosts.Hosts, measure: Callable[..., tuple[Link, float]], known: Link | None = None
) -> Levels:
    local, across = group.among(placed.local, "_local"), group.among(placed.across, "_across")
    return Levels(
        placed.count,
        placed.workers,
        {name: measure(name, local, group, inside_host)[0] for name in INSIDE},
        {name: known or measure(name, across, group)[0] for name in ACROSS},
    )
