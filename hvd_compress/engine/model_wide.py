"""All buckets of `auto` at once, with a candidate that sees gradients in their own shapes.

The residuals are those of the buckets: chunks are joined to tensors before and cut into chunks after, so that nothing
is lost when the choice changes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from ..common.names import plain_name
from ..exchange.local_input import LocalInput
from ..monitor import recorder
from . import clock
from .clock import Stamps
from .context import Context
from .model_wide_state import ModelWide
from .pipeline import stamps_of


class ModelWideResult(NamedTuple):
    """All buckets of `auto` after their exchange."""

    tensors: dict[int, tf.Tensor]  # reduced gradients, by position
    ok: tf.Tensor  # bool scalar, whether all of them were finite on all ranks
    changes: list[tuple[tf.Variable, tf.Tensor]]  # what is kept of the step
    stamps: list[Stamps]  # of each bucket; the whole exchange is the last one's
    norms: list[Any]  # of each bucket; tensors while somebody watches
    lost: tf.Tensor  # [2], energies of new residuals and of gradients + residuals; zeros where not measured


def cross(
    context: Context, gradients: Sequence[Any], candidate: int, after: Sequence[tf.Tensor], measure: tf.Tensor
) -> ModelWideResult:
    """Exchanges all buckets of `auto`.

    Args:
        context: The step.
        gradients: All of the plan.
        candidate: With which of `auto`'s, one that is `whole`.
        after: What must be there before.
        measure: Whether to measure what is lost, a bool scalar.
    """
    plan = context.plan
    settings, whole = plan.settings, plan.model_wide
    assert plan.selector is not None and whole is not None
    compressor = plan.selector.auto.candidates[candidate]
    last = [_last_gradient(context, gradients, b) for b in plan.chosen]
    ready = [clock.stamp([gradient]) for gradient in last[:-1]]
    with tf.control_dependencies(after):
        begun = clock.stamp(last[-1:])

    members = whole.layout.tensors.members
    everything = range(len(members))
    with tf.control_dependencies([*after, begun]):
        chunks = whole.layout.cut([gradients[i] for i in members], everything)
    if settings.gradient_predivide_factor != 1.0:
        chunks = [chunk / settings.gradient_predivide_factor for chunk in chunks]
    keep = settings.feeds_back(compressor)
    residuals = _residuals(whole) if keep else [None] * len(members)
    seeds, start = context.seeds(plan.chosen[-1]), whole.factors[candidate]
    share = LocalInput(chunks, residuals, settings.residual_decay, keep, seeds, start.value())
    group = context.group(f"whole_{plain_name(compressor.spec)}")
    found = plan.pattern(compressor, share.shapes).reduce(compressor, share, settings.scale, group)

    changes = [(start, found.factors)]
    kept: list[list[tf.Tensor]] = []  # of each param_group
    for param_group, left in zip(whole.param_groups, whole.split(found.residuals)) if keep else ():
        variables = param_group.state.residuals
        kept.append(param_group.layout.cut(left, range(len(variables))))
        changes += [(variable, tf.cast(new, variable.dtype)) for variable, new in zip(variables, kept[-1])]
    with tf.device("CPU"):  # every rank has some of all chunks
        changes += [
            (plan.has_foreign_residual[b], tf.constant(keep))
            for b in plan.chosen
            if b in plan.has_foreign_residual
        ]

    tensors = whole.layout.join(found.chunks, [plan.dtypes[i] for i in members])
    stamps = [Stamps(*[time] * len(Stamps._fields)) for time in ready]
    stamps.append(Stamps(begun, *stamps_of(found)))
    lost = tf.zeros([2])
    if keep:
        lost = tf.cond(measure, lambda: _energies(share, found.residuals), lambda: tf.zeros([2]))
    return ModelWideResult(
        dict(zip(members, tensors)), found.ok, changes, stamps, _norms(context, whole, share, kept), lost
    )


def _last_gradient(context: Context, gradients: Sequence[Any], b: int) -> tf.Tensor:
    """That of a bucket which is there last."""
    param_group, chunks = context.plan.buckets[b]
    return gradients[param_group.layout.tensors.members[param_group.layout.reaching_into(chunks)[-1]]]


def _residuals(whole: ModelWide) -> list[tf.Tensor]:
    """In the gradients' shapes, in the order of the layout."""
    found: list[tf.Tensor] = []
    for param_group in whole.param_groups:
        dtypes = [param_group.state.residuals[0].dtype] * len(param_group.layout.tensors.members)
        found += param_group.layout.join(
            [variable.value() for variable in param_group.state.residuals], dtypes
        )
    return found


def _energies(share: LocalInput, left: Sequence[Any]) -> tf.Tensor:
    brought = [share.sum(i) for i in range(len(share.chunks))]
    return tf.square(tf.stack([recorder.norm_of(left), recorder.norm_of(brought)]))


def _norms(
    context: Context, whole: ModelWide, share: LocalInput, kept: Sequence[Sequence[tf.Tensor]]
) -> list[Any]:
    """As `recorder.norms_of`, of each bucket; without a residual it is not known what was lost."""
    plan = context.plan
    if context.due is None:
        return [()] * len(plan.chosen)

    def take() -> tf.Tensor:
        brought = whole.split([share.sum(i) for i in range(len(share.chunks))])
        parts: dict[int, tuple[Any, ...]] = {}
        for s, (param_group, fresh, summed) in enumerate(
            zip(whole.param_groups, whole.split(share.chunks), brought)
        ):
            everything = range(len(param_group.layout.shapes))
            cut = [param_group.layout.cut(tensors, everything) for tensors in (fresh, summed)]
            parts[id(param_group)] = (*cut, kept[s] if kept else None)
        rows = []
        for param_group, chunks in (plan.buckets[b] for b in plan.chosen):
            fresh_ones, summed_ones, left = parts[id(param_group)]
            mine = slice(chunks.start, chunks.stop)
            lost, residual = [tf.constant(math.nan), tf.constant(0.0)]
            if left is not None:
                lost = residual = recorder.norm_of(left[mine])
            norms = recorder.norm_of(fresh_ones[mine]), recorder.norm_of(summed_ones[mine])
            rows.append([*norms, lost, residual])
        return tf.reshape(tf.stack([norm for row in rows for norm in row]), [len(rows), -1])

    unknown = [[math.nan] * len(recorder.NORMS)] * len(plan.chosen)
    return tf.unstack(tf.cond(context.due, take, lambda: tf.constant(unknown)))
