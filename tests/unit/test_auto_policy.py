"""The numerics of `auto`, against simulations and exhaustive search in NumPy."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from hvd_compress.auto import policy


def constant(x):
    return tf.constant(np.asarray(x), tf.float32)


def queue(waits, exchange):
    """When the last bucket is there, bucket by bucket."""
    ready = free = 0.0
    for wait, seconds in zip(waits, exchange):
        ready += wait
        free = max(free, ready) + seconds
    return free


@pytest.mark.parametrize("buckets", [1, 2, 5, 18])
def test_makespan_is_that_of_a_queue(buckets):
    times = np.random.default_rng(buckets).exponential(1.0, (2, 50, buckets))
    found = policy.makespan(*map(constant, times)).numpy()
    np.testing.assert_allclose(found, [queue(*times[:, i]) for i in range(50)], rtol=1e-5)


def measured(latency, per_byte, messages, transfer, random, noise):
    return (latency * messages + per_byte * transfer) * np.exp(noise * random.standard_normal())


@pytest.mark.parametrize("change", [0.1, 0.5, 2.0, 10.0])
def test_a_link_that_changes_is_followed_within_ten_steps(change):
    random = np.random.default_rng(0)
    moments, factors = tf.zeros([5]), tf.ones([2])
    messages, transfer = 2e-3, 50e-3
    for step in range(60):
        seconds = measured(1.0, 1.0 if step < 50 else change, messages, transfer, random, 0.05)
        moments, factors = policy.fit(
            moments, factors, constant(messages), constant(transfer), constant(seconds)
        )
        if step == 49:
            np.testing.assert_allclose(factors[1], 1.0, rtol=0.1)
    predicted = float(factors[0]) * messages + float(factors[1]) * transfer
    np.testing.assert_allclose(predicted, messages + change * transfer, rtol=0.5 if change > 5 else 0.3)


def test_latency_and_bandwidth_are_told_apart_by_exchanges_of_different_size():
    random = np.random.default_rng(1)
    moments, factors = tf.zeros([5]), tf.ones([2])
    for step in range(100):
        messages, transfer = 2e-3, 50e-3 if step % 2 else 1e-3
        seconds = measured(3.0, 0.5, messages, transfer, random, 0.02)
        moments, factors = policy.fit(
            moments, factors, constant(messages), constant(transfer), constant(seconds)
        )
    np.testing.assert_allclose(factors, [3.0, 0.5], rtol=0.15)


def test_a_step_that_was_held_up_and_one_without_times_change_little():
    moments, factors = tf.zeros([5]), tf.ones([2])
    one = constant(1e-3), constant(20e-3)
    for _ in range(10):
        moments, factors = policy.fit(moments, factors, *one, constant(21e-3))
    _, held_up = policy.fit(moments, factors, *one, constant(1.0))
    assert 0.9 < float(held_up[1]) < 1.5
    _, unknown = policy.fit(moments, factors, *one, constant(0.0))
    np.testing.assert_allclose(unknown, factors, rtol=0.01)


def world(seed, buckets=4, candidates=3):
    """Costs, energies and the backward pass of some machine."""
    random = np.random.default_rng(seed)
    costs = policy.Costs(*(constant(random.exponential(1.0, (buckets, candidates))) for _ in range(4)))
    lost = random.uniform(0, 1, (buckets, candidates))
    lost[:, 0] = 0.0
    waits = random.exponential(1.0, buckets)
    nbytes = random.uniform(1, 10, buckets)
    return costs, constant(lost), constant(waits), constant(nbytes)


@pytest.mark.parametrize("seed", range(8))
def test_best_is_the_cheapest_division_that_is_allowed(seed):
    costs, lost, waits, nbytes = world(seed)
    random = np.random.default_rng(100 + seed)
    allowed = random.uniform(0, 1, (4, 3)) < 0.7
    allowed[:, 0] = True  # no compression
    factors = constant([1.5, 0.7])
    seconds = policy.predicted(costs, factors)
    found = policy.best(
        tf.constant(allowed), [True, False, False], waits, seconds, lost, nbytes, 0.05
    ).numpy()
    wire = 1.5 * costs.messages.numpy() + 0.7 * costs.transfer.numpy()
    encode, decode = costs.encode.numpy(), costs.decode.numpy()

    def price(picks):
        rows = range(4), list(picks)
        seconds = queue(waits.numpy(), encode[rows] + wire[rows] + decode[rows])
        return seconds * (1 + 0.05 * (lost.numpy()[rows] * nbytes.numpy()).sum() / nbytes.numpy().sum())

    def admitted(bucket, candidate):
        others = [c for c in (1, 2) if allowed[bucket, c]]
        if candidate in others:
            return candidate
        alone = [encode[bucket, c] + wire[bucket, c] + decode[bucket, c] for c in others]
        return others[int(np.argmin(alone))] if others else 0

    divisions = [[a] * n + [b] * (4 - n) for a, b in itertools.product(range(3), repeat=2) for n in range(5)]
    options = [[admitted(b, c) for b, c in enumerate(picks)] for picks in divisions] + [[0] * 4]
    assert price(found) == pytest.approx(min(map(price, options)), rel=1e-5)


def test_what_hides_behind_the_backward_pass_is_not_compressed_harder():
    # Candidate 1 loses more and is faster on the wire; only the last bucket's wire time shows.
    args = constant([[1.1, 0.2]] * 3), constant([[0.01, 0.9]] * 3), constant([1.0] * 3), 0.02
    allowed = tf.constant([[True, True]] * 3)
    late = policy.best(allowed, [False, False], constant([0.0, 5.0, 5.0]), *args)
    assert late.numpy().tolist() == [0, 0, 1]
    at_once = policy.best(allowed, [False, False], constant([0.0, 0.0, 0.0]), *args)
    assert at_once.numpy().tolist() == [1, 1, 1]


def test_admitted_is_what_lets_enough_through():
    lost = constant([[0.0, 0.2, 0.95], [0.0, 0.96, 0.99]])
    found = policy.admit(lost, tf.constant([2, 0]), constant(0.1)).numpy()
    # 5% is below the target of 10%, but at least half of it, and in use.
    assert found.tolist() == [[True, True, True], [True, False, False]]


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


def test_what_was_tried_replaces_the_prior():
    state = policy.initial(tf.constant([1, 1]), 2)
    costs = policy.Costs(*(constant([[0.0, 1e-3]] * 2) for _ in range(4)))
    prior = constant([[0.0, 0.9]] * 2)
    np.testing.assert_allclose(policy.shares(state, prior), prior)
    seen = policy.Measured(
        constant(0.0), constant([0.0, 0.0]), constant([0.0, 0.0]), tf.constant(1),
        constant([0.0, 2.0, 8.0]),
    )  # fmt: skip
    state = policy.follow(state, seen, costs)
    np.testing.assert_allclose(policy.shares(state, prior), [[0.0, 0.9], [0.0, 0.25]])
