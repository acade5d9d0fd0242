"""Observers: they get the measurements of each step.

An observer subclasses `Observer`. It adds no collective, and changes no collective's name or order. So ranks may have
different observers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from .clock import Timestamps


class BucketMeasurement(NamedTuple):
    """The measurements of one bucket, embedding, or group of uncompressed gradients.

    Attributes:
        timestamps: The times of its phases.
        norms: See `norms.NORMS`, float32 [4]; () if no observer samples norms.
        choice: The position of its compressor among the candidates, a scalar; None if no observer records steps.
    """

    timestamps: Timestamps
    norms: Any
    choice: tf.Tensor | None


class StepMeasurement(NamedTuple):
    """The measurements of one step on this rank.

    Attributes:
        step: The number of steps before it, an int64 scalar.
        committed: Whether all gradients of all ranks were finite, so that the new state was assigned; a bool scalar.
        ready: The time when the last gradient was ready, a float64 scalar; None if no observer records steps.
        buckets: Each bucket of the plan; None if no observer wants its times.
        others: Uncompressed gradients, then embeddings; empty if no observer records steps.
        embedding_bytes: Bytes sent by this rank, and by stock Horovod, float64 [embeddings, 2].
        agreed: `ModelSelector.numbers`, reduced over the ranks; None without `auto`.
        model_wide_loss: Energies of new residuals and of gradient + residual, float32 [2]; () without model-wide
            candidates.
        probe: The result of `ModelSelector.probe`; None without `auto`.
    """

    step: tf.Tensor
    committed: tf.Tensor
    ready: tf.Tensor | None
    buckets: list[BucketMeasurement | None]
    others: list[BucketMeasurement]
    embedding_bytes: tf.Tensor
    agreed: tf.Tensor | None
    model_wide_loss: Any
    probe: Any


class Observer:
    """Gets the measurements of each step.

    Methods and attributes to override:

    - `wants_times(bucket)`: whether timestamps are taken for a bucket.
    - `sample_norms()`: whether norms are taken in this step; they read gradients and residuals once more.
    - `records_steps`: whether uncompressed gradients, choices and the time of the last gradient are measured, too.
    - `observe(measurement)`: adds operations to the end of the step's graph.
    """

    records_steps: bool = False

    def wants_times(self, bucket: int) -> bool:
        """Whether the observer needs the timestamps of the bucket with this index."""
        return False

    def sample_norms(self) -> tf.Tensor | None:
        """Whether norms are taken in this step, a bool scalar; None for never. The first observer's answer counts."""
        return None

    def observe(self, measurement: StepMeasurement) -> None:
        """Gets one step; called when the graph is traced."""
