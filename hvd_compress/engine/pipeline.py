"""One bucket of a step: residual added, compressed, exchanged, decoded."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from ..common.names import plain_name
from ..compressors import Compressor
from ..compressors import error_feedback as residual
from ..exchange.collective import Reduction
from ..exchange.local_input import LocalInput
from ..exchange.send_order import next_can_start
from ..monitor import recorder
from . import clock
from .clock import Stamps
from .context import Context
from .state import GroupState


class BucketInput(NamedTuple):
    """A bucket before its exchange."""

    number: int  # in the plan
    chunks: list[tf.Tensor]
    state: GroupState  # of these


class BucketResult(NamedTuple):
    """A bucket after its exchange."""

    chunks: list[tf.Tensor]  # reduced
    ok: tf.Tensor  # bool scalar, whether all of it was finite on all ranks
    kept: list[tf.Tensor]  # the new values of `Plan.changed_by`
    outgoing: tf.Tensor  # there when this rank has encoded the bucket
    early: tf.Tensor  # there when it may begin with the next one
    stamps: Stamps | None = None  # of `auto`, and while somebody watches
    norms: Any = ()  # a tensor while somebody watches


def cross(context: Context, bucket: BucketInput, begun: Sequence[tf.Tensor]) -> BucketResult:
    """Exchanges a bucket.

    Args:
        context: The step.
        bucket: What this rank brings.
        begun: When that was there; empty if nobody wants to know.
    """
    compressor = context.plan.buckets[bucket.number][0].compressor
    if compressor.automatic:
        return _choose(context, bucket, begun[0])
    if len(compressor.stages) > 1:
        return _cross_in_stage(context, bucket, compressor, begun)
    crossed, found = _exchange(context, bucket, compressor)
    stamps = stamps_of(found) if begun else ()
    return crossed._replace(early=_early(found, stamps), stamps=Stamps(*begun, *stamps) if begun else None)


def _choose(context: Context, bucket: BucketInput, begun: tf.Tensor) -> BucketResult:
    """The exchange with the compressor that is chosen for this bucket."""
    plan = context.plan
    assert plan.selector is not None

    def exchange(compressor: Compressor) -> Any:
        crossed, found = _exchange(context, bucket, compressor)
        stamps = stamps_of(found)
        return crossed.chunks, crossed.ok, crossed.kept, stamps, _early(found, stamps), crossed.norms

    chosen = plan.selector.switch(plan.chosen.index(bucket.number), exchange)
    found, ok, kept, stamps, early, norms = chosen
    return BucketResult(found, ok, kept, stamps[0], early, Stamps(begun, *stamps), norms)


def _cross_in_stage(
    context: Context, bucket: BucketInput, compressor: Compressor, begun: Sequence[tf.Tensor]
) -> BucketResult:
    """The exchange in that of the compressor's stages which holds now."""

    def exchange(stage: Compressor) -> Any:
        crossed, found = _exchange(context, bucket, stage)
        stamps = stamps_of(found) if begun else ()
        # What is sent has another shape in each stage.
        first = tf.cast(tf.reshape(crossed.outgoing, [-1])[0], tf.float32)
        return crossed.chunks, crossed.ok, crossed.kept, first, stamps, _early(found, stamps), crossed.norms

    branches = [functools.partial(exchange, stage) for stage in compressor.stages]
    chosen = tf.switch_case(context.plan.stage(compressor), branches)
    found, ok, kept, first, stamps, early, norms = chosen
    return BucketResult(found, ok, kept, first, early, Stamps(*begun, *stamps) if begun else None, norms)


def stamps_of(found: Reduction) -> tuple[tf.Tensor, ...]:
    """When what crossed was encoded, had arrived, and was decoded.

    What is encoded between two exchanges counts as if it had been before the first one.
    """
    last = sent = clock.stamp([found.outgoing])
    if found.second_exchange is not None:
        halfway = clock.stamp([found.second_exchange[0]], sent)
        last = clock.stamp([found.second_exchange[1]], halfway)
        with tf.device("CPU"):
            sent += last - halfway
    arrived = clock.stamp([found.incoming], last)
    return sent, arrived, clock.stamp(found.chunks, arrived)


def _early(found: Reduction, stamps: Sequence[tf.Tensor]) -> tf.Tensor:
    """When the next bucket may begin: not before the time is taken when this one is encoded, if that is."""
    if found.next_can_start is not None:
        return next_can_start(found.next_can_start)
    return next_can_start(stamps[0] if stamps and found.second_exchange is None else found.outgoing)


def _exchange(
    context: Context, bucket: BucketInput, compressor: Compressor
) -> tuple[BucketResult, Reduction]:
    """A bucket's exchange, and what it comes from."""
    plan, (number, chunks, state) = context.plan, bucket
    settings = plan.settings
    predivide = settings.gradient_predivide_factor
    if predivide != 1.0:
        chunks = [chunk / predivide for chunk in chunks]
    residuals: list[Any] = [variable.value() for variable in state.residuals] or [None] * len(chunks)
    decay = settings.residual_decay
    velocities: list[tf.Tensor] = []
    if state.velocities:
        velocities = [
            residual.accelerate(chunk, variable.value(), settings.momentum_correction)
            for chunk, variable in zip(chunks, state.velocities)
        ]
        # The sum itself is needed to see what was sent.
        chunks = [residual.add(v, r, decay) for v, r in zip(velocities, residuals)]
        residuals, decay = [None] * len(chunks), 1.0
    keep = bool(state.residuals) and settings.feeds_back(compressor)
    factors = plan.buckets[number][0].factors
    start = factors[0].value() if factors else None
    with tf.device("CPU"):
        has_foreign_residual = (
            plan.has_foreign_residual[number].value() if number in plan.has_foreign_residual else None
        )
    share = LocalInput(chunks, residuals, decay, keep, context.seeds(number), start, has_foreign_residual)
    group = context.group(f"bucket_{number}_{plain_name(compressor.spec)}")
    pattern = plan.pattern(compressor, share.shapes)
    found = pattern.reduce(compressor, share, settings.scale, group)
    # Where others may feed back but this one does not, what is left is sent, and nothing kept.
    left = found.residuals if keep else [tf.zeros_like(chunk) for chunk in chunks]
    kept = [tf.cast(new, variable.dtype) for variable, new in zip(state.residuals, left)]
    kept += [residual.mask(v, x - new) for v, x, new in zip(velocities, chunks, left)]
    kept += [found.factors] if factors else []
    if number in plan.has_foreign_residual:
        with tf.device("CPU"):
            kept.append(tf.constant(keep and found.has_foreign_residual))
    crossed = BucketResult(found.chunks, found.ok, kept, found.outgoing, found.outgoing)
    if context.due is not None:
        fresh = velocities or chunks
        norms = recorder.norms_of(context.due, compressor, fresh, share, left if keep else None)
        crossed = crossed._replace(norms=norms)
    return crossed, found
