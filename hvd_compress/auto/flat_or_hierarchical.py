"""Decides once for each plan, by the cost model, which compressors use the hierarchical exchange."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from ..common.verbosity import say
from ..compressors import Compressor
from ..cost import Calibration, CostModel
from ..cost.calibrate import calibrate
from ..engine.grouping import Shape
from ..engine.settings import Settings
from ..exchange import choice
from ..exchange.hosts import Hosts

Buckets = Sequence[Sequence[Shape]]  # the shapes of each bucket's chunks


def flat_compressors(
    candidates: Sequence[tuple[Compressor, Buckets]], calibration: Calibration | None, settings: Settings, hosts: Hosts
) -> list[Compressor]:
    """Returns the compressors whose flat exchange is faster than their hierarchical one.

    All ranks call it together. The numbers of rank 0 decide. Compressors that do not fit the hierarchical exchange are
    left out. Each candidate is a compressor with the buckets that it may be used for. Without a calibration between
    these ranks, one is made if any compressor is left.
    """
    comparable = [(c, buckets) for c, buckets in candidates if fits(c, buckets, hosts)]
    if not comparable:
        return []
    if calibration is None:
        first_bucket = comparable[0][1][0]
        calibration = calibrate([c for c, _ in comparable], settings.process_set, first_bucket[0][0])
    seconds = np.full([len(comparable), 2], np.inf)
    if knows(calibration, hosts):
        model = calibration.model()
        seconds[:] = [_predicted(model, hosts, *candidate) for candidate in comparable]
    with tf.device("CPU"):
        group = settings.process_set
        agreed = hvd.broadcast(tf.constant(seconds), group.ranks[0], name="hvdc_levels", process_set=group).numpy()
    if hvd.rank() == 0:
        say(_line([c.spec for c, _ in comparable], agreed, hosts))
    return [c for (c, _), (flat, hierarchical) in zip(comparable, agreed) if not hierarchical < flat]


def knows(calibration: Calibration, hosts: Hosts) -> bool:
    """Whether the calibration was made between so many hosts with so many ranks each."""
    levels = calibration.levels
    return levels is not None and (levels.hosts, levels.workers) == (hosts.count, hosts.workers)


def check(calibration: Calibration, hosts: Hosts) -> None:
    """Checks that the calibration can predict the hierarchical exchange.

    Raises:
        ValueError: The calibration was made between other hosts.
    """
    if not knows(calibration, hosts):
        raise ValueError(
            f"hierarchical=True: the calibration was not made between {hosts.count} hosts of {hosts.workers} workers "
            "after hvdc.init(): calibrate again, or unset HVD_COMPRESS_CALIBRATION"
        )


def fits(compressor: Compressor, buckets: Buckets, hosts: Hosts) -> bool:
    """Whether the hierarchical exchange can carry these buckets with the compressor."""
    ranks = hosts.count * hosts.workers
    return all(choice.choose(compressor, bucket, ranks, hosts).hierarchical for bucket in buckets)


def _predicted(model: CostModel, hosts: Hosts, compressor: Compressor, buckets: Buckets) -> list[float]:
    """Seconds of all buckets' exchanges: flat, and hierarchical."""

    def seconds(bucket: Sequence[Shape], hosts: Hosts | None) -> float:
        name = choice.choose(compressor, bucket, model.ranks, hosts).name
        return model.predict(compressor, 4 * sum(shape[0] for shape in bucket), name).sustained.total

    return [sum(seconds(bucket, between) for bucket in buckets) for between in (None, hosts)]


def _line(specs: Sequence[str], seconds: Any, hosts: Hosts) -> str:
    prefix = f"between {hosts.count} hosts of {hosts.workers} workers"
    if not np.isfinite(seconds).all():
        reason = "the calibration knows no links inside and between hosts, make it anew"
        return f"{prefix} the exchange stays flat: {reason}"
    parts = [
        f"{spec} crosses in {'two levels' if hierarchical < flat else 'one level'} "
        f"(predicted {1e3 * hierarchical:.3g} ms in two, {1e3 * flat:.3g} in one)"
        for spec, (flat, hierarchical) in zip(specs, seconds)
    ]
    return f"{prefix} {', '.join(parts)}"
