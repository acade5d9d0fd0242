"""Observers: they get the measurements of each step.

An observer adds no collective, and changes no collective's name or order. So ranks may have different observers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from .clock import Timestamps


class BucketMeasurement(NamedTuple):
    """The measurements of one bucket, embedding, or group of uncompressed gradients."""

    timestamps: Timestamps
    norms: Any  # see `norms.NORMS`, float32 [4]; () if no observer samples norms
    # The position of its compressor among the candidates, a scalar; None if no observer records steps.
    choice: tf.Tensor | None


class StepMeasurement(NamedTuple):
    """The measurements of one step on this rank."""

    step: tf.Tensor  # the number of steps before it, an int64 scalar
    committed: tf.Tensor  # bool scalar: whether all gradients of all ranks were finite, and the new state was assigned
    ready: tf.Tensor | None  # when the last gradient was ready, a float64 scalar; None if no observer records steps
    buckets: list[BucketMeasurement | None]  # of the plan; None if no observer wants a bucket's times
    others: list[BucketMeasurement]  # uncompressed gradients, then embeddings; empty if no observer records steps
    embedding_bytes: tf.Tensor  # sent by this rank, and by stock Horovod, float64 [embeddings, 2]
    agreed: tf.Tensor | None  # the numbers of `auto`, see `engine.selector`, reduced over the ranks; None without it
    probe: Any  # the result of `ModelSelector.probe`; None without `auto`
    gradients: Sequence[Any]  # of this rank, before transforms: tensors, IndexedSlices or None


class Observer:
    """Gets the measurements of each step.

    Subclasses override any of `records_steps`, `wants_times`, `sample_norms` and `observe`.
    """

    records_steps: bool = False  # whether uncompressed gradients, choices and `ready` are measured, too

    def wants_times(self, bucket: int) -> bool:
        """Whether timestamps are taken for the bucket with this index."""
        return False

    def sample_norms(self) -> tf.Tensor | None:
        """Whether norms are taken in this step, a bool scalar; None for never. The first observer's answer counts.

        Norms read gradients and residuals once more.
        """
        return None

    def observe(self, measurement: StepMeasurement) -> None:
        """Adds operations to the end of the step's graph, when it is traced."""
