"""What a choice of compressors would cost, and which is the best one: numbers in, numbers out.

B buckets, C candidates; float32 throughout; times in seconds. Small enough for the host in each step: compiled
with XLA it takes as long, and two seconds before the first step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from . import model_wide as all_at_once
from . import trials
from .link_tracker import fit
from .splits import divided

# What the newest value weighs in running averages.
AVERAGED = 0.3


class Costs(NamedTuple):
    """What each candidate costs each bucket on the calibrated link and an idle machine, [B, C] each.

    The wire takes `messages + transfer`: the part that does not grow with the bytes, and the one that does.
    """

    encode: tf.Tensor
    messages: tf.Tensor
    transfer: tf.Tensor
    decode: tf.Tensor


def makespan(waits: tf.Tensor, exchange: tf.Tensor) -> tf.Tensor:
    """When the last bucket is there, [...]; both arguments [..., B], in the order in which buckets cross.

    The backward pass makes the gradients of one bucket after the other, each after another `waits`; meanwhile those
    before cross, one after the other, each in `exchange` seconds. What buckets gain by being encoded while
    others cross is not counted: where the processor moves the bytes, too, it is little.
    """
    ready, crossed = tf.cumsum(waits, -1), tf.cumsum(exchange, -1)
    return tf.reduce_max(ready - crossed + exchange, -1) + crossed[..., -1]


def running_max(x: tf.Tensor) -> tf.Tensor:
    """The largest of each element of x [B] and those before."""
    (size,) = x.shape
    before = tf.linalg.band_part(tf.ones([size, size], tf.bool), -1, 0)
    return tf.reduce_max(tf.where(before, x, x.dtype.min), -1)


def predicted(costs: Costs, factors: tf.Tensor) -> tf.Tensor:
    """Seconds of each bucket's exchange with each candidate, [B, C], where latency and time per byte have `factors`."""
    return costs.encode + costs.messages * factors[0] + costs.transfer * factors[1] + costs.decode


def cost_of(
    picks: tf.Tensor,
    waits: tf.Tensor,
    seconds: tf.Tensor,
    lost: tf.Tensor,
    nbytes: tf.Tensor,
    max_slowdown: float,
) -> tf.Tensor:
    """What choices cost, [N]: seconds, up to `max_slowdown` more for what does not get through.

    Args:
        picks: int32 [N, B], candidates.
        waits: [B], seconds of the backward pass between the bucket before and this one.
        seconds: [B, C], as `predicted`.
        lost: [B, C], shares of the energy that do not get through.
        nbytes: [B], bytes of gradient.
        max_slowdown: A share.
    """
    hot = tf.one_hot(picks, lost.shape[1])  # [N, B, C]

    def of_picks(table: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(hot * table, -1)

    missing = tf.reduce_sum(of_picks(lost) * nbytes, -1) / tf.reduce_sum(nbytes)
    return makespan(waits, of_picks(seconds)) * (1.0 + max_slowdown * missing)


def best(
    allowed: tf.Tensor,
    plain: Sequence[bool],
    waits: tf.Tensor,
    seconds: tf.Tensor,
    lost: tf.Tensor,
    nbytes: tf.Tensor,
    max_slowdown: float,
    whole: Sequence[bool] = (),
) -> tf.Tensor:
    """The cheapest choice among those allowed (bool [B, C]), int32 [B].

    Looks at all choices of one candidate for the first buckets, which may cross while gradients are still computed,
    and another or the same one for the rest; each bucket for which it is not allowed gets its own fastest one
    instead. Candidates that are `plain` (no compression) are for all buckets or for none, but for those that
    nothing else is allowed for: where all are plain, gradients are neither copied into chunks nor out of them.
    Those that are `whole` (see `all_at_once`) are for all buckets or for none.
    """
    buckets, candidates = allowed.shape
    several = allowed & ~tf.constant(list(whole)) if any(whole) else allowed
    other = several & ~tf.constant(list(plain))
    mixed = tf.where(tf.reduce_any(other, -1, keepdims=True), other, several)
    fallback = tf.argmin(tf.where(mixed, seconds, tf.fill(seconds.shape, seconds.dtype.max)), -1, tf.int32)
    options = tf.constant(divided(buckets, candidates))  # [N, B]
    possible = tf.reduce_any(tf.one_hot(options, candidates, True, False, dtype=tf.bool) & mixed, -1)
    options = tf.where(possible, options, fallback)
    valid = all_at_once.allowed(options, several)
    # What is plain loses nothing and is always allowed.
    for_all = [is_plain or (c < len(whole) and whole[c]) for c, is_plain in enumerate(plain)]
    ones = [tf.fill([1, buckets], c) for c, is_one in enumerate(for_all) if is_one]
    options = tf.concat([options, *ones], 0)
    prices = cost_of(options, waits, seconds, lost, nbytes, max_slowdown)
    if any(whole):
        valid = tf.concat([valid, *(all_at_once.allowed(one, allowed) for one in ones)], 0)
        prices = tf.where(valid, prices, prices.dtype.max)
    return tf.gather(options, tf.argmin(prices))


def admit(lost: tf.Tensor, current: tf.Tensor, target: tf.Tensor) -> tf.Tensor:
    """Which candidates may be chosen, bool [B, C].

    Those that let `target` of the energy through; of the one in use, half of it is enough, as its residual makes what
    gets through a smaller share; and in any case the one that loses least.
    """
    return reached(lost, current, target) | (lost <= tf.reduce_min(lost, -1, keepdims=True))


def reached(lost: tf.Tensor, current: tf.Tensor, target: tf.Tensor) -> tf.Tensor:
    """Which candidates let enough through, bool [B, C]; see `admit`."""
    in_use = tf.one_hot(current, lost.shape[1], on_value=True, off_value=False, dtype=tf.bool)
    through = 1.0 - lost
    return (through >= target) | (in_use & (through >= 0.5 * target))


def hesitate(
    gain: tf.Tensor, forced: tf.Tensor, evidence: tf.Tensor, reluctance: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Whether to switch now: so that noise does not make the choice go to and fro.

    The logarithms of the gains that successive steps promise add up, and a switch takes 0.3 of them: a gain of
    35% in one step or of 10% in three in a row (a cumulative sum test, Page 1954). Each switch doubles what the
    next one takes, which wears off over some hundred steps.

    Args:
        gain: Scalar, cost of the current choice over that of the best one, from 1 on.
        forced: bool, whether the current choice is not allowed any more.
        evidence: Scalar, what has added up; 0 at first.
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
    """What all ranks know of one step."""

    wire: tf.Tensor  # scalar, seconds in which something was on its way; 0 if not known
    span: tf.Tensor  # scalar, seconds from the first bucket's gradients to the last one's result
    exchange: tf.Tensor  # [B], seconds of each bucket, encoding and decoding included
    waits: tf.Tensor  # [B], seconds between a bucket's encoding and that of the one before
    probed: tf.Tensor  # int32, the bucket of which a chunk was tried
    energy: tf.Tensor  # [C + 1], what each candidate loses of it, and all of it; zeros if none was
    # [2], what the candidate in use lost of the whole model, and all of it; zeros if not measured, None if it cannot be
    whole: tf.Tensor | None = None


class State(NamedTuple):
    """What a choice rests on."""

    choice: tf.Tensor  # int32 [B], which candidate is chosen
    now: tf.Tensor  # int32 [B], which one is in force: another one while it is tried
    before: tf.Tensor  # int32 [B], which one was in the step before
    steady: tf.Tensor  # bool, whether that was in force in the step before it, too
    switches: tf.Tensor  # int32 [B], how often that changed
    link_moments: tf.Tensor  # [5], see `fit`
    link: tf.Tensor  # [2], factors of latency and of time per byte
    energy: tf.Tensor  # [B], running average of what was tried
    lost: tf.Tensor  # [B, C], of what candidates lose of it
    waits: tf.Tensor  # [B], seconds of the backward pass before each bucket
    measured: tf.Tensor  # [B], seconds of the whole exchange
    evidence: tf.Tensor
    reluctance: tf.Tensor
    bias: tf.Tensor  # [C], by which factor steps with each candidate take longer than predicted
    age: tf.Tensor  # [C], steps since that was measured
    known: tf.Tensor  # how often that of the choice was; of a new one it counts as once, as if in a trial
    trial: tf.Tensor  # int32, which candidate was tried last
    since_trial: tf.Tensor  # steps since that began


def initial(choice: tf.Tensor, candidates: int) -> State:
    """The state before the first step."""
    buckets = choice.shape[0]
    zeros, zero, one = tf.zeros([buckets]), tf.constant(0.0), tf.constant(1.0)
    return State(
        choice, choice, choice, tf.constant(False), tf.zeros_like(choice), tf.zeros([5]), tf.ones([2]), zeros,
        tf.zeros([buckets, candidates]), zeros, zeros, zero, one,
        tf.ones([candidates]), tf.fill([candidates], trials.STALE), zero, tf.constant(0), tf.constant(trials.LASTS),
    )  # fmt: skip


def in_step(state: State, choice: tf.Tensor, trial: tf.Tensor, committed: tf.Tensor) -> State:
    """The state in a step for which the ranks agreed on a choice, int32 [B], and on what is tried: -1 for nothing.

    `committed`: whether the residuals of this step are kept; if not, its times are not looked at.
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


def follow(state: State, seen: Measured, costs: Costs) -> State:
    """Takes in what was measured in the step before, in which `state.before` was in force."""
    hot = tf.one_hot(state.before, costs.encode.shape[1])

    def used(table: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(hot * table, -1)

    timed = seen.wire > 0.0
    bias = used(state.bias)
    messages, transfer = (tf.reduce_sum(bias * used(table)) for table in (costs.messages, costs.transfer))
    # As calibrated: with the bias, the link and the bias could drift apart, one up and the other down.
    coding = tf.where(timed, tf.reduce_sum(used(costs.encode + costs.decode)), 0.0)
    # A bucket that is on its way while another is encoded on the same core seems to be for longer than the link takes:
    # by how much is not known, so that what was expected is believed as far as it is possible.
    expected = messages * state.link[0] + transfer * state.link[1]
    wire = tf.minimum(seen.wire, tf.maximum(expected, seen.span - coding))
    # Not with what is only tried: its bias refers to the link as the choice sees it.
    chosen = tf.reduce_all(state.before == state.choice)
    followed = fit(state.link_moments, state.link, messages, transfer, wire, coding)
    link_moments = tf.where(chosen, followed[0], state.link_moments)
    link = tf.where(chosen, followed[1], state.link)
    waits = _average(state.waits, seen.waits, timed)
    ratio = tf.math.divide_no_nan(seen.span, makespan(waits, used(predicted(costs, link)) * bias))
    ratio = tf.where(timed & state.steady, ratio, 0.0)
    found = trials.measured(state.bias, state.age, tf.reduce_mean(hot, 0), ratio, chosen, state.known)
    here = tf.range(state.choice.shape[0]) == seen.probed
    tried = tf.cast(here & (seen.energy[-1] > 0.0), tf.float32)
    keep = 1.0 - AVERAGED * tried
    energy = keep * state.energy + AVERAGED * tried * seen.energy[-1]
    lost = keep[:, None] * state.lost + AVERAGED * tried[:, None] * seen.energy[:-1]
    if seen.whole is not None:
        old = tf.math.divide_no_nan(state.lost, state.energy[:, None])
        lost = all_at_once.with_use(lost, energy, old, seen.whole, state.before[0], AVERAGED)
    return state._replace(
        link_moments=link_moments,
        link=link,
        energy=energy,
        lost=lost,
        waits=waits,
        bias=found[0],
        age=found[1],
        known=state.known + tf.cast(chosen & (ratio > 0.0), tf.float32),
        measured=_average(state.measured, seen.exchange, timed & (state.before == state.choice)),
    )


def _average(old: tf.Tensor, new: tf.Tensor, known: tf.Tensor) -> tf.Tensor:
    """A running average that begins with the first value, and takes at most twice the old one at once."""
    limited = tf.where(old > 0.0, tf.minimum(new, 2.0 * old + 1e-3), new)
    return tf.where(known, tf.where(old > 0.0, old + AVERAGED * (limited - old), limited), old)


def shares(state: State, prior: tf.Tensor) -> tf.Tensor:
    """The share of its energy that each bucket would lose, [B, C]: `prior` until something was tried."""
    found = tf.math.divide_no_nan(state.lost, state.energy[:, None])
    return tf.where(state.energy[:, None] > 0.0, found, prior)


def propose(
    state: State,
    costs: Costs,
    plain: Sequence[bool],
    lost: tf.Tensor,
    nbytes: tf.Tensor,
    target: tf.Tensor,
    max_slowdown: float,
    whole: Sequence[bool] = (),
) -> tuple[State, tf.Tensor, tf.Tensor]:
    """What should be chosen next, int32 [B], and what should be tried, int32: -1 for nothing."""
    if any(whole):
        lost = all_at_once.of_model(lost, nbytes, whole)
        allowed = all_at_once.admit(reached(lost, state.choice, target), lost, nbytes, whole)
    else:
        allowed = admit(lost, state.choice, target)
    ranked = (state.waits, predicted(costs, state.link) * state.bias, lost, nbytes, max_slowdown)
    found = best(allowed, plain, *ranked, whole)
    now, then = tf.unstack(cost_of(tf.stack([state.choice, found]), *ranked))
    forced = tf.reduce_any(~tf.gather(allowed, state.choice, axis=1, batch_dims=1))
    gain = tf.math.divide_no_nan(now, then)
    switch, evidence, reluctance = hesitate(gain, forced, state.evidence, state.reluctance)
    buckets, candidates = lost.shape
    alone = tf.broadcast_to(tf.range(candidates)[:, None], [candidates, buckets])
    ratios = tf.math.divide_no_nan(cost_of(alone, *ranked), now)
    possible = tf.reduce_all(allowed, 0) & (tf.reduce_any(state.choice != alone, 1))
    trial, since_trial, tried = trials.next_trial(
        state.trial, state.since_trial, state.age, ratios, possible & ~switch
    )
    state = state._replace(evidence=evidence, reluctance=reluctance, trial=trial, since_trial=since_trial)
    return state, tf.where(switch, found, state.choice), tried
