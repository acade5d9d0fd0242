"""What a choice of compressors costs, and which choice is best. Pure functions.

B buckets, C candidates; float32; times in seconds. The functions run on the host in each step and are not compiled
with XLA: they would not be faster, and the first step would take two seconds longer.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf
from tensorflow.experimental import numpy as tnp

from . import choices, trials
from . import model_wide as model_wide_rules
from .link_tracker import fit

# The weight of the newest value in running averages.
NEWEST_WEIGHT = 0.3

makespan = functools.partial(choices.makespan, tnp)
cost_of = functools.partial(choices.cost_of, tnp)


class Costs(NamedTuple):
    """Seconds that each bucket takes with each candidate, on the calibrated link and an idle machine; [B, C] each.

    The wire takes `messages + transfer`: `messages` does not depend on the number of bytes, and `transfer` does.
    """

    encode: tf.Tensor
    messages: tf.Tensor
    transfer: tf.Tensor
    decode: tf.Tensor


def running_max(x: tf.Tensor) -> tf.Tensor:
    """The cumulative maximum of x [B]."""
    (size,) = x.shape
    not_after = tf.linalg.band_part(tf.ones([size, size], tf.bool), -1, 0)
    return tf.reduce_max(tf.where(not_after, x, x.dtype.min), -1)


def predicted(costs: Costs, factors: tf.Tensor) -> tf.Tensor:
    """Seconds of each bucket's exchange with each candidate, [B, C]; `factors` [2] are those of `link_tracker.fit`."""
    return costs.encode + costs.messages * factors[0] + costs.transfer * factors[1] + costs.decode


def best(
    allowed: tf.Tensor,
    uncompressed: Sequence[bool],
    waits: tf.Tensor,
    seconds: tf.Tensor,
    lost: tf.Tensor,
    nbytes: tf.Tensor,
    max_slowdown: float,
    model_wide: Sequence[bool] = (),
) -> tf.Tensor:
    """The cheapest of the `choices.options`, int32 [B].

    `allowed`, bool [B, C], says which candidates may be chosen. `uncompressed`, bool [C], says which do not compress.
    `model_wide`, bool [C], says which are for all buckets or for none; it is empty if no candidate is. See
    `choices.cost_of` for the other arguments.
    """
    per_bucket = allowed & ~tf.constant(list(model_wide)) if any(model_wide) else allowed
    options = choices.options(tnp, per_bucket, uncompressed, seconds)
    if any(model_wide):
        uniform = tf.constant([[c] * allowed.shape[0] for c, is_wide in enumerate(model_wide) if is_wide])
        valid = tf.concat(
            [model_wide_rules.allowed(options, per_bucket), model_wide_rules.allowed(uniform, allowed)], 0
        )
        options = tf.concat([options, uniform], 0)
    costs = cost_of(options, waits, seconds, lost, nbytes, max_slowdown)
    if any(model_wide):
        costs = tf.where(valid, costs, costs.dtype.max)
    return tf.gather(options, tf.argmin(costs))


def admit(lost: tf.Tensor, current: tf.Tensor, target: tf.Tensor) -> tf.Tensor:
    """Which candidates may be chosen, bool [B, C].

    A candidate may be chosen if it lets at least the share `target` of the energy through. For the candidate in use,
    `current` [B], half of it is enough: its residual adds to the energy, and so lowers the share. The candidate that
    loses least may always be chosen. `lost` is as in `choices.cost_of`.
    """
    return reached(lost, current, target) | (lost <= tf.reduce_min(lost, -1, keepdims=True))


def reached(lost: tf.Tensor, current: tf.Tensor, target: tf.Tensor) -> tf.Tensor:
    """Which candidates reach the target, bool [B, C]; see `admit`."""
    in_use = tf.one_hot(current, lost.shape[1], on_value=True, off_value=False, dtype=tf.bool)
    through = 1.0 - lost
    return (through >= target) | (in_use & (through >= 0.5 * target))


def hesitate(
    gain: tf.Tensor, forced: tf.Tensor, evidence: tf.Tensor, reluctance: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Whether to switch to the best choice now. Noise alone should not switch to and fro.

    This is a cumulative sum test (Page 1954). The evidence is the sum of the logarithms of the predicted gains of
    successive steps. A switch needs an evidence of 0.3 times the reluctance: a gain of 35% in one step or of 10% in
    three steps in a row. Each switch doubles the reluctance, which returns to 1 over some hundred steps.

    Args:
        gain: Scalar, at least 1: the cost of the current choice divided by that of the best one.
        forced: bool, whether the current choice is not allowed any more.
        evidence: Scalar, 0 at first.
        reluctance: Scalar, 1 at first.

    Returns:
        Whether to switch, the new evidence, the new reluctance.
    """
    evidence = tf.where(gain > 1.001, evidence + tf.math.log(gain), 0.5 * evidence)
    switch = forced | (evidence > 0.3 * reluctance)
    relaxed = 1.0 + (reluctance - 1.0) * 0.98
    return (
        switch,
        tf.where(switch, 0.0, evidence),
        tf.where(switch & ~forced, tf.minimum(2.0 * relaxed, 8.0), relaxed),
    )


class Measured(NamedTuple):
    """The measurements of one step, equal on all ranks."""

    wire: tf.Tensor  # scalar, seconds in which buckets were on the wire; 0 if not measured
    span: tf.Tensor  # scalar, seconds from the first bucket's gradients to the last bucket's result
    exchange: tf.Tensor  # [B], seconds of each bucket, including encoding and decoding
    waits: tf.Tensor  # [B], seconds between the encoding of the bucket before and that of this one
    probed: tf.Tensor  # int32, the bucket that was probed
    energy: tf.Tensor  # [C + 1], energies that candidates lose of its chunk, and the chunk's; zeros if no probe
    # [2], energies of the residuals and of gradients + residuals with the model-wide candidate in use; zeros if not
    # measured, None if no candidate is model-wide
    model_wide: tf.Tensor | None = None


class State(NamedTuple):
    """What a choice is based on. Checkpoints contain these names."""

    choice: tf.Tensor  # int32 [B], the chosen candidates
    now: tf.Tensor  # int32 [B], the candidates in use: the chosen ones, or in a trial the tried one
    before: tf.Tensor  # int32 [B], the candidates that were in use in the step before
    steady: tf.Tensor  # bool, whether `before` was also in use in the step before that one
    switches: tf.Tensor  # int32 [B], how often each bucket's choice changed
    link_moments: tf.Tensor  # [5], see `link_tracker.fit`
    link: tf.Tensor  # [2], factors of latency and of time per byte
    energy: tf.Tensor  # [B], running average of the energy of probed chunks
    lost: tf.Tensor  # [B, C], running average of the energy that candidates lose of them
    waits: tf.Tensor  # [B], seconds of the backward pass before each bucket
    measured: tf.Tensor  # [B], seconds of the exchange with the choice, including encoding and decoding
    evidence: tf.Tensor  # see `hesitate`
    reluctance: tf.Tensor  # see `hesitate`
    bias: tf.Tensor  # [C], by which factor steps with each candidate take longer than predicted; see `trials`
    age: tf.Tensor  # [C], steps since each bias was measured
    known: tf.Tensor  # how often the bias of the choice was measured; 1 after a switch, as if after a trial
    trial: tf.Tensor  # int32, the candidate that was tried last
    since_trial: tf.Tensor  # steps since that trial began


def initial(choice: tf.Tensor, candidates: int) -> State:
    """The state before the first step."""
    buckets = choice.shape[0]
    zeros, zero, one = tf.zeros([buckets]), tf.constant(0.0), tf.constant(1.0)
    return State(
        choice, choice, choice, tf.constant(False), tf.zeros_like(choice), tf.zeros([5]), tf.ones([2]), zeros,
        tf.zeros([buckets, candidates]), zeros, zeros, zero, one,
        tf.ones([candidates]), tf.fill([candidates], trials.STALE_STEPS), zero, tf.constant(0),
        tf.constant(trials.TRIAL_STEPS),
    )  # fmt: skip


def in_step(state: State, choice: tf.Tensor, trial: tf.Tensor, committed: tf.Tensor) -> State:
    """The state in a step for which the ranks agreed on a choice, int32 [B], and on a trial.

    `trial`, int32, is the candidate to try in this step; -1 for none. `committed`, bool, says whether the residuals of
    this step are kept. If not, its times are ignored.
    """
    switched = choice != state.choice
    return state._replace(
        choice=choice,
        now=tf.where(trial >= 0, trial, choice),
        before=tf.where(committed, state.now, state.before),
        steady=committed & tf.reduce_all(state.now == state.before),
        switches=state.switches + tf.cast(switched, tf.int32),
        known=tf.where(tf.reduce_any(switched), 1.0, state.known),
    )


def follow(state: State, step: Measured, costs: Costs) -> State:
    """Updates the state with the measurements of the step before, in which `state.before` was in use."""
    is_used = tf.one_hot(state.before, costs.encode.shape[1])

    def used(table: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(is_used * table, -1)

    timed = step.wire > 0.0
    bias = used(state.bias)
    messages, transfer = (tf.reduce_sum(bias * used(table)) for table in (costs.messages, costs.transfer))
    # Without the bias: with it, the link and the bias could drift, one up and the other down.
    coding = tf.where(timed, tf.reduce_sum(used(costs.encode + costs.decode)), 0.0)
    # A bucket seems to be on the wire for longer than the link takes, if another one is encoded on the same core
    # meanwhile. The difference is unknown, so the measured time is limited: to the expected one, or to the span without
    # the coding if that is longer.
    expected = messages * state.link[0] + transfer * state.link[1]
    wire = tf.minimum(step.wire, tf.maximum(expected, step.span - coding))
    # Trials do not change the link: the bias of the tried candidate refers to the link as the choice measured it.
    chosen = tf.reduce_all(state.before == state.choice)
    new_moments, new_link = fit(state.link_moments, state.link, messages, transfer, wire, coding)
    link_moments = tf.where(chosen, new_moments, state.link_moments)
    link = tf.where(chosen, new_link, state.link)
    waits = _average(state.waits, step.waits, timed)
    ratio = tf.math.divide_no_nan(step.span, makespan(waits, used(predicted(costs, link)) * bias))
    ratio = tf.where(timed & state.steady, ratio, 0.0)
    new_bias, age = trials.measured(state.bias, state.age, tf.reduce_mean(is_used, 0), ratio, chosen, state.known)
    is_probed = tf.range(state.choice.shape[0]) == step.probed
    probed = tf.cast(is_probed & (step.energy[-1] > 0.0), tf.float32)
    keep = 1.0 - NEWEST_WEIGHT * probed
    energy = keep * state.energy + NEWEST_WEIGHT * probed * step.energy[-1]
    lost = keep[:, None] * state.lost + NEWEST_WEIGHT * probed[:, None] * step.energy[:-1]
    if step.model_wide is not None:
        old_shares = tf.math.divide_no_nan(state.lost, state.energy[:, None])
        lost = model_wide_rules.with_measured_loss(
            lost, energy, old_shares, step.model_wide, state.before[0], NEWEST_WEIGHT
        )
    return state._replace(
        link_moments=link_moments,
        link=link,
        energy=energy,
        lost=lost,
        waits=waits,
        bias=new_bias,
        age=age,
        known=state.known + tf.cast(chosen & (ratio > 0.0), tf.float32),
        measured=_average(state.measured, step.exchange, timed & (state.before == state.choice)),
    )


def _average(old: tf.Tensor, new: tf.Tensor, known: tf.Tensor) -> tf.Tensor:
    """A running average where `known`. It begins with the first value; later values count up to twice the average."""
    limited = tf.where(old > 0.0, tf.minimum(new, 2.0 * old + 1e-3), new)
    return tf.where(known, tf.where(old > 0.0, old + NEWEST_WEIGHT * (limited - old), limited), old)


def shares(state: State, prior: tf.Tensor) -> tf.Tensor:
    """The share of its energy that each bucket loses with each candidate, [B, C]; `prior` before its first probe."""
    measured = tf.math.divide_no_nan(state.lost, state.energy[:, None])
    return tf.where(state.energy[:, None] > 0.0, measured, prior)


def propose(
    state: State,
    costs: Costs,
    uncompressed: Sequence[bool],
    lost: tf.Tensor,
    nbytes: tf.Tensor,
    target: tf.Tensor,
    max_slowdown: float,
    model_wide: Sequence[bool] = (),
) -> tuple[State, tf.Tensor, tf.Tensor]:
    """Proposes the next choice and the next trial, from what `in_step` and `shares` returned.

    See `best` and `admit` for the other arguments.

    Returns:
        The new state, the proposed choice, int32 [B], and the candidate to try, int32: -1 for none.
    """
    if any(model_wide):
        lost = model_wide_rules.averaged(lost, nbytes, model_wide)
        allowed = model_wide_rules.admit(reached(lost, state.choice, target), lost, nbytes, model_wide)
    else:
        allowed = admit(lost, state.choice, target)
    cost_inputs = (state.waits, predicted(costs, state.link) * state.bias, lost, nbytes, max_slowdown)
    cheapest = best(allowed, uncompressed, *cost_inputs, model_wide)
    current_cost, cheapest_cost = tf.unstack(cost_of(tf.stack([state.choice, cheapest]), *cost_inputs))
    forced = tf.reduce_any(~tf.gather(allowed, state.choice, axis=1, batch_dims=1))
    gain = tf.math.divide_no_nan(current_cost, cheapest_cost)
    switch, evidence, reluctance = hesitate(gain, forced, state.evidence, state.reluctance)
    buckets, candidates = lost.shape
    alone = tf.broadcast_to(tf.range(candidates)[:, None], [candidates, buckets])
    ratios = tf.math.divide_no_nan(cost_of(alone, *cost_inputs), current_cost)
    possible = tf.reduce_all(allowed, 0) & (tf.reduce_any(state.choice != alone, 1))
    trial, since_trial, tried = trials.next_trial(state.trial, state.since_trial, state.age, ratios, possible & ~switch)
    state = state._replace(evidence=evidence, reluctance=reluctance, trial=trial, since_trial=since_trial)
    return state, tf.where(switch, cheapest, state.choice), tried
