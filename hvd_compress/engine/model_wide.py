"""All buckets of `auto` at once, with a candidate that sees gradients in their own shapes.

The residuals are those of the buckets: pieces are joined to tensors before and cut into pieces after, so that nothing
is lost when the choice changes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from ..common.names import plain_name
from ..exchange.common import Share
from ..monitor import recorder
from . import clock
from .clock import Stamps
from .context import Context
from .model_wide_state import WholeModel
from .pipeline import stamps_of


class CrossedWhole(NamedTuple):
    """All buckets of `auto` after their exchange."""

    tensors: dict[int, tf.Tensor]  # reduced gradients, by position
    ok: tf.Tensor  # bool scalar, whether all of them were finite on all ranks
    changes: list[tuple[tf.Variable, tf.Tensor]]  # what is kept of the step
    stamps: list[Stamps]  # of each bucket; the whole exchange is the last one's
    norms: list[Any]  # of each bucket; tensors while somebody watches
    lost: tf.Tensor  # [2], energies of new residuals and of gradients + residuals; zeros where not measured


def cross(
    context: Context, gradients: Sequence[Any], candidate: int, after: Sequence[tf.Tensor], measure: tf.Tensor
) -> CrossedWhole:
    """Exchanges all buckets of `auto`.

    Args:
        context: The step.
        gradients: All of the plan.
        candidate: With which of `auto`'s, one that is `whole`.
        after: What must be there before.
        measure: Whether to measure what is lost, a bool scalar.
    """
    plan = context.plan
    settings, whole = plan.settings, plan.whole
    assert plan.chooser is not None and whole is not None
    compressor = plan.chooser.auto.candidates[candidate]
    last = [_last_gradient(context, gradients, b) for b in plan.chosen]
    ready = [clock.stamp([gradient]) for gradient in last[:-1]]
    with tf.control_dependencies(after):
        begun = clock.stamp(last[-1:])

    members = whole.layout.bucket.members
    everything = range(len(members))
    with tf.control_dependencies([*after, begun]):
        pieces = whole.layout.cut([gradients[i] for i in members], everything)
    if settings.gradient_predivide_factor != 1.0:
        pieces = [piece / settings.gradient_predivide_factor for piece in pieces]
    keep = settings.feeds_back(compressor)
    residuals = _residuals(whole) if keep else [None] * len(members)
    seeds, start = context.seeds(plan.chosen[-1]), whole.factors[candidate]
    share = Share(pieces, residuals, settings.residual_decay, keep, seeds, start.value())
    group = context.group(f"whole_{plain_name(compressor.spec)}")
    found = plan.pattern(compressor, share.shapes).reduce(compressor, share, settings.scale, group)

    changes = [(start, found.factors)]
    kept: list[list[tf.Tensor]] = []  # of each section
    for section, left in zip(whole.sections, whole.split(found.residuals)) if keep else ():
        variables = section.state.residuals
        kept.append(section.layout.cut(left, range(len(variables))))
        changes += [(variable, tf.cast(new, variable.dtype)) for variable, new in zip(variables, kept[-1])]
    with tf.device("CPU"):  # every rank has some of all pieces
        changes += [(plan.astray[b], tf.constant(keep)) for b in plan.chosen if b in plan.astray]

    tensors = whole.layout.join(found.pieces, [plan.dtypes[i] for i in members])
    stamps = [Stamps(*[time] * len(Stamps._fields)) for time in ready]
    stamps.append(Stamps(begun, *stamps_of(found)))
    lost = tf.zeros([2])
    if keep:
        lost = tf.cond(measure, lambda: _energies(share, found.residuals), lambda: tf.zeros([2]))
    return CrossedWhole(
        dict(zip(members, tensors)), found.ok, changes, stamps, _norms(context, whole, share, kept), lost
    )


def _last_gradient(context: Context, gradients: Sequence[Any], b: int) -> tf.Tensor:
    """That of a bucket which is there last."""
    section, pieces = context.plan.buckets[b]
    return gradients[section.layout.bucket.members[section.layout.reaching_into(pieces)[-1]]]


def _residuals(whole: WholeModel) -> list[tf.Tensor]:
    """In the gradients' shapes, in the order of the layout."""
    found: list[tf.Tensor] = []
    for section in whole.sections:
        dtypes = [section.state.residuals[0].dtype] * len(section.layout.bucket.members)
        found += section.layout.join([variable.value() for variable in section.state.residuals], dtypes)
    return found


def _energies(share: Share, left: Sequence[Any]) -> tf.Tensor:
    brought = [share.sum(i) for i in range(len(share.pieces))]
    return tf.square(tf.stack([recorder.norm_of(left), recorder.norm_of(brought)]))


def _norms(
    context: Context, whole: WholeModel, share: Share, kept: Sequence[Sequence[tf.Tensor]]
) -> list[Any]:
    """As `recorder.norms_of`, of each bucket; without a residual it is not known what was lost."""
    plan = context.plan
    if context.due is None:
        return [()] * len(plan.chosen)

    def take() -> tf.Tensor:
        brought = whole.split([share.sum(i) for i in range(len(share.pieces))])
        parts: dict[int, tuple[Any, ...]] = {}
        for s, (section, fresh, summed) in enumerate(zip(whole.sections, whole.split(share.pieces), brought)):
            everything = range(len(section.layout.shapes))
            cut = [section.layout.cut(tensors, everything) for tensors in (fresh, summed)]
            parts[id(section)] = (*cut, kept[s] if kept else None)
        rows = []
        for section, pieces in (plan.buckets[b] for b in plan.chosen):
            fresh_ones, summed_ones, left = parts[id(section)]
            mine = slice(pieces.start, pieces.stop)
            lost, residual = [tf.constant(math.nan), tf.constant(0.0)]
            if left is not None:
                lost = residual = recorder.norm_of(left[mine])
            norms = recorder.norm_of(fresh_ones[mine]), recorder.norm_of(summed_ones[mine])
            rows.append([*norms, lost, residual])
        return tf.reshape(tf.stack([norm for row in rows for norm in row]), [len(rows), -1])

    unknown = [[math.nan] * len(recorder.NORMS)] * len(plan.chosen)
    return tf.unstack(tf.cond(context.due, take, lambda: tf.constant(unknown)))
