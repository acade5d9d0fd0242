"""What a choice of compressors costs, and which choice is best. Pure functions.

B buckets, C candidates; float32; times in seconds. Once there are several candidates to choose from, the functions run
on the host in each step. They are not compiled with XLA: they would not be faster, and tracing them would take two
seconds longer. Those that take an array module `xp` (see `arrays`) also make the first choice, and compare candidates
that are not in the graph; then their arguments are NumPy arrays in place of tensors, in part of float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow.experimental import numpy as tnp

from ..formats.auto import TRIAL_STEPS
from . import choices, link_tracker, progress, trials
from .arrays import cast, quotient

# The weight of the newest value in running averages.
_NEWEST_WEIGHT = 0.3
# Seconds that a step is taken to need besides the exchange, until that is measured.
FIRST_REST = 0.03
# In each step, the progress that a candidate made while in use becomes this power of itself: it may make more later in
# training. In a thousand steps, 0.3 becomes 0.48.
_REMEMBERED = 0.9995
# The largest share of a transfer that is taken to be hidden by a burst.
_MOST_HIDDEN = 0.9


class Costs(NamedTuple):
    """Seconds that each bucket takes with each candidate, on the calibrated link and an idle machine; [B, C] each.

    The wire takes `messages + transfer`: `messages` does not depend on the number of bytes, and `transfer` does.
    """

    encode: tf.Tensor
    messages: tf.Tensor
    transfer: tf.Tensor
    decode: tf.Tensor


def predicted(costs: Costs, factors: tf.Tensor) -> tf.Tensor:
    """Seconds of each bucket's exchange with each candidate, [B, C]; `factors` [2] are those of `link_tracker.fit`."""
    return costs.encode + costs.messages * factors[0] + costs.transfer * factors[1] + costs.decode


class Rules(NamedTuple):
    """What `auto` may choose, and what it looks for; from its arguments. See `compressors.Auto`."""

    uncompressed: Sequence[bool]  # of each candidate
    model_wide: Sequence[bool]
    max_slowdown: float
    by_progress: bool = True  # objective="progress"; otherwise "step"
    min_progress: float = 0.0
    budget: float = 0.0


def admit(xp: Any, rules: Rules, current: Any, value: Value, target: Any) -> Any:
    """Which candidates may be chosen, bool [C].

    With objective="progress", these make at least `min_progress`. With objective="step", they let at least the share
    `target` of the energy through; for candidates in use, `current` [B], half of it is enough: their residual adds to
    the energy, and so lowers the share. The candidate that makes the most progress may always be chosen, or the one
    that loses least. `xp` is the array module, see `arrays`.
    """
    if rules.by_progress:
        return (value.progress >= rules.min_progress) | (value.progress >= xp.max(value.progress))
    through = 1.0 - value.lost
    in_use = _in_use(xp, current, len(rules.uncompressed))
    enough = (through >= target) | (in_use & (through >= 0.5 * target))
    return enough | (value.lost <= xp.min(value.lost))


class Value(NamedTuple):
    """What a step with each candidate is worth."""

    progress: tf.Tensor  # [C], relative to an uncompressed step
    lost: tf.Tensor  # [C], the share of the energy that is lost


def cost_of(xp: Any, rules: Rules, picks: Any, state: State, costs: Costs, value: Value, nbytes: Any) -> Any:
    """The cost of choices, int32 [N, B]: [N], see `choices.cost_of`."""
    seconds, rest = predicted(costs, state.link) * state.bias, xp.where(state.rest > 0.0, state.rest, FIRST_REST)
    return cost_by_rules(xp, rules, picks, state.waits, seconds, nbytes, rest, value)


def cost_by_rules(
    xp: Any, rules: Rules, picks: Any, waits: Any, seconds: Any, nbytes: Any, rest: Any, value: Value
) -> Any:
    """`choices.cost_of` by these rules: with objective="step", only the seconds of the exchange count."""
    gained = value.progress
    if not rules.by_progress:
        rest, gained = 0.0, xp.ones_like(gained)
    return choices.cost_of(
        xp, picks, waits, seconds, nbytes, rest, gained, value.lost, rules.max_slowdown, rules.budget
    )


def best(
    rules: Rules, allowed: tf.Tensor, state: State, costs: Costs, value: Value, nbytes: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """The cheapest of the `choices.options`, int32 [B], and its cost. `allowed`, bool [C]: see `admit`."""
    options = choices.options(rules.uncompressed, rules.model_wide, nbytes.shape[0])
    valid = tf.reduce_all(tf.gather(allowed, options), -1)
    prices = cost_of(tnp, rules, options, state, costs, value, nbytes)
    cheapest = tf.argmin(tf.where(valid, prices, prices.dtype.max))
    return tf.gather(tf.constant(options), cheapest), tf.gather(prices, cheapest)


def hesitate(
    gain: tf.Tensor, forced: tf.Tensor, evidence: tf.Tensor, reluctance: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Whether to switch to the best choice now. Noise alone should not switch to and fro.

    This is a cumulative sum test (Page 1954). The evidence is the sum of the logarithms of the predicted gains of
    successive steps. A switch needs an evidence of 0.3 times the reluctance: a gain of 35% in one step or of 11% in
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
    rest: tf.Tensor  # scalar, the other seconds of the step; 0 if not measured
    progress: tf.Tensor  # [ROWS, C], see `ProgressSample.measure`


class State(NamedTuple):
    """What a choice is based on. Checkpoints contain these names."""

    choice: tf.Tensor  # int32 [B], the chosen candidates
    now: tf.Tensor  # int32 [B], the candidates in use: the chosen ones, or in a trial the tried one
    before: tf.Tensor  # int32 [B], the candidates that were in use in the step before
    steady: tf.Tensor  # bool, whether `before` was also in use in the step before that one
    switches: tf.Tensor  # int32 [B], how often each bucket's choice changed
    link_moments: tf.Tensor  # [6], see `link_tracker.fit`
    link: tf.Tensor  # [2], factors of latency and of time per byte
    progress: tf.Tensor  # [ROWS, C], sums of what `ProgressSample.measure` returned
    own_progress: tf.Tensor  # [C], the progress that was measured while a candidate was in use; 1 if it never was
    rest: tf.Tensor  # seconds of a step besides those from the first ready bucket to the last exchange
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
        choice, choice, choice, tf.constant(False), tf.zeros_like(choice), tf.zeros([link_tracker.NUMBERS]),
        tf.ones([2]),
        tf.zeros([progress.ROWS, candidates]), tf.ones([candidates]), zero, zeros, zeros, zero, one,
        tf.ones([candidates]), tf.fill([candidates], trials.STALE_STEPS), zero, tf.constant(0),
        tf.constant(float(TRIAL_STEPS)),
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
        measured=tf.where(switched, 0.0, state.measured),
        known=tf.where(tf.reduce_any(switched), 1.0, state.known),
    )


def follow(xp: Any, state: State, step: Measured, costs: Costs, burst: float = 0.0) -> State:
    """Updates the state with the measurements of the step before, in which `state.before` was in use.

    A burst may hide up to `burst` seconds of the step's transfer on the calibrated link.
    """
    is_used = cast(xp, state.before[:, None] == np.arange(costs.encode.shape[1], dtype=np.int32), np.float32)

    def used(table: Any) -> Any:
        return xp.sum(is_used * table, -1)

    timed = step.wire > 0.0
    # Without the bias: with it, the link and the bias could drift, one up and the other down.
    messages, transfer = (xp.sum(used(table)) for table in (costs.messages, costs.transfer))
    coding = xp.where(timed, xp.sum(used(costs.encode + costs.decode)), 0.0)
    # A bucket seems to be on the wire for longer than the link takes, if another one is encoded on the same core
    # meanwhile. The difference is unknown, so the measured time is limited: to the expected one, or to the span without
    # the coding if that is longer.
    expected = messages * state.link[0] + transfer * state.link[1]
    wire = xp.minimum(step.wire, xp.maximum(expected, step.span - coding))
    # What a burst may hide says nothing about the rate: with few bytes, a slow link would seem to be a fast one.
    most = xp.minimum(burst, _MOST_HIDDEN * transfer)
    hidden = xp.clip(transfer - (wire - messages * state.link[0]) / state.link[1], 0.0, most)
    # Trials do not change the link: the bias of the tried candidate refers to the link as the choice measured it. Nor
    # does the first step after a switch, which may compile kernels.
    chosen = xp.all(state.before == state.choice)
    follows_link = chosen & state.steady
    new_moments, new_link = link_tracker.fit(
        xp, state.link_moments, state.link, messages, transfer - hidden, wire, coding
    )
    link_moments = xp.where(follows_link, new_moments, state.link_moments)
    link = xp.where(follows_link, new_link, state.link)
    waits = average(xp, state.waits, step.waits, timed)
    span = choices.makespan(xp, waits, used(predicted(costs, link) * state.bias))
    ratio = xp.where(timed & state.steady, quotient(xp, step.span, span), 0.0)
    new_bias, age = trials.measured(xp, state.bias, state.age, xp.mean(is_used, 0), ratio, chosen, state.known)
    return state._replace(
        link_moments=link_moments,
        link=link,
        progress=progress.add(xp, state.progress, step.progress),
        rest=average(xp, state.rest, step.rest, step.rest > 0.0),
        waits=waits,
        bias=new_bias,
        age=age,
        known=state.known + cast(xp, chosen & (ratio > 0.0), np.float32),
        measured=average(xp, state.measured, step.exchange, timed & state.steady & (state.before == state.choice)),
    )


def average(xp: Any, old: Any, new: Any, known: Any) -> Any:
    """A running average where `known`. It begins with the first value; later values count up to twice the average."""
    limited = xp.where(old > 0.0, xp.minimum(new, 2.0 * old + 1e-3), new)
    return xp.where(known, xp.where(old > 0.0, old + _NEWEST_WEIGHT * (limited - old), limited), old)


def value_of(xp: Any, state: State, prior: Value) -> Value:
    """What the candidates are worth; `prior` before they were measured.

    While another one is in use, a candidate is worth at most what it was in its own training. There, gradients may
    repeat more: weights move slower. Otherwise, choices would switch to and fro.
    """
    rates = progress.rates(xp, state.progress, prior.progress, state.choice)
    in_use = _in_use(xp, state.choice, rates.shape[0])
    limited = xp.where(in_use, rates, xp.minimum(rates, state.own_progress))
    return Value(limited, progress.lost_shares(xp, state.progress, prior.lost))


def _in_use(xp: Any, choice: Any, candidates: int) -> Any:
    """Whether a bucket has each candidate, bool [C]; `choice` int32 [B]."""
    return xp.any(choice[:, None] == np.arange(candidates, dtype=np.int32), 0)


def propose(
    rules: Rules,
    state: State,
    costs: Costs,
    value: Value,
    nbytes: tf.Tensor,
    target: tf.Tensor,
    among: Sequence[int],
) -> tuple[State, tf.Tensor, tf.Tensor]:
    """Proposes the next choice and the next trial, from what `in_step` and `value_of` returned.

    Only candidates at the positions `among` are proposed. `target` is that of objective="step".

    Returns:
        The new state, the proposed choice, int32 [B], and the candidate to try, int32: -1 for none.
    """
    is_among = np.isin(np.arange(value.progress.shape[0]), among)
    allowed = admit(tnp, rules, state.choice, value, target) & is_among
    cheapest, cheapest_cost = best(rules, allowed, state, costs, value, nbytes)
    candidates, buckets = allowed.shape[0], nbytes.shape[0]
    alone = np.repeat(np.arange(candidates, dtype=np.int32)[:, None], buckets, 1)
    current_cost, *others = tf.unstack(
        cost_of(tnp, rules, tf.concat([state.choice[None], alone], 0), state, costs, value, nbytes)
    )
    forced = ~tf.reduce_all(tf.gather(allowed, state.choice))
    gain = tf.math.divide_no_nan(current_cost, cheapest_cost)
    switch, evidence, reluctance = hesitate(gain, forced, state.evidence, state.reluctance)
    ratios = tf.math.divide_no_nan(tf.stack(others), current_cost)
    possible = allowed & tf.reduce_any(state.choice != alone, 1)
    trial, since_trial, tried = trials.next_trial(state.trial, state.since_trial, state.age, ratios, possible & ~switch)
    is_seen = _in_use(tnp, state.choice, candidates) & progress.outweighs_noise(tnp, state.progress)
    state = state._replace(
        own_progress=tf.where(is_seen, value.progress, state.own_progress**_REMEMBERED),
        evidence=evidence,
        reluctance=reluctance,
        trial=trial,
        since_trial=since_trial,
    )
    tried = tf.where(tf.gather(tf.constant(is_among), tf.maximum(tried, 0)), tried, -1)  # a restored one may be another
    return state, tf.where(switch, cheapest, state.choice), tried


def possible_savings(
    rules: Rules, state: State, costs: Costs, value: Value, nbytes: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """What each of the `choices.options` saves beside the current choice, with objective="progress" and without limits.

    All arrays are NumPy's.

    Returns:
        The options, int32 [N, B], and the seconds that each saves for the progress of an uncompressed step, [N].
    """
    options = choices.options(rules.uncompressed, rules.model_wide, nbytes.shape[0])
    now, *others = cost_of(np, rules, np.concatenate([state.choice[None], options]), state, costs, value, nbytes)
    return options, now - np.array(others)
