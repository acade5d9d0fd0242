"""What a step measures besides its buckets, for observers that record steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ..common.gradients import values_of
from ..exchange import uncompressed
from . import clock
from .clock import Timestamps
from .model_layout import ModelLayout
from .observer import BucketMeasurement


def all_ready(layout: ModelLayout, gradients: Sequence[Any]) -> tf.Tensor:
    """The time when the last gradients are ready, those of the first layers; float64 scalar."""
    groups = [*(group.layout.tensors for group in layout.param_groups), *layout.uncompressed]
    last = [*(tensors.members[-1] for tensors in groups), *layout.sparse]
    ready = [gradients[i] for i in dict.fromkeys(last)]
    return clock.stamp([values_of(g) for g in ready])


def of_uncompressed(
    dense: Sequence[uncompressed.Dense],
    own: Sequence[tf.IndexedSlices],
    reduced: Sequence[tf.IndexedSlices],
    norms: Sequence[Any],
) -> list[BucketMeasurement]:
    """The measurements of uncompressed gradients, then of embeddings.

    Args:
        dense: Uncompressed gradients after their exchange.
        own: This rank's IndexedSlices.
        reduced: The same after their exchange.
        norms: Of all of these, see `BucketMeasurement`.
    """
    pairs = [(result.outgoing, result.incoming) for result in dense]
    pairs += [([before.values], [after.values]) for before, after in zip(own, reduced)]
    measurements = []
    for (outgoing, incoming), norms_of_pair in zip(pairs, norms):
        ready = clock.stamp(outgoing)
        received = clock.stamp(incoming, ready)
        times = Timestamps(ready, ready, received, received)
        measurements.append(BucketMeasurement(times, norms_of_pair, tf.constant(0)))
    return measurements
