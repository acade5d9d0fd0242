"""Which compressors cross in two levels: decided once for a plan, by the cost model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from ..compressors import Compressor
from ..cost import Calibration, CostModel
from ..engine.grouping import Shape
from ..engine.settings import Settings
from ..exchange import choice
from ..exchange.hosts import Hosts

Buckets = Sequence[Sequence[Shape]]  # the shapes of each one's chunks


def flat_ones(
    candidates: Sequence[tuple[Compressor, Buckets]],
    calibration: Calibration,
    settings: Settings,
    hosts: Hosts,
) -> list[Compressor]:
    """The compressors that are faster in one level; rank 0's numbers decide. A collective call.

    Args:
        candidates: With the buckets that each may be used for.
        calibration: Of these ranks.
        settings: How gradients are reduced.
        hosts: Between which.
    """
    chosen = [(c, buckets) for c, buckets in candidates if fits(c, buckets, hosts)]
    if not chosen:
        return []
    seconds = np.full([len(chosen), 2], np.inf)
    if knows(calibration, hosts):
        model = calibration.model()
        seconds[:] = [_compared(model, hosts, *candidate) for candidate in chosen]
    with tf.device("CPU"):
        agreed = hvd.broadcast(
            tf.constant(seconds),
            settings.process_set.ranks[0],
            name="hvdc_levels",
            process_set=settings.process_set,
        ).numpy()
    if hvd.rank() == 0:
        print(_line([c.spec for c, _ in chosen], agreed, hosts), file=sys.stderr, flush=True)
    return [c for (c, _), (flat, two) in zip(chosen, agreed) if not two < flat]


def knows(calibration: Calibration, hosts: Hosts) -> bool:
    """Whether the calibration was made between such hosts."""
    levels = calibration.levels
    return levels is not None and (levels.hosts, levels.workers) == (hosts.count, hosts.workers)


def check(calibration: Calibration, hosts: Hosts) -> None:
    """Refuses a calibration by which two levels cannot be predicted.

    Raises:
        ValueError: It was not made between such hosts.
    """
    if not knows(calibration, hosts):
        raise ValueError(
            f"hierarchical=True: the calibration was not made between {hosts.count} hosts of {hosts.workers} workers "
            "after hvdc.init(): calibrate again, or unset HVD_COMPRESS_CALIBRATION"
        )


def fits(compressor: Compressor, buckets: Buckets, hosts: Hosts) -> bool:
    """Whether the compressor can cross in two levels."""
    ranks = hosts.count * hosts.workers
    return all(choice.choose(compressor, bucket, ranks, hosts).hierarchical for bucket in buckets)


def _compared(model: CostModel, hosts: Hosts, compressor: Compressor, buckets: Buckets) -> list[float]:
    """Seconds of all buckets' exchanges: flat, and hierarchical."""

    def seconds(bucket: Sequence[Shape], hosts: Hosts | None) -> float:
        name = choice.choose(compressor, bucket, model.ranks, hosts).name
        return model.predict(compressor, 4 * sum(shape[0] for shape in bucket), name).total

    return [sum(seconds(bucket, between) for bucket in buckets) for between in (None, hosts)]


def _line(specs: Sequence[str], seconds: Any, hosts: Hosts) -> str:
    where = f"hvd_compress: between {hosts.count} hosts of {hosts.workers} workers"
    if not np.isfinite(seconds).all():
        return f"{where} the exchange stays flat: the calibration knows no links inside and between hosts, make it anew"
    found = [
        f"{spec} crosses in {'two levels' if two < flat else 'one level'} "
        f"(predicted {1e3 * two:.3g} ms in two, {1e3 * flat:.3g} in one)"
        for spec, (flat, two) in zip(specs, seconds)
    ]
    return f"{where} {', '.join(found)}"
