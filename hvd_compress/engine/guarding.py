"""How a guard acts on plans: which compressors are milder, and the change to them. All ranks call these together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import tensorflow as tf

from ..compressors import Compressor, NoCompression
from .guard import GradientSum, Guard, GuardedSelector, GuardEvent
from .norms import norm_of
from .plan import Plan
from .reducer import Reducer

AS_CONFIGURED = "the compressors as configured"


def attach(plan: Plan, guard: Guard, is_new: bool = False) -> None:
    """Lets a guard watch a plan, and gives the plan the compressors of the guard's level.

    The plan's residuals begin again with zeros if its compressors change; a new plan keeps those of a checkpoint.

    Raises:
        ValueError: The plan applies momentum before compression, which milder compressors would lose; or it has a
            delay, and what waits is a payload of the compressor as configured.
    """
    if plan.settings.delay:
        raise ValueError(
            "CompressionGuard and delay=1 cannot go together: what waits was encoded by the configured compressor; "
            "leave the callback out, or use delay=0"
        )
    if plan.settings.momentum_correction:
        raise ValueError(
            "CompressionGuard: dgc and momentum_correction keep the momentum where gradients are compressed, so there "
            "is no milder compressor to change to: leave the callback out"
        )
    own = [selector.own if isinstance(selector, GuardedSelector) else selector for selector in plan.selectors]
    selectors = list(own)
    for b in _fixed_buckets(plan):
        milder = [_usable(plan, b, compressor) for compressor in guard.milder]
        selectors[b] = GuardedSelector(own[b], plan.layout.group_of(b).compressor.stages, milder, guard)
    before, plan.selectors, plan.guard = plan.guard, selectors, guard
    members = [i for group in plan.layout.param_groups for i in group.layout.tensors.members]
    plan.observers[:] = [observer for observer in plan.observers if not isinstance(observer, GradientSum)]
    factor = max(1.0, 1.0 / plan.settings.gradient_predivide_factor)
    plan.observers.append(GradientSum(members, factor, residual_norm(plan), plan.name))
    if is_new:
        _hold_auto(plan)
    elif guard.level or (before is not None and before.level):
        _apply(plan)


def next_level(reducer: Reducer, level: int) -> int | None:
    """The first level above `level` with which some bucket or embedding loses less than now; None if there is none."""
    guard = reducer.guard
    assert guard is not None
    levels = range(level + 1, len(guard.milder) + 1)
    return next((one for one in levels if any(_is_milder(plan, one) for plan in reducer.plans.values())), None)


def set_level(reducer: Reducer, level: int) -> None:
    """Changes all plans to a level, with residuals of zero; steps must be traced again afterwards."""
    assert reducer.guard is not None
    reducer.guard.level = level
    for plan in reducer.plans.values():
        _apply(plan)
    reducer.forget_functions()


def change_level(reducer: Reducer, level: int, reason: str) -> GuardEvent:
    """As `set_level`; also notes the change and its reason."""
    guard = reducer.guard
    assert guard is not None
    set_level(reducer, level)
    steps = max((int(plan.state.step) for plan in reducer.plans.values()), default=0)
    event = GuardEvent(steps, in_words(reducer.plans.values()) if level else AS_CONFIGURED, reason)
    guard.events.append(event)
    return event


def in_words(plans: Iterable[Plan]) -> str:
    """The spec strings of the compressors in use now."""
    specs = [compressor.spec for plan in plans for compressor in plan.compressors()]
    specs += [table.compressor.spec for plan in plans for table in plan.embeddings]
    return " and ".join(dict.fromkeys(specs)) or "none"


def residual_norm(plan: Plan) -> float:
    """The norm of this rank's residuals of dense gradients."""
    residuals = [residual for group in plan.state.groups for residual in group.residuals]
    with tf.init_scope():
        return float(norm_of(residuals))


def gradient_sum(plan: Plan) -> float:
    """The sum of the norms of this rank's gradients since `attach`."""
    return next(float(o.total) for o in plan.observers if isinstance(o, GradientSum))


def _fixed_buckets(plan: Plan) -> list[int]:
    return [b for b in range(len(plan.layout.buckets)) if b not in plan.layout.auto_buckets]


def _usable(plan: Plan, b: int, compressor: Compressor) -> Compressor:
    """The compressor, or none where it would send more than none, or needs other chunks than the bucket has."""
    own, shapes, ranks = plan.layout.group_of(b).compressor, plan.layout.shapes_of(b), plan.settings.process_set.size()
    nothing = NoCompression()
    if compressor.uncompressed or own.per_tensor or compressor.per_tensor or compressor.model_wide:
        return nothing
    sent = [plan.collective(c, shapes).bytes_sent(c, shapes, ranks) for c in (compressor, nothing)]
    return compressor if sent[0] < sent[1] else nothing


def _of_auto(plan: Plan, compressor: Compressor) -> int:
    """The position of the candidate of `auto` that takes the place of `compressor`: itself, or the mildest one."""
    candidates = list(plan.layout.auto.candidates)
    if compressor in candidates:
        return candidates.index(compressor)
    losses = [_loss(candidate, plan, plan.layout.auto_buckets[-1]) for candidate in candidates]
    return losses.index(min(losses))


def _is_milder(plan: Plan, level: int) -> bool:
    assert plan.guard is not None
    compressor, now = plan.guard.milder[level - 1], plan.compressors()
    then: dict[int, Compressor] = {}
    for b in _fixed_buckets(plan):
        selector = plan.selectors[b]
        assert isinstance(selector, GuardedSelector)
        then[b] = selector.milder[level - 1]
    if plan.auto is not None:
        candidate = plan.layout.auto.candidates[_of_auto(plan, compressor)]
        then |= dict.fromkeys(plan.layout.auto_buckets, candidate)
    rows = compressor.uncompressed and any(not table.compressor.uncompressed for table in plan.embeddings)
    pairs = dict.fromkeys((now[b].spec, milder.spec, b) for b, milder in then.items() if now[b] != milder)
    return rows or any(_loss(now[b], plan, b) > _loss(then[b], plan, b) for _, _, b in pairs)


def _loss(compressor: Compressor, plan: Plan, b: int) -> float:
    """The share of the energy of white noise that it loses, at most all; all if that is no number."""
    shapes: Sequence[tuple[int, ...]] = plan.shapes_of(b, compressor) or plan.layout.shapes_of(b)
    loss = compressor.noise_loss(shapes)
    return loss if math.isfinite(loss) else math.inf


def _apply(plan: Plan) -> None:
    """Sets what is kept from step to step to that of a first step, at the guard's level."""
    _hold_auto(plan)
    with tf.init_scope():  # a plan may be made while a step is traced
        for group in (*plan.state.groups, *plan.state.embeddings):
            for residual in group.residuals:
                residual.assign(tf.zeros_like(residual))
        for observer in plan.observers:
            if isinstance(observer, GradientSum):
                observer.total.assign(0.0)


def _hold_auto(plan: Plan) -> None:
    guard = plan.guard
    assert guard is not None
    if plan.auto is not None:
        with tf.init_scope():
            held = _of_auto(plan, guard.milder[guard.level - 1]) if guard.level else None
            plan.auto.hold(held)
