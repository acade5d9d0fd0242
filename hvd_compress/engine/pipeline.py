"""The way of a bucket through a step. Every compressed exchange is a call of `reduce_bucket`.

The buckets of a model, all gradients at once (`model_wide`), an embedding's dense gradient (`embeddings`) and
`hvdc.allreduce` differ in their `BucketInput` only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from ..compressors import Compressor, Seeds
from ..exchange.collective import Collective, Reduction
from ..exchange.group import Group
from ..exchange.local_input import LocalInput
from ..exchange.send_order import next_can_start
from ..formats.base import Shape
from . import clock
from .clock import Timestamps
from .layout import Layout
from .packing import pack
from .selector import Selector
from .state import NO_STATE, BucketState
from .transforms import LocalChunks, Transform, value_of

# Measures a bucket, given its compressor, the gradients in chunks, what was encoded, and new residuals or None.
Measure = Callable[[Compressor, Sequence[tf.Tensor], LocalInput, Any], Any]


def no_measure(compressor: Compressor, gradients: Any, local: LocalInput, residuals: Any) -> tuple[()]:
    """Measures nothing."""
    return ()


@dataclasses.dataclass(frozen=True)
class StepContext:
    """What all exchanges of a step share.

    Attributes:
        scale: The sum over the ranks is multiplied by it.
        collective: The collective for tensors of these shapes, encoded by this compressor.
        transforms: What is done to gradients before they are encoded.
        residual_decay: Multiplies residuals.
        feeds_back: Whether this compressor's new residual is kept.
    """

    scale: float
    collective: Callable[[Compressor, Sequence[Shape]], Collective]
    transforms: Transform = dataclasses.field(default_factory=Transform)
    residual_decay: float = 1.0
    feeds_back: Callable[[Compressor], bool] = lambda compressor: True


class BucketInput(NamedTuple):
    """What one rank brings to the exchange of a bucket."""

    layout: Layout
    chunks: range  # of the layout
    selector: Selector
    seeds: Seeds
    group: Callable[[Compressor], Group]  # the ranks, and the names of the collectives
    state: BucketState = NO_STATE  # variables or tensors
    position: int = 0  # among the buckets of the plan
    timed: bool = False  # whether timestamps are taken
    measure: Measure = no_measure


class BucketResult(NamedTuple):
    """What comes of the exchange of a bucket."""

    chunks: list[tf.Tensor]  # reduced; the same on all ranks
    ok: tf.Tensor  # bool scalar: whether all gradients of all ranks were finite
    new_state: BucketState  # tensors, to be assigned once all buckets are known to be finite
    next_can_start: tf.Tensor  # there when the next bucket may be encoded
    timestamps: Any  # Timestamps; () where not timed
    measured: Any  # the result of `BucketInput.measure`


def reduce_bucket(
    bucket: BucketInput, gradients: Sequence[tf.Tensor], step: StepContext, after: Sequence[tf.Tensor] = ()
) -> BucketResult:
    """Reduces a bucket over the ranks, compressed on the way.

    1. Pack: the gradients become float32 chunks.
    2. Transform: predivide, momentum correction.
    3. Select: the selector's tensor says which compressor holds in this step. Steps 4 to 6 are traced once for each
       candidate, and return the same structure.
    4. Exchange: the collective encodes chunk + residual, sends payloads, decodes and sums those of all ranks.
    5. Update: what was not sent is the new residual; transforms take their state back.
    6. Measure: what observers want to know.

    Args:
        bucket: What this rank brings.
        gradients: Those of the layout's members, in their order.
        step: What all buckets share.
        after: Tensors that must be there before the bucket is packed.
    """
    # 1. Pack
    ready = []
    if bucket.timed:
        with tf.control_dependencies(after):
            ready = [clock.stamp([gradients[bucket.layout.reaching_into(bucket.chunks)[-1]]])]
    with tf.control_dependencies([*after, *ready]):
        chunks = pack(bucket.layout, gradients, bucket.chunks)

    # 2. Transform
    state = bucket.state
    residuals = state.residuals or [None] * len(chunks)
    local = step.transforms.apply(LocalChunks(chunks, residuals, step.residual_decay, state.velocities))

    def exchange(compressor: Compressor) -> BucketResult:
        # 4. Exchange
        keep = bool(state.residuals) and step.feeds_back(compressor)
        residuals = [value_of(residual) for residual in local.residuals]
        factors = value_of(state.factors[0]) if state.factors else None
        with tf.device("CPU"):
            foreign = value_of(state.has_foreign_residual[0]) if state.has_foreign_residual else None
        sent = LocalInput(local.chunks, residuals, local.decay, keep, bucket.seeds, factors, foreign)
        collective = step.collective(compressor, sent.shapes)
        reduction = collective.reduce(compressor, sent, step.scale, bucket.group(compressor))

        # 5. Update. Without error feedback for this compressor, the residual of another one was sent with the chunks.
        unsent = reduction.residuals if keep else []
        if not keep and (state.residuals or state.velocities):
            unsent = [tf.zeros_like(chunk) for chunk in local.chunks]
        with tf.device("CPU"):
            foreign_after = [] if foreign is None else [tf.constant(keep and reduction.has_foreign_residual)]
        new_state = BucketState(
            [new if old is None else tf.cast(new, old.dtype) for old, new in zip(state.residuals, unsent)],
            step.transforms.update(local, unsent) if state.velocities else [],
            [reduction.factors] if state.factors else [],
            foreign_after,
        )

        # 6. Measure
        times = clock.timestamps_of(reduction) if bucket.timed else ()
        gradients_in_chunks = local.velocities or local.chunks
        measured = bucket.measure(compressor, gradients_in_chunks, sent, unsent if keep else None)
        after_this = _next_can_start(reduction, times)
        return BucketResult(reduction.chunks, reduction.ok, new_state, after_this, times, measured)

    # 3. Select
    result = bucket.selector.switch(bucket.position, exchange)
    return result._replace(timestamps=Timestamps(*ready, *result.timestamps)) if bucket.timed else result


def _next_can_start(reduction: Reduction, times: Sequence[tf.Tensor]) -> tf.Tensor:
    """There when the next bucket may be encoded: when this one was, and its time was taken."""
    if reduction.next_can_start is not None:
        return next_can_start(reduction.next_can_start)
    return next_can_start(times[0] if times and reduction.second_exchange is None else reduction.outgoing)
