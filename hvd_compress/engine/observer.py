"""Who is told what a step measured.

An observer subclasses `Observer`. It is handed measurements at the end of a step and never touches the path of the
gradients: no collective is added for it, and none gets another name or place, so that ranks may differ in observers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from .clock import Timestamps


class BucketMeasurement(NamedTuple):
    """One bucket, or uncompressed gradients that were exchanged together."""

    timestamps: Timestamps
    norms: Any  # float32 [4], see `norms.NORMS`; () where no observer samples norms
    choice: (
        tf.Tensor | None
    )  # the position of its compressor among the candidates; None where nobody records steps


class StepMeasurement(NamedTuple):
    """One step, on this rank."""

    step: tf.Tensor  # int64 scalar, the number of steps before it
    committed: (
        tf.Tensor
    )  # bool scalar, whether all gradients of all ranks were finite, and residuals were kept
    ready: tf.Tensor | None  # float64, when the last gradient was there; None where nobody records steps
    buckets: list[BucketMeasurement | None]  # in the order of the plan; None where no observer wants times
    others: list[
        BucketMeasurement
    ]  # uncompressed gradients, then embeddings; empty where nobody records steps
    embedding_bytes: tf.Tensor  # float64 [embeddings, 2], sent by this rank, and sent by stock Horovod
    agreed: tf.Tensor | None  # `ModelSelector.numbers`, reduced over the ranks
    model_wide_loss: (
        Any  # float32 [2], energies of new residuals and of gradient + residual; () where not possible
    )
    probe: Any  # the result of `ModelSelector.probe`


class Observer:
    """Is handed what steps measure.

    Methods to override:

    - `wants_times(bucket)`: whether time stamps are taken for a bucket.
    - `sample_norms()`: whether norms are taken in this step; they read gradients and residuals once more.
    - `records_steps`: whether uncompressed gradients, choices and the time of the last gradient are measured, too.
    - `observe(measurement)`: adds operations to the end of the step's graph.
    """

    records_steps: bool = False

    def wants_times(self, bucket: int) -> bool:
        """Whether this observer needs the timestamps of the bucket of this index."""
        return False

    def sample_norms(self) -> tf.Tensor | None:
        """A bool scalar; None for never."""
        return None

    def observe(self, measurement: StepMeasurement) -> None:
        """Takes in one step."""
