"""Candidates of `auto` that are for all buckets at once, against exhaustive search and simulations in NumPy."""

import numpy as np
import pytest
import reference
import tensorflow as tf
import tensorflow.experimental.numpy as tnp

import hvd_compress as hvdc
from hvd_compress.auto import policy

NONE, FLAT, WHOLE = range(3)
PLAIN, WHOLES = [True, False, False], [False, False, True]


def constant(x):
    return tf.constant(np.asarray(x), tf.float32)


@pytest.mark.parametrize("shapes", [[(80, 50)], [(3, 3, 8, 16), (40,), (30, 2), (60, 60)]])
def test_what_white_noise_loses(shapes):
    compressor, random = hvdc.Compression.powersgd(2), np.random.default_rng(0)
    through = total = 0.0
    for shape in shapes:
        for _ in range(200):
            x = random.standard_normal(shape)
            total += np.sum(x**2)
            if shape in ((40,), (30, 2)):  # sent as they are
                through += np.sum(x**2)
                continue
            x = x.reshape(-1, shape[-1])
            left, _ = np.linalg.qr(x @ random.standard_normal((x.shape[1], 2)))
            through += np.sum((left.T @ x) ** 2)
    assert compressor.noise_loss(shapes) == pytest.approx(1.0 - through / total, abs=3e-3)


@pytest.mark.parametrize("shape", [(40, 30), (3, 3, 8, 16), (17,), (30, 2)])
def test_alone_it_loses_what_is_orthogonal_to_the_left_factor(shape):
    """Two steps of Vogels et al. 2019, Algorithm 1, of one rank."""
    compressor, random = hvdc.Compression.powersgd(2), np.random.default_rng(1)
    factors = compressor.initial_factors([shape])
    right = np.array(factors, np.float64).reshape(2, -1).T
    for _ in range(2):
        x = random.standard_normal(shape).astype(np.float32)
        lost, factors = compressor.encode_alone(tf.constant(x), factors)
        assert lost.shape == shape
        if shape in ((17,), (30, 2)):  # sent as they are
            assert not np.any(lost)
            continue
        m = x.reshape(-1, shape[-1]).astype(np.float64)
        left, _ = np.linalg.qr(m @ right)
        right = m.T @ left
        np.testing.assert_allclose(np.reshape(lost, m.shape), m - left @ right.T, atol=1e-4)


def test_alone_it_keeps_the_factors_of_what_is_zero():
    compressor, random = hvdc.Compression.powersgd(2), np.random.default_rng(1)
    factors = compressor.initial_factors([(40, 30)])
    lost, kept = compressor.encode_alone(tf.zeros([40, 30]), factors)
    np.testing.assert_array_equal(kept, factors)
    assert not np.any(lost)
    # A matrix of rank 1 has one new vector.
    x = np.outer(random.standard_normal(40), random.standard_normal(30)).astype(np.float32)
    lost, kept = compressor.encode_alone(tf.constant(x), factors)
    assert np.abs(lost).max() < 1e-5 * np.abs(x).max()
    new, old = np.reshape(kept, [2, 30]), np.reshape(factors, [2, 30])
    assert abs(np.corrcoef(new[0], x[0])[0, 1]) > 0.999
    np.testing.assert_array_equal(new[1], old[1])


def best(seconds, waits, allowed=(True, True, True), whole=WHOLES):
    """The choice where all candidates make the same progress."""
    costs = policy.Costs(constant(seconds), *(tf.zeros_like(constant(seconds)) for _ in range(3)))
    state = policy.initial(tf.zeros([len(waits)], tf.int32), 3)._replace(waits=constant(waits), rest=constant(1e-6))
    value = policy.Value(tf.ones([3]), tf.zeros([3]))
    rules = policy.Rules(PLAIN, whole, 0.0)
    return policy.best(rules, tf.constant(allowed), state, costs, value, tf.ones([len(waits)]))[0].numpy().tolist()


@pytest.mark.parametrize("seed", range(8))
def test_best_compares_the_whole_with_other_choices(seed):
    """All crosses at the end of the backward pass, or each bucket as soon as it is there."""
    random = np.random.default_rng(seed)
    seconds = random.exponential(1.0, (4, 3))
    seconds[:, WHOLE] = 0.0
    seconds[-1, WHOLE] = total = random.exponential(3.0)
    waits = random.exponential(1.0, 4)
    options = [(picks, reference.queue_after(waits, seconds[range(4), picks])) for picks in ([NONE] * 4, [FLAT] * 4)]
    options.append(([WHOLE] * 4, waits.sum() + total))
    assert best(seconds, waits) == min(options, key=lambda option: option[1])[0]


def test_what_is_not_admitted_is_not_chosen():
    seconds = [[5.0, 2.0, 0.0]] * 2 + [[5.0, 2.0, 0.1]]
    for allowed, expected in (
        ([True, True, True], WHOLE), ([True, True, False], FLAT), ([True, False, False], NONE),
        ([False, False, True], WHOLE),
    ):  # fmt: skip
        assert best(seconds, [0.0] * 3, allowed) == [expected] * 3


def simulate(truth, predicted, steps, whole=WHOLES):
    """Steps with `auto` where all with one candidate take `truth(step)[c]` seconds; what was chosen and in force."""
    random, buckets = np.random.default_rng(0), 4
    table = np.tile(np.array(predicted) / buckets, (buckets, 1))
    if any(whole):
        table[:-1, WHOLE], table[-1, WHOLE] = 0.0, predicted[WHOLE]
    costs = policy.Costs(*map(constant, (0.3 * table, 0 * table, 0.7 * table, 0 * table)))
    state = policy.initial(tf.fill([buckets], NONE), 3)
    votes, chosen, in_force = [(state.choice, tf.constant(-1))], [], []

    rules, value = policy.Rules(PLAIN, whole, 0.02), policy.Value(tf.ones([3]), tf.zeros([3]))

    @tf.function(autograph=False)
    def learn(state, wire, span, choice, trial):
        zeros = tf.zeros([buckets])
        seen = policy.Measured(wire, span, zeros, zeros, constant(1e-4), tf.zeros([policy.progress.ROWS, 3]))
        state = policy.follow(tnp, state, seen, costs)
        state = policy.in_step(state, choice, trial, tf.constant(True))
        return policy.propose(rules, state, costs, value, tf.ones([buckets]), constant(0.0), range(3))

    for step in range(steps):
        now = int(state.before[0])
        span = truth(step)[now] * np.exp(0.03 * random.standard_normal())
        wire = max(1e-4, span - 0.3 * predicted[now])
        state, choice, tried = learn(state, constant(wire), constant(span), *votes.pop(0))
        votes.append((choice, tried))
        for log, picks in ((chosen, state.choice), (in_force, state.now)):
            picks = picks.numpy()
            assert len(set(picks)) == 1 or not any(whole) or WHOLE not in picks
            log.append(int(picks[0]))
    return np.array(chosen), np.array(in_force)


@pytest.mark.parametrize("truth, predicted", [((100, 90, 60), (100, 90, 100)), ((100, 60, 90), (100, 80, 70))])
def test_the_whole_is_tried_chosen_and_given_up_as_any_other(truth, predicted):
    """As a candidate for each bucket that takes as long for all of them."""
    predicted = [seconds * 1e-3 for seconds in predicted]

    def taken(step):
        return [seconds * 1e-3 for seconds in (truth if step < 150 else (100, 90, 200))]

    chosen, in_force = simulate(taken, predicted, 300)
    assert WHOLE in chosen[:150] and chosen[-1] != WHOLE
    for mine, flat in zip((chosen, in_force), simulate(taken, predicted, 300, [False] * 3)):
        np.testing.assert_array_equal(mine, flat)


def test_what_is_far_slower_is_not_tried():
    _, in_force = simulate(lambda step: [0.1, 0.06, 0.3], [0.1, 0.06, 0.3], 100)
    assert WHOLE not in in_force


def test_candidates_that_share_no_buckets_are_refused():
    with pytest.raises(ValueError, match=r"block_sparse:ratio=0.1,block=8 needs each gradient in its own shape"):
        hvdc.Compression.auto(candidates=["none", "block_sparse:ratio=0.1,block=8"])
    auto = hvdc.Compression.parse("auto:candidates=(none|powersgd:rank=2)")
    assert auto == hvdc.Compression.auto(candidates=["none", hvdc.Compression.powersgd(2)])
    assert auto.model_wide_candidates == [False, True] and hvdc.Compression.parse(auto.spec) == auto
