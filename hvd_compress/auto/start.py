"""How `auto` begins: costs from the calibration, lost shares of white noise, and the first choice."""

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
    """Makes the selector for the buckets of `auto`, with its first choice.

    All ranks call it together. The numbers of rank 0 decide.

    Args:
        layout: How gradients are divided.
        state: The plan's variables.
        settings: How gradients are reduced.
        calibrated: The measured costs of the link and the kernels.
        collective: Returns the collective for a compressor and the shapes of chunks or gradients.
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
        costs = policy.Costs(*(tf.constant(x) for x in table[: 4 * size].reshape(4, len(nbytes), len(auto.candidates))))
        prior = tf.constant(np.broadcast_to(table[4 * size :], costs.encode.shape))
        start = policy.initial(tf.zeros([len(nbytes)], tf.int32), len(auto.candidates))
        start = start._replace(evidence=tf.constant(math.inf))  # `propose` switches at once
        shares = policy.shares(start, prior)
        _, first, _ = propose(auto, start, costs, shares, tf.constant(nbytes, tf.float32), tf.constant(0))
        first = hvd.broadcast(first, root, name="hvdc_first_choice", process_set=process_set)
    chosen = AutoSelector(layout, state, process_set, settings.averages, settings.residual_decay, costs, prior, first)
    if process_set.rank() == 0:
        report.log_start(chosen.report(0))
    return chosen


def calibration(auto: Auto, settings: Settings, chunk: Shape) -> Calibration:
    """Loads the calibration from the file in HVD_COMPRESS_CALIBRATION, or makes one, which takes some seconds.

    All ranks call it together.

    Args:
        auto: The compressor `auto`.
        settings: How gradients are reduced.
        chunk: The shape of a chunk, on which kernels are measured.

    Raises:
        ValueError: The file does not fit, or the environment variable is set on some ranks only.
    """
    path = os.environ.get("HVD_COMPRESS_CALIBRATION", "").strip()
    variable, group = "environment variable HVD_COMPRESS_CALIBRATION", settings.process_set
    loaded = agreement.on_all(
        group, "hvdc_calibration", variable, lambda: _loaded(path, auto, group.size()) if path else None
    )
    ranks_without = [str(rank) for rank, file in enumerate(loaded) if file is None]
    if 0 < len(ranks_without) < len(loaded):
        raise ValueError(f"{variable} is not set on rank {', '.join(ranks_without)}: set it on all ranks or on none")
    return loaded[0] or calibrate(auto.candidates, group, chunk[0])


def _loaded(path: str, auto: Auto, ranks: int) -> Calibration | None:
    """The calibration in the file; None if an elastic job has another number of ranks now: it calibrates again."""
    calibration = Calibration.load(path)
    if calibration.ranks != ranks and os.environ.get("HOROVOD_ELASTIC") == "1":
        return None
    if calibration.ranks != ranks:
        raise ValueError(f"{path} was measured between {calibration.ranks} ranks, not between {ranks}: calibrate again")
    model = calibration.model()
    for candidate in auto.candidates:
        try:
            model.cost_of(candidate)
        except ValueError:
            raise ValueError(
                f"{path} does not know what {candidate.spec} costs: calibrate again, with all candidates"
            ) from None
    return calibration


def _costs(
    auto: Auto,
    calibration: Calibration,
    shapes: Sequence[Sequence[Shape]],
    every_gradient: Sequence[Shape],
    nbytes: Sequence[int],
    collective: Callable[[Compressor, Sequence[Shape]], Collective],
) -> policy.Costs:
    """The predicted costs of each bucket with each candidate."""
    model = calibration.model()
    rows = []
    for b, (bucket, size) in enumerate(zip(shapes, nbytes)):
        for candidate in auto.candidates:
            if candidate.model_wide and b < len(shapes) - 1:  # its costs stand with the last bucket
                rows.append((0.0, 0.0, 0.0, 0.0))
                continue
            payload = None
            if candidate.model_wide:
                bucket, size = every_gradient, 4 * sum(map(math.prod, every_gradient))
                payload = volume.payload_bytes(candidate, every_gradient)
            name = collective(candidate, bucket).name
            prediction = model.predict(candidate, size, name, payload=payload)
            # The burst is not subtracted: a link grants it only once in a step.
            transfer = prediction.wire + prediction.burst - prediction.latency
            # Not part of the wire: the link inside a host does not change with the one between hosts.
            encode = prediction.encode + prediction.inside
            rows.append((encode, prediction.latency, transfer, prediction.decode))
    table = np.array(rows, np.float32).reshape(len(nbytes), len(auto.candidates), 4)
    return policy.Costs(*np.moveaxis(table, 2, 0))
