"""The numerics of `auto`, against simulations and exhaustive search in NumPy."""

import itertools

import numpy as np
import pytest
import reference
import tensorflow as tf
import tensorflow.experimental.numpy as tnp

from hvd_compress.auto import choices, policy, trials
from hvd_compress.auto import link_tracker as link


def constant(x):
    return tf.constant(np.asarray(x), tf.float32)


@pytest.mark.parametrize("buckets", [1, 2, 5, 18])
def test_makespan_is_that_of_a_queue(buckets):
    times = np.random.default_rng(buckets).exponential(1.0, (2, 50, buckets))
    found = choices.makespan(tnp, *map(constant, times)).numpy()
    np.testing.assert_allclose(found, [reference.queue_after(*times[:, i]) for i in range(50)], rtol=1e-5)


def measured(latency, per_byte, messages, transfer, random, noise):
    return (latency * messages + per_byte * transfer) * np.exp(noise * random.standard_normal())


@pytest.mark.parametrize("change", [0.1, 0.5, 2.0, 10.0])
def test_a_link_that_changes_is_followed_within_ten_steps(change):
    random = np.random.default_rng(0)
    moments, factors = tf.zeros([link.NUMBERS]), tf.ones([2])
    messages, transfer = 2e-3, 50e-3
    for step in range(60):
        seconds = measured(1.0, 1.0 if step < 50 else change, messages, transfer, random, 0.05)
        moments, factors = link.fit(
            tnp, moments, factors, constant(messages), constant(transfer), constant(seconds), constant(0.0)
        )
        if step == 49:
            np.testing.assert_allclose(factors[1], 1.0, rtol=0.1)
    predicted = float(factors[0]) * messages + float(factors[1]) * transfer
    np.testing.assert_allclose(predicted, messages + change * transfer, rtol=0.5 if change > 5 else 0.3)


@pytest.mark.parametrize("latency", [1e-3, 30e-3])
def test_a_link_that_is_300_times_slower_is_another_one(latency):
    random = np.random.default_rng(0)
    moments, factors = tf.zeros([link.NUMBERS]), tf.ones([2])
    transfer = 10e-3
    for step in range(42):
        seconds = measured(1.0, 1.0 if step < 30 else 300.0, latency, transfer, random, 0.05)
        moments, factors = link.fit(
            tnp, moments, factors, constant(latency), constant(transfer), constant(seconds), constant(0.0)
        )
    predicted = float(factors[0]) * latency + float(factors[1]) * transfer
    np.testing.assert_allclose(predicted, latency + 300 * transfer, rtol=0.3)


def test_latency_and_bandwidth_are_told_apart_by_exchanges_of_different_size():
    random = np.random.default_rng(1)
    moments, factors = tf.zeros([link.NUMBERS]), tf.ones([2])
    for step in range(100):
        messages, transfer = 2e-3, 50e-3 if step % 2 else 1e-3
        seconds = measured(3.0, 0.5, messages, transfer, random, 0.02)
        moments, factors = link.fit(
            tnp, moments, factors, constant(messages), constant(transfer), constant(seconds), constant(0.0)
        )
    np.testing.assert_allclose(factors, [3.0, 0.5], rtol=0.15)


def test_a_step_that_was_held_up_and_one_without_times_change_little():
    moments, factors = tf.zeros([link.NUMBERS]), tf.ones([2])
    one = constant(1e-3), constant(20e-3)
    for _ in range(10):
        moments, factors = link.fit(tnp, moments, factors, *one, constant(21e-3), constant(0.0))
    _, held_up = link.fit(tnp, moments, factors, *one, constant(1.0), constant(0.0))
    assert 0.9 < float(held_up[1]) < 1.2
    _, unknown = link.fit(tnp, moments, factors, *one, constant(0.0), constant(0.0))
    np.testing.assert_allclose(unknown, factors, rtol=0.01)


def rules(uncompressed, **settings):
    """Of candidates of which none is model-wide."""
    return policy.Rules(uncompressed, [False] * len(uncompressed), settings.pop("max_slowdown", 0.0), **settings)


def state_with(choice, candidates, **fields):
    return policy.initial(tf.constant(choice), candidates)._replace(**{k: constant(v) for k, v in fields.items()})


def encode_only(seconds):
    return policy.Costs(constant(seconds), *(tf.zeros_like(constant(seconds)) for _ in range(3)))


@pytest.mark.parametrize("seed", range(8))
def test_best_is_the_cheapest_choice_that_is_allowed(seed):
    """Of one candidate for the first buckets and one for the rest, by exhaustive search."""
    random, buckets, candidates = np.random.default_rng(seed), 4, 4
    seconds = random.exponential(1.0, (buckets, candidates))
    progress, waits = random.uniform(0.2, 1.0, candidates), random.exponential(1.0, buckets)
    nbytes, rest = random.uniform(1, 10, buckets), random.exponential(3.0)
    lost = random.uniform(0, 1, candidates)
    allowed = random.uniform(0, 1, candidates) < 0.7
    allowed[0] = True  # no compression
    value = policy.Value(constant(progress), constant(lost))
    state = state_with([0] * buckets, candidates, waits=waits, rest=rest)
    args = rules([True, False, False, False], max_slowdown=0.05), tf.constant(allowed), state
    found, cost = policy.best(*args, encode_only(seconds), value, constant(nbytes))

    def price(picks):
        share = nbytes / nbytes.sum()
        span = reference.queue_after(waits, seconds[range(buckets), picks])
        return (rest + span) / (progress[picks] @ share) * (1 + 0.05 * (lost[picks] @ share))

    pairs = [(a, b) for a, b in itertools.product(range(1, 4), repeat=2) if allowed[a] and allowed[b]]
    options = [[a] * n + [b] * (buckets - n) for a, b in pairs for n in range(1, 5)] + [[0] * buckets]
    assert price(found.numpy()) == pytest.approx(min(price(np.array(picks)) for picks in options), rel=1e-5)
    assert float(cost) == pytest.approx(price(found.numpy()), rel=1e-5)


def test_what_hides_behind_the_backward_pass_is_not_compressed_harder():
    # Candidate 1 makes less progress and is faster on the wire; only the last bucket's wire time shows.
    seconds, value = encode_only([[1.1, 0.2]] * 3), policy.Value(constant([1.0, 0.95]), constant([0.01, 0.9]))
    for waits, expected in (([0.0, 5.0, 5.0], [0, 0, 1]), ([0.0, 0.0, 0.0], [1, 1, 1])):
        state = state_with([0] * 3, 2, waits=waits)
        args = rules([False, False]), tf.constant([True, True]), state, seconds, value, tf.ones([3])
        assert policy.best(*args)[0].numpy().tolist() == expected


def test_fast_steps_that_make_little_progress_are_not_chosen():
    value = policy.Value(constant([1.0, 0.4]), constant([0.0, 0.9]))
    seconds = encode_only([[0.050, 0.010]])
    for rest, by_progress, expected in ((0.001, True, 1), (0.100, True, 0), (0.100, False, 1)):
        state = state_with([0], 2, rest=rest)
        args = tf.constant([True, True]), state, seconds, value, tf.ones([1])
        assert policy.best(rules([True, False], by_progress=by_progress), *args)[0].numpy().tolist() == [expected]


def test_within_a_budget_the_most_progress_counts():
    value = policy.Value(constant([1.0, 0.9, 0.4]), constant([0.0, 0.0, 0.0]))
    seconds, state = encode_only([[0.100, 0.040, 0.010]]), state_with([0], 3, rest=1.0)
    for budget, expected in ((0.2, 0), (0.05, 1), (0.02, 2), (0.001, 2)):
        args = rules([True, False, False], budget=budget), tf.constant([True] * 3), state, seconds, value, tf.ones([1])
        assert policy.best(*args)[0].numpy().tolist() == [expected]


def test_which_candidates_may_be_chosen():
    value = policy.Value(constant([1.0, 0.9, 0.3]), constant([0.0, 0.2, 0.95]))

    def admitted(current, target, **settings):
        found = policy.admit(
            tnp, rules([True, False, False], **settings), tf.constant(current), value, constant(target)
        )
        return found.numpy().tolist()

    assert admitted([0], 0.0) == [True, True, True]
    assert admitted([0], 0.0, min_progress=0.5) == [True, True, False]
    assert admitted([0], 0.1, by_progress=False) == [True, True, False]
    # 5% is below the target of 10%, but at least half of it, and in use.
    assert admitted([2, 0], 0.1, by_progress=False) == [True, True, True]


def test_noise_does_not_switch_and_a_gain_does():
    random = np.random.default_rng(0)
    evidence, reluctance = tf.constant(0.0), tf.constant(1.0)
    no = tf.constant(False)
    for _ in range(500):
        gain = max(1.0, float(np.exp(0.03 * random.standard_normal())))
        switch, evidence, reluctance = policy.hesitate(constant(gain), no, evidence, reluctance)
        assert not switch
    switch, evidence, reluctance = policy.hesitate(constant(2.0), no, tf.constant(0.0), reluctance)
    assert switch and float(evidence) == 0.0 and float(reluctance) > 1.5
    steps = 0
    while not policy.hesitate(constant(1.1), no, evidence, reluctance)[0]:
        _, evidence, reluctance = policy.hesitate(constant(1.1), no, evidence, reluctance)
        steps += 1
    assert 3 <= steps <= 8  # twice as many as before the first switch
    assert policy.hesitate(constant(1.0), tf.constant(True), tf.constant(0.0), tf.constant(8.0))[0]


def test_what_is_measured_replaces_the_prior():
    state = policy.initial(tf.constant([1, 1]), 2)
    costs, prior = encode_only([[0.0, 1e-3]] * 2), policy.Value(constant([1.0, 0.1]), constant([0.0, 0.9]))
    for found, expected in zip(policy.value_of(tnp, state, prior), prior):
        np.testing.assert_allclose(found, expected)
    seen = policy.Measured(
        constant(0.0), constant(0.0), tf.zeros([2]), tf.zeros([2]), constant(0.0),
        constant([[8.0, 6.0], [8.0, 8.0], [0.0, 0.0], [8.0, 6.0], [8.0, 8.0], [80.0, 80.0], [0.0, 2.0], [8.0, 8.0]]),
    )  # fmt: skip
    state = policy.follow(tnp, state, seen, costs)
    value = policy.value_of(tnp, state, prior)
    np.testing.assert_allclose(value.progress, [1.0, 0.75])
    np.testing.assert_allclose(value.lost, [0.0, 0.25])
    # Noise of two standard deviations as large as what was measured: the prior counts as much.
    noisy = state.progress.numpy()
    noisy[policy.progress.Row.VARIANCE] = 16.0
    value = policy.value_of(tnp, state._replace(progress=constant(noisy)), prior)
    np.testing.assert_allclose(value.progress, [1.0, (0.75 + 0.1) / 2], rtol=1e-5)
    # What points the wrong way counts as nothing: the prior, and with little noise the least.
    wrong = noisy.copy()
    wrong[policy.progress.Row.GAIN] *= -1
    wrong[policy.progress.Row.VARIANCE] *= 1e-12
    np.testing.assert_allclose(policy.progress.rates(np, wrong, prior.progress, [1]), [0.02, 0.02], rtol=1e-3)


def test_a_candidate_is_worth_what_it_was_in_its_own_training():
    """It makes less progress while it is in use than it seems to make beside another one."""
    costs, nbytes = costs_of([0.02, 0.01]), tf.ones([4])
    state, value = policy.initial(tf.ones([4], tf.int32), 2), policy.Value(constant([1.0, 0.3]), constant([0.0, 0.7]))
    candidate_rules = rules([True, False])
    state, *_ = policy.propose(candidate_rules, state, costs, value, nbytes, constant(0.0), range(2))
    np.testing.assert_array_equal(state.own_progress, [1.0, 1.0])  # nothing was measured yet
    measured = np.zeros([policy.progress.ROWS, 2])
    measured[policy.progress.Row.WHOLE_GAIN] = 1.0
    seen = state._replace(progress=constant(measured))
    seen, *_ = policy.propose(candidate_rules, seen, costs, value, nbytes, constant(0.0), range(2))
    np.testing.assert_allclose(seen.own_progress, [1.0, 0.3])
    state = seen._replace(progress=state.progress)
    state = state._replace(choice=tf.zeros([4], tf.int32))
    optimistic = policy.Value(constant([0.9, 0.8]), constant([0.0, 0.7]))
    np.testing.assert_allclose(policy.value_of(tnp, state, optimistic).progress, [0.9, 0.3])
    # It is forgotten slowly.
    for _ in range(100):
        value = policy.value_of(tnp, state, optimistic)
        state, *_ = policy.propose(candidate_rules, state, costs, value, nbytes, constant(0.0), range(2))
    np.testing.assert_allclose(state.own_progress, [1.0, 0.3 ** (0.9995**100)], rtol=1e-4)


def simulate(truth, costs, steps, link=lambda step: 1.0, noise=0.03, seed=0):
    """Steps with `auto` on a machine where a step with each candidate takes `truth` seconds per bucket.

    Returns the choice of each step and what was in force in it.
    """
    random = np.random.default_rng(seed)
    buckets, candidates = costs.encode.shape
    candidate_rules = rules([c == 0 for c in range(candidates)], max_slowdown=0.02)
    value, nbytes = policy.Value(tf.ones([candidates]), tf.zeros([candidates])), tf.ones([buckets])
    state = policy.initial(tf.zeros([buckets], tf.int32), candidates)
    choice, _ = policy.best(candidate_rules, tf.ones([candidates], tf.bool), state, costs, value, nbytes)
    state = policy.initial(choice, candidates)
    chosen, in_force, votes = [], [], [(state.choice, tf.constant(-1))]

    @tf.function(autograph=False)
    def learn(state, wire, span, choice, trial):
        seen = policy.Measured(
            wire,
            span,
            tf.zeros([buckets]),
            tf.zeros([buckets]),
            constant(1e-4),
            tf.zeros([policy.progress.ROWS, candidates]),
        )
        state = policy.follow(tnp, state, seen, costs)
        state = policy.in_step(state, choice, trial, tf.constant(True))
        return policy.propose(candidate_rules, state, costs, value, nbytes, constant(0.0), range(candidates))

    for step in range(steps):
        now = state.before.numpy()
        rows = range(buckets), now
        coding = (costs.encode.numpy() + costs.decode.numpy())[rows].sum()
        span = buckets * truth(step)[now[0]] * np.exp(noise * random.standard_normal())
        # What is encoded while something is on its way seems to be on its way, too.
        wire = max(1e-4, span - 0.5 * coding)
        state, choice, tried = learn(state, constant(wire), constant(span), *votes.pop(0))
        votes.append((choice, tried))
        chosen.append(state.choice.numpy()[0])
        in_force.append(state.now.numpy()[0])
    return np.array(chosen), np.array(in_force)


def followed(costs, wire_of, steps, burst, factor=1.0):
    """The factor of the time per byte after steps whose bytes took `wire_of(step)` seconds, of one candidate."""
    state = policy.initial(tf.zeros([1], tf.int32), 1)._replace(link=constant([1.0, factor]))
    for step in range(steps):
        wire = constant(wire_of(step))
        seen = policy.Measured(
            wire, wire + 0.004, tf.zeros([1]), tf.zeros([1]), constant(0.05), tf.zeros([policy.progress.ROWS, 1])
        )
        state = policy.in_step(
            policy.follow(tnp, state, seen, costs, burst), state.choice, tf.constant(-1), tf.constant(True)
        )
    return float(state.link[1])


def test_bytes_that_cross_in_a_burst_do_not_make_a_slow_link_fast():
    """20 ms of bytes, of which a token bucket lets 16 ms pass at once; then a link that is five times slower."""
    costs = policy.Costs(*(constant([[x]]) for x in (0.002, 0.001, 0.02, 0.002)))
    assert followed(costs, lambda step: 0.005, 40, burst=0.016) == pytest.approx(1.0, rel=0.05)
    slower = followed(costs, lambda step: 0.005 if step < 20 else 0.085, 40, burst=0.016)
    assert slower == pytest.approx(5.0 * 0.84, rel=0.1)
    # Without a burst, so short a time means a link that is five times faster.
    assert followed(costs, lambda step: 0.005, 40, burst=0.0) == pytest.approx(0.2, rel=0.1)


def test_a_switch_forgets_what_the_exchange_took_before():
    state = policy.initial(tf.constant([0, 1]), 2)._replace(measured=constant([1.0, 2.0]))
    state = policy.in_step(state, tf.constant([1, 1]), tf.constant(-1), tf.constant(True))
    np.testing.assert_array_equal(state.measured, [0.0, 2.0])


@pytest.mark.parametrize("factor", [0.25, 5.0])
def test_a_rate_that_is_known_from_many_bytes_stays_when_few_are_sent(factor):
    costs = policy.Costs(*(constant([[x]]) for x in (0.002, 0.001, 0.02, 0.002)))
    found = followed(costs, lambda step: 0.001 + factor * 0.004, 40, burst=0.016, factor=factor)
    assert found == pytest.approx(factor, rel=0.05)


def test_a_slow_link_that_recovers_is_followed_with_few_bytes():
    costs = policy.Costs(*(constant([[x]]) for x in (0.002, 0.001, 0.02, 0.002)))
    assert followed(costs, lambda step: 0.005, 40, burst=0.016, factor=10.0) == pytest.approx(1.0, rel=0.05)


def costs_of(seconds, buckets=4):
    """Half of it encoding, half wire."""
    table = np.broadcast_to(np.asarray(seconds, np.float32), (buckets, len(seconds)))
    plain = np.array([0.0] + [1.0] * (len(seconds) - 1), np.float32)
    return policy.Costs(*map(constant, (table * 0.5 * plain, 0 * table, table * (1 - 0.5 * plain), 0 * table)))


def test_what_each_option_saves():
    """Steps of 100, 60 and 40 ms besides a rest of 100 ms; the third candidate makes 0.8 of the progress."""
    costs, nbytes = costs_of([0.025, 0.015, 0.010]), np.ones(4, np.float32)
    state = policy.initial(tf.zeros([4], tf.int32), 3)._replace(rest=constant(0.1))
    value = policy.Value(constant([1.0, 1.0, 0.8]), constant([0.0, 0.0, 0.0]))
    options, saved = policy.possible_savings(rules([True, False, False]), state, costs, value, nbytes)
    saved_by = {tuple(picks): seconds for picks, seconds in zip(options.tolist(), saved)}
    assert saved_by[0, 0, 0, 0] == pytest.approx(0.0, abs=1e-6)
    assert saved_by[1, 1, 1, 1] == pytest.approx(0.2 - 0.16, rel=1e-4)
    assert saved_by[2, 2, 2, 2] == pytest.approx(0.2 - 0.14 / 0.8, rel=1e-4)
    assert saved_by[1, 1, 2, 2] == pytest.approx(0.2 - 0.15 / 0.9, rel=1e-4)


@pytest.mark.parametrize("truth", [(100, 80, 60), (50, 80, 60), (70, 52, 60), (52, 70, 58)])
def test_the_choice_is_right_although_the_model_is_not(truth):
    truth = np.array(truth) * 1e-3
    chosen, in_force = simulate(lambda step: truth, costs_of([0.060, 0.070, 0.055]), 150)
    assert chosen[-1] == np.argmin(truth)
    taken = truth[in_force]
    assert taken[50:].mean() < 1.03 * truth.min()  # trials included
    assert (np.diff(chosen) != 0).sum() <= 3


@pytest.mark.parametrize("off", [0.7, 1.4])
def test_what_is_tried_is_compared_with_a_choice_that_is_known_as_well(off):
    costs = np.array([0.100, 0.080, 0.070])
    for seed in range(5):
        chosen, in_force = simulate(lambda step: off * costs, costs_of(costs), 40, noise=0.1, seed=seed)
        assert set(chosen) == {2} and set(in_force) > {2}


def test_candidates_of_few_buckets_learn_no_less_than_those_of_none():
    ones, used = tf.ones([3]), constant([0.75, 0.25, 0.0])
    for known, weight in ((0.0, 1.0), (3.0, 0.25), (100.0, 0.05)):
        bias, _ = trials.measured(tnp, ones, ones, used, constant(1.4), tf.constant(True), constant(known))
        np.testing.assert_allclose(bias, 1.4 ** (weight * np.array([0.75, 0.5, 0.5])), rtol=1e-5)
    bias, age = trials.measured(tnp, ones, ones, used, constant(1.4), tf.constant(False), constant(0.0))
    np.testing.assert_allclose(bias, 1.4 ** np.array([0.75, 0.25, 0.0]), rtol=1e-5)
    assert age.numpy().tolist() == [0.0, 0.0, 2.0]


def test_what_is_far_slower_is_not_tried():
    truth = np.array([0.9, 0.3, 0.06])
    _, in_force = simulate(lambda step: truth, costs_of([0.8, 0.3, 0.07]), 100)
    assert set(in_force) == {2}


def test_what_became_faster_is_found_again():
    def truth(step):
        return np.array([0.100, 0.090, 0.080] if step < 60 else [0.100, 0.055, 0.080])

    chosen, _ = simulate(truth, costs_of([0.100, 0.090, 0.080]), 500)
    assert chosen[59] == 2 and chosen[-1] == 1


def test_numpy_follows_as_tensorflow_does():
    """Candidates that are not in the graph are compared in NumPy."""
    random, buckets, candidates = np.random.default_rng(3), 3, 4
    costs = policy.Costs(*random.uniform(1e-3, 1e-1, (4, buckets, candidates)).astype(np.float32))
    theirs = policy.initial(tf.constant([1, 1, 2]), candidates)
    mine = policy.State(*(np.asarray(part) for part in theirs))
    for step in range(20):
        wire, span, rest = (random.uniform(0.1, 0.4, 3) * (step != 5)).astype(np.float32)
        of_buckets = random.uniform(0.0, 0.1, (2, buckets)).astype(np.float32)
        sums = random.uniform(0.0, 1.0, (policy.progress.ROWS, candidates)).astype(np.float32)
        seen = policy.Measured(wire, span, *of_buckets, rest, sums)
        known = {"steady": np.bool_(step > 2), "before": np.array([1, 1, 2 if step % 4 else 3], np.int32)}
        mine = policy.follow(np, mine._replace(**known), seen, costs, 0.02)
        theirs = theirs._replace(**{name: tf.constant(value) for name, value in known.items()})
        theirs = policy.follow(
            tnp, theirs, policy.Measured(*map(tf.constant, seen)), policy.Costs(*map(tf.constant, costs)), 0.02
        )
        for name, array, tensor in zip(policy.State._fields, mine, theirs):
            np.testing.assert_allclose(array, tensor, rtol=1e-4, atol=1e-6, err_msg=name)
    prior = policy.Value(*random.uniform(0.1, 0.9, (2, candidates)).astype(np.float32))
    for array, tensor in zip(policy.value_of(np, mine, prior), policy.value_of(tnp, theirs, prior)):
        np.testing.assert_allclose(array, tensor, rtol=1e-4)
    assert all(part.dtype in (tf.int32, tf.bool, tf.float32) for part in theirs)
