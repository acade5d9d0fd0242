"""All buckets of `auto` in one exchange, with a candidate that needs the gradients in their own shapes (`powersgd`).

The residuals are those of the buckets: they are unpacked to the gradients' shapes before the exchange, and packed again
after it. So nothing is lost when the choice changes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from ..compressors import Compressor, Seeds
from ..exchange.group import Group
from ..exchange.local_input import LocalInput
from . import clock, norms
from .model_layout import ModelLayout
from .packing import pack, unpack
from .pipeline import BucketInput, StepContext, reduce_bucket
from .plan import Plan
from .selector import FixedSelector
from .state import NO_STATE, State


class ModelWideResult(NamedTuple):
    """All buckets of `auto` after one exchange."""

    gradients: dict[int, tf.Tensor]  # reduced, by position
    ok: tf.Tensor  # bool scalar, whether all of them were finite on all ranks
    changes: list[tuple[tf.Variable, tf.Tensor]]  # `Step` assigns them if all gradients are finite
    measured: list[tuple[Any, Any]]  # each bucket's timestamps and norms; the last bucket's times are the exchange's


def reduce_model(
    plan: Plan,
    gradients: Sequence[Any],
    candidate: int,
    step: StepContext,
    seeds: Seeds,
    group: Callable[[Compressor], Group],
    after: Sequence[tf.Tensor],
    sample_norms: tf.Tensor | None,
) -> ModelWideResult:
    """Reduces all gradients of `auto`.

    Args:
        plan: The plan.
        gradients: All gradients of the plan.
        candidate: The position of a model-wide candidate.
        step: What all exchanges share.
        seeds: For random choices.
        group: The ranks, and the names of the collectives.
        after: Tensors that must be ready before the gradients are packed.
        sample_norms: Whether norms are taken in this step, a bool scalar; None for never.
    """
    layout, state = plan.layout, plan.state
    compressor, whole = layout.auto.candidates[candidate], layout.model_wide
    ready = [clock.stamp([_last_gradient(layout, gradients, b)]) for b in layout.auto_buckets[:-1]]
    factors = state.model_wide_factors[candidate]
    keeps = step.feeds_back(compressor) and any(state.groups[g].residuals for g in layout.auto_groups)

    def measure(_: Compressor, chunks: Sequence[tf.Tensor], local: LocalInput, residuals: Any) -> Any:
        packed = {} if residuals is None else _packed(layout, residuals)
        return packed, _norms(layout, chunks, local, packed, sample_norms)

    bucket = BucketInput(
        whole,
        range(len(whole.shapes)),
        FixedSelector(compressor),
        seeds,
        group,
        NO_STATE._replace(residuals=_residuals(layout, state) if keeps else [], factors=[factors]),
        timed=True,
        measure=measure,
    )
    result = reduce_bucket(bucket, [gradients[i] for i in whole.tensors.members], step, after)
    new_residuals, of_buckets = result.measured

    changes = [(factors, result.new_state.factors[0])]
    for g, residuals in new_residuals.items():
        variables = state.groups[g].residuals
        changes += [(variable, tf.cast(new, variable.dtype)) for variable, new in zip(variables, residuals)]
    with tf.device("CPU"):  # each rank has residuals of all chunks
        foreign = [state.has_foreign_residual.get(b) for b in layout.auto_buckets]
        changes += [(variable, tf.constant(keeps)) for variable in foreign if variable is not None]
    reduced = unpack(whole, result.chunks, [layout.dtypes[i] for i in whole.tensors.members])
    timestamps = [*map(clock.all_at, ready), result.timestamps]
    gradients_by_position = dict(zip(whole.tensors.members, reduced))
    return ModelWideResult(gradients_by_position, result.ok, changes, list(zip(timestamps, of_buckets)))


def _last_gradient(layout: ModelLayout, gradients: Sequence[Any], b: int) -> tf.Tensor:
    """The last gradient of a bucket to be ready."""
    chunks, of_group = layout.buckets[b].chunks, layout.group_of(b).layout
    return gradients[of_group.tensors.members[of_group.reaching_into(chunks)[-1]]]


def _residuals(layout: ModelLayout, state: State) -> list[tf.Tensor]:
    """The residuals in the gradients' shapes, one parameter group after the other."""
    residuals: list[tf.Tensor] = []
    for g in layout.auto_groups:
        variables, of_group = state.groups[g].residuals, layout.param_groups[g].layout
        dtypes = [variables[0].dtype] * len(of_group.tensors.members)
        residuals += unpack(of_group, [variable.value() for variable in variables], dtypes)
    return residuals


def _packed(layout: ModelLayout, tensors: Sequence[tf.Tensor]) -> dict[int, list[tf.Tensor]]:
    """Tensors in the order of `ModelLayout.model_wide`, packed into the chunks of their parameter groups."""
    rest, packed = iter(tensors), dict[int, list[tf.Tensor]]()
    for g in layout.auto_groups:
        of_group = layout.param_groups[g].layout
        members = list(itertools.islice(rest, len(of_group.tensors.members)))
        packed[g] = pack(of_group, members, range(len(of_group.shapes)))
    return packed


def _norms(
    layout: ModelLayout,
    chunks: Sequence[tf.Tensor],
    local: LocalInput,
    residuals: dict[int, list[tf.Tensor]],
    sample: tf.Tensor | None,
) -> list[Any]:
    """The norms of each bucket, as in `norms.NORMS`; without error feedback the loss is NaN."""
    if sample is None:
        return [()] * len(layout.auto_buckets)

    def take() -> tf.Tensor:
        sums = _packed(layout, [local.sum(i) for i in range(local.num_chunks)])
        gradients, rows = _packed(layout, chunks), []
        for bucket in (layout.buckets[b] for b in layout.auto_buckets):
            within = slice(bucket.chunks.start, bucket.chunks.stop)
            lost, residual = tf.constant(math.nan), tf.constant(0.0)
            if residuals:
                lost = residual = norms.norm_of(residuals[bucket.group][within])
            both = [norms.norm_of(tensors[bucket.group][within]) for tensors in (gradients, sums)]
            rows.append([*both, lost, residual])
        return tf.reshape(tf.stack([norm for row in rows for norm in row]), [len(rows), -1])

    unknown = [[math.nan] * len(norms.NORMS)] * len(layout.auto_buckets)
    return tf.unstack(tf.cond(sample, take, lambda: tf.constant(unknown)))
