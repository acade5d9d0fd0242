"""How `auto` begins: what the link and the kernels cost, and what noise would lose."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from ..compressors import Auto, Compressor
from ..cost import Calibration
from ..cost.calibrate import calibrate
from ..engine import agreement
from ..engine.grouping import Shape
from ..engine.model_layout import ModelLayout
from ..engine.settings import Settings
from ..engine.state import State
from ..exchange import volume
from ..exchange.collective import Collective
from . import policy, report
from .selector import AutoSelector, nbytes_of, propose


def selector(
    layout: ModelLayout,
    state: State,
    settings: Settings,
    calibrated: Calibration,
    collective: Callable[[Compressor, Sequence[Shape]], Collective],
) -> AutoSelector:
    """A selector for the buckets of `auto`, with its first choice. All ranks call it together; rank 0's numbers decide.

    Args:
        layout: How gradients are divided.
        state: The plan's variables.
        settings: How gradients are reduced.
        calibrated: What the link and the kernels cost.
        collective: The collective for chunks, or gradients, of these shapes.
    """
    auto: Auto = layout.auto
    shapes = [layout.shapes_of(b) for b in layout.auto_buckets]
    every_gradient = layout.model_wide.shapes
    nbytes = nbytes_of(layout)
    costs = _costs(auto, calibrated, shapes, every_gradient, nbytes, collective)
    lost = [c.noise_loss(every_gradient if c.model_wide else shapes[0]) for c in auto.candidates]
    process_set, size = settings.process_set, len(nbytes) * len(auto.candidates)
    root = process_set.ranks[0]
    with tf.device("CPU"):
        table = tf.constant(np.concatenate([np.ravel(x) for x in (*costs, lost)]), tf.float32)
        table = hvd.broadcast(table, root, name="hvdc_costs", process_set=process_set).numpy()
        costs = policy.Costs(
            *(tf.constant(x) for x in table[: 4 * size].reshape(4, len(nbytes), len(auto.candidates)))
        )
        prior = tf.constant(np.broadcast_to(table[4 * size :], costs.encode.shape))
        start = policy.initial(tf.zeros([len(nbytes)], tf.int32), len(auto.candidates))
        start = start._replace(evidence=tf.constant(math.inf))  # without hesitation
        shares = policy.shares(start, prior)
        _, first, _ = propose(auto, start, costs, shares, tf.constant(nbytes, tf.float32), tf.constant(0))
        first = hvd.broadcast(first, root, name="hvdc_first_choice", process_set=process_set)
    chosen = AutoSelector(
        layout, state, process_set, settings.op, settings.residual_decay, costs, prior, first
    )
    if process_set.rank() == 0:
        report.log_start(chosen.report(0))
    return chosen


def calibration(auto: Auto, settings: Settings, chunk: Shape) -> Calibration:
    """The one in the file that HVD_COMPRESS_CALIBRATION names, else a new one: a collective call of some seconds."""
    path = os.environ.get("HVD_COMPRESS_CALIBRATION", "").strip()
    variable, group = "environment variable HVD_COMPRESS_CALIBRATION", settings.process_set
    loaded = agreement.on_all(
        group, "hvdc_calibration", variable, lambda: _loaded(path, auto, group.size()) if path else None
    )
    without = [str(rank) for rank, found in enumerate(loaded) if found is None]
    if 0 < len(without) < len(loaded):
        raise ValueError(
            f"{variable} is not set on rank {', '.join(without)}: set it on all ranks or on none"
        )
    return loaded[0] or calibrate(auto.candidates, group, chunk[0])


def _loaded(path: str, auto: Auto, ranks: int) -> Calibration | None:
    found = Calibration.load(path)
    if found.ranks != ranks and os.environ.get("HOROVOD_ELASTIC") == "1":
        return None  # ranks have left or joined: measured anew
    if found.ranks != ranks:
        raise ValueError(
            f"{path} was measured between {found.ranks} ranks, not between {ranks}: calibrate again"
        )
    model = found.model()
    for candidate in auto.candidates:
        try:
            model.cost_of(candidate)
        except ValueError:
            raise ValueError(
                f"{path} does not know what {candidate.spec} costs: calibrate again, with all candidates"
            ) from None
    return found


def _costs(
    auto: Auto,
    calibration: Calibration,
    shapes: Sequence[Sequence[Shape]],
    every_gradient: Sequence[Shape],
    nbytes: Sequence[int],
    collective: Callable[[Compressor, Sequence[Shape]], Collective],
) -> policy.Costs:
    """Predictions for each bucket and candidate, [B, C]."""
    model = calibration.model()
    rows = []
    for b, (bucket, size) in enumerate(zip(shapes, nbytes)):
        for candidate in auto.candidates:
            if candidate.model_wide and b < len(shapes) - 1:  # with the last one, see `model_wide`
                rows.append((0.0, 0.0, 0.0, 0.0))
                continue
            payload = None
            if candidate.model_wide:
                bucket, size = every_gradient, 4 * sum(map(math.prod, every_gradient))
                payload = volume.payload_bytes(candidate, every_gradient)
            name = collective(candidate, bucket).name
            prediction = model.predict(candidate, size, name, payload=payload)
            # Without the burst, which passes but once in a step.
            transfer = prediction.wire + prediction.burst - prediction.latency
            # The link inside of a host does not change with the one between hosts.
            encode = prediction.encode + prediction.inside
            rows.append((encode, prediction.latency, transfer, prediction.decode))
    table = np.array(rows, np.float32).reshape(len(nbytes), len(auto.candidates), 4)
    return policy.Costs(*np.moveaxis(table, 2, 0))
