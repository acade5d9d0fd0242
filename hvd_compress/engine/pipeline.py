"""The way of a gradient through a training step. Read this file first.

1. The optimizer or the tape (`frontends`) hands a list of gradients to its `reducer.Reducer`.
2. The reducer keeps a `plan.Plan` for each list. `frontends.build` makes it in the first step: it divides the gradients
   into buckets (`model_layout`) and makes the variables (`state`).
3. `step.Step` is the graph of one step. Uncompressed gradients go to Horovod's own allreduce, IndexedSlices are reduced
   row by row (`embeddings`), and all others in buckets: `reduce_bucket`, below, reduces one bucket over the ranks.
4. `Step` unpacks the reduced buckets to gradients. It assigns the new state if all gradients of all ranks were finite,
   and hands what was measured to the observers (`observer`).

Every compressed exchange of dense gradients is a call of `reduce_bucket`. The callers differ only in the `BucketInput`:
buckets (`step`), all gradients at once (`model_wide`), an embedding's dense gradient (`embeddings`), `hvdc.allreduce`.

The folders of the package are in the order of their imports; a step begins in one of the last, `frontends`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from ..compressors import Compressor, Seeds
from ..exchange.collective import Collective, Reduction
from ..exchange.group import Group
from ..exchange.local_input import LocalInput
from ..exchange.send_order import next_can_start
from ..exchange.transfers import concat
from ..formats.base import Shape
from ..kernels import native
from . import clock, delay, packing
from .layout import FlatLayout, Layout
from .selector import FixedSelector, Selector
from .state import NO_STATE, BucketState
from .transforms import LocalChunks, Transform, value_of

# Arguments: the compressor, the gradients in pieces, what was encoded, and the new residuals or None.
Measure = Callable[[Compressor, Sequence[tf.Tensor], LocalInput, Any], Any]


def no_measure(compressor: Compressor, gradients: Any, local: LocalInput, residuals: Any) -> tuple[()]:
    """Measures nothing."""
    return ()


class StepContext(NamedTuple):
    """What all exchanges of a step share."""

    scale: float  # the factor of the sum over the ranks
    collective: Callable[[Compressor, Sequence[Shape]], Collective]  # for a compressor and the shapes of chunks
    transforms: Transform = Transform()  # change the chunks before they are encoded
    residual_decay: float = 1.0  # the factor of residuals
    feeds_back: Callable[[Compressor], bool] = lambda compressor: True  # whether the compressor's residuals are kept
    data: Sequence[tf.Tensor] = ()  # of the step: what waits is not sent in a step that has none
    is_warm_up: tf.Tensor | None = None  # whether the delay has not begun yet, a bool scalar; None for never


class BucketInput(NamedTuple):
    """One bucket on one rank."""

    layout: Layout  # of the parameter group
    chunks: range  # those of the layout that form this bucket
    selector: Selector
    seeds: Seeds
    group: Callable[[Compressor], Group]  # the ranks, and the names of the collectives
    state: BucketState = NO_STATE  # variables or tensors
    position: int = 0  # the bucket's index in the plan
    timed: bool = False  # whether timestamps are taken
    measure: Measure = no_measure


class BucketResult(NamedTuple):
    """One bucket after its exchange."""

    chunks: list[tf.Tensor]  # reduced; the same on all ranks; see `Reduction.chunks`
    ok: tf.Tensor  # bool scalar: whether all gradients of all ranks were finite; with a delay, of this rank
    new_state: BucketState  # tensors; `Step` assigns them if all buckets are finite (`waiting` in any case)
    next_can_start: tf.Tensor  # ready when the next bucket may be encoded
    timestamps: Any  # Timestamps; () where not timed
    measured: Any  # the result of `BucketInput.measure`


def reduce_bucket(
    bucket: BucketInput, gradients: Sequence[tf.Tensor], context: StepContext, after: Sequence[tf.Tensor] = ()
) -> BucketResult:
    """Reduces a bucket over the ranks, with compression.

    1. Pack (`packing`): the gradients become float32 chunks.
    2. Transform (`transforms`): predivide, momentum correction.
    3. Select (`selector`): a tensor says which compressor is used in this step. Steps 4 to 6 are traced once for each
       traced candidate and return the same structure.
    4. Exchange (`compressors`, `exchange`): the collective encodes chunk + residual, sends the payloads, and sums the
       decoded payloads of all ranks. With a delay (`delay`), the payloads are those that the step before encoded.
    5. Update (`state`): what was not sent is the new residual. Transforms return their new velocities.
    6. Measure (`clock`, `norms`): timestamps and norms for observers.

    Args:
        bucket: The bucket.
        gradients: The gradients of the layout's members, in the same order.
        context: What all buckets share.
        after: Tensors that must be ready before the bucket is packed.
    """
    # 1. Pack
    ready = []
    if bucket.timed:
        with tf.control_dependencies(after):
            ready = [clock.stamp([gradients[bucket.layout.reaching_into(bucket.chunks)[-1]]])]
    with tf.control_dependencies([*after, *clock.waited_for(ready)]):
        pieces = packing.pieces(bucket.layout, gradients, bucket.chunks)
        chunks = [concat(of_chunk) for of_chunk in pieces]  # pruned from the graph where the pieces are read

    # 2. Transform. Momentum correction adds the residual already here.
    state = bucket.state
    old_residuals = state.residuals or [None] * len(chunks)
    local = context.transforms.apply(LocalChunks(chunks, old_residuals, context.residual_decay, state.velocities))
    is_native, is_flat = native.kind() == "native", isinstance(bucket.layout, FlatLayout)
    if local.chunks is not chunks or not is_native:
        pieces = [[chunk] for chunk in local.chunks]

    # 3. Select: the selector calls `exchange` once for each candidate.
    def exchange(compressor: Compressor) -> BucketResult:
        # 4. Exchange. Residuals are foreign if another worker of the host sends these chunks (`exchange.hierarchical`).
        keep = bool(state.residuals) and context.feeds_back(compressor)
        residuals = [value_of(residual) for residual in local.residuals]
        factors = value_of(state.factors[0]) if state.factors else None
        with tf.device("CPU"):
            foreign = value_of(state.has_foreign_residual[0]) if state.has_foreign_residual else None
        sent = LocalInput(pieces, residuals, local.decay, keep, bucket.seeds, factors, foreign, joined=is_flat)
        collective = context.collective(compressor, sent.shapes)
        group, new_waiting = bucket.group(compressor), list[tf.Tensor]()
        if state.waiting:
            with tf.control_dependencies(context.data):
                waits = [value_of(tensor) for tensor in state.waiting]
            reduction, new_waiting = delay.reduce(
                collective, compressor, sent, waits, context.is_warm_up, context.scale, group
            )
        else:
            reduction = collective.reduce(compressor, sent, context.scale, group)

        # 5. Update. A compressor without error feedback sends the residuals that another one left, and leaves none.
        new_residuals = reduction.residuals if keep else []
        if not keep and (state.residuals or state.velocities):
            new_residuals = [tf.zeros_like(chunk) for chunk in local.chunks]
        with tf.device("CPU"):
            foreign_after = [] if foreign is None else [tf.constant(keep and reduction.has_foreign_residual)]
        new_state = BucketState(
            [new if old is None else tf.cast(new, old.dtype) for old, new in zip(state.residuals, new_residuals)],
            context.transforms.update(local, new_residuals) if state.velocities else [],
            [factors if reduction.factors is None else reduction.factors] if state.factors else [],
            foreign_after,
            new_waiting,
        )

        # 6. Measure
        times = clock.timestamps_of(reduction, *ready) if bucket.timed else ()
        gradient_pieces = local.velocities or [piece for of_chunk in pieces for piece in of_chunk]
        measured = bucket.measure(compressor, gradient_pieces, sent, new_residuals if keep else None)
        start_signal = _start_signal(reduction, times)
        reduced = reduction.chunks
        if is_flat and len(reduced) == sent.num_chunks:
            for chunk, shape in zip(reduced, sent.shapes):
                if not chunk.shape.is_fully_defined():  # what a user's `decompress` returns may not say its shape
                    chunk.set_shape(shape)
        if is_native and is_flat and not isinstance(bucket.selector, FixedSelector):
            reduced = [concat(reduced)]  # the same structure with all candidates
        return BucketResult(reduced, reduction.ok, new_state, start_signal, times, measured)

    result = bucket.selector.switch(bucket.position, exchange)
    return result._replace(timestamps=clock.Timestamps(*ready, *result.timestamps)) if bucket.timed else result


def _start_signal(reduction: Reduction, times: Sequence[tf.Tensor]) -> tf.Tensor:
    """Ready when this bucket is encoded, and its timestamp taken: then the next one may be encoded."""
    times = clock.waited_for(times)
    if tf.executing_eagerly():
        return reduction.outgoing  # operations run one after the other
    if reduction.next_can_start is not None:
        return next_can_start(reduction.next_can_start)
    return next_can_start(times[0] if times and reduction.second_exchange is None else reduction.outgoing)
