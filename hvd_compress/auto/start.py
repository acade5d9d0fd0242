"""How `auto` begins: what the link and the kernels cost, and what noise would lose."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence

import numpy as np

from ..compressors import Auto, Compressor
from ..cost import Calibration
from ..cost.calibrate import calibrate
from ..engine import agreement
from ..engine.grouping import Shape
from ..engine.settings import Settings
from ..exchange import volume
from ..exchange.collective import Collective
from . import policy
from .selector import AutoSelector


def selector(
    auto: Auto,
    settings: Settings,
    shapes: Sequence[Sequence[Shape]],
    whole: Sequence[Shape],
    found: Calibration,
    pattern: Callable[[Compressor, Sequence[Shape]], Collective],
) -> AutoSelector:
    """A selector for buckets of chunks of these shapes, which cross in these patterns. A collective call.

    Args:
        auto: The settings.
        settings: How gradients are reduced.
        shapes: Of each bucket's chunks.
        whole: Of all gradients in them.
        found: What the link and the kernels cost.
        pattern: In which chunks, or gradients, of such shapes cross.
    """
    nbytes = [4 * sum(shape[0] for shape in bucket) for bucket in shapes]
    costs = _costs(auto, found, shapes, whole, nbytes, pattern)
    lost = [
        candidate.noise_loss(whole if is_whole else shapes[0])
        for candidate, is_whole in zip(auto.candidates, auto.model_wide_candidates)
    ]
    return AutoSelector(auto, settings.process_set, settings.op, nbytes, costs, lost)


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
    whole: Sequence[Shape],
    nbytes: Sequence[int],
    pattern_of: Callable[[Compressor, Sequence[Shape]], Collective],
) -> policy.Costs:
    """Predictions for each bucket and candidate, [B, C]."""
    model = calibration.model()
    rows = []
    for b, (bucket, size) in enumerate(zip(shapes, nbytes)):
        for candidate, is_whole in zip(auto.candidates, auto.model_wide_candidates):
            if is_whole and b < len(shapes) - 1:  # with the last one, see `all_at_once`
                rows.append((0.0, 0.0, 0.0, 0.0))
                continue
            payload = None
            if is_whole:
                bucket, size = whole, 4 * sum(map(math.prod, whole))
                payload = volume.payload_bytes(candidate, whole)
            found = model.predict(candidate, size, pattern_of(candidate, bucket).name, payload=payload)
            # Without the burst, which passes but once in a step.
            transfer = found.wire + found.burst - found.latency
            # The link inside of a host does not change with the one between hosts.
            rows.append((found.encode + found.inside, found.latency, transfer, found.decode))
    table = np.array(rows, np.float32).reshape(len(nbytes), len(auto.candidates), 4)
    return policy.Costs(*np.moveaxis(table, 2, 0))
