"""Candidates of `auto` that are for all buckets at once, against exhaustive search and simulations in NumPy."""

import itertools

import numpy as np
import pytest
import reference
import tensorflow as tf

import hvd_compress as hvdc
from hvd_compress.auto import model_wide as model_wide_rules
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
def test_what_a_gradient_loses_by_itself_is_what_encode_loses(shape):
    compressor = hvdc.Compression.powersgd(2)
    x = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    rough = compressor.decompress(*compressor.compress(tf.constant(x)))
    lost = np.sum((x - rough) ** 2) / np.sum(x**2)
    assert float(compressor.lost_share(tf.constant(x))) == pytest.approx(lost, abs=1e-5)
    assert 0.0 <= float(compressor.lost_share(tf.zeros(shape))) <= 1.0


@pytest.mark.parametrize("seed", range(8))
def test_best_compares_the_whole_with_mixed_choices(seed):
    """All crosses at the end of the backward pass, or each bucket as soon as it is there."""
    random = np.random.default_rng(seed)
    seconds = random.exponential(1.0, (4, 3))
    seconds[:, WHOLE] = 0.0
    seconds[-1, WHOLE] = total = random.exponential(3.0)
    waits, lost = random.exponential(1.0, 4), np.zeros((4, 3))
    found = policy.best(
        tf.ones([4, 3], tf.bool),
        PLAIN,
        constant(waits),
        constant(seconds),
        constant(lost),
        tf.ones([4]),
        0.0,
        WHOLES,
    )
    options = [(picks, reference.queue_after(waits, seconds[range(4), picks])) for picks in ([NONE] * 4, [FLAT] * 4)]
    options.append(([WHOLE] * 4, waits.sum() + total))
    assert found.numpy().tolist() == min(options, key=lambda option: option[1])[0]


def test_what_is_not_admitted_is_not_chosen():
    seconds = constant([[5.0, 2.0, 0.0]] * 2 + [[5.0, 2.0, 0.1]])
    args = tf.zeros([3]), seconds, tf.zeros([3, 3]), tf.ones([3]), 0.0
    for admitted, expected in (
        ([True, True, True], WHOLE), ([True, True, False], FLAT), ([True, False, False], NONE),
        ([False, False, True], WHOLE),
    ):  # fmt: skip
        found = policy.best(tf.constant([admitted] * 3), PLAIN, *args, WHOLES)
        assert found.numpy().tolist() == [expected] * 3
    # Two flat ones, neither of which is admitted everywhere.
    admitted = tf.constant([[True, False, False], [False, True, False]])
    found = policy.best(admitted, [False] * 3, *(x[:2] if isinstance(x, tf.Tensor) else x for x in args), WHOLES)
    assert found.numpy().tolist() == [0, 1]


@pytest.mark.parametrize("place", [0, 1])
def test_the_whole_is_no_part_of_a_mix(place):
    """Without one that is plain, and where the flat one is not admitted in each bucket."""
    whole = [c == place for c in range(2)]
    seconds = np.where(whole, [[0.0], [3.0]], 1.0)  # what is whole stands with the last bucket
    admitted = tf.constant([[is_whole or bucket == 1 for is_whole in whole] for bucket in range(2)])
    args = [False] * 2, tf.zeros([2]), constant(seconds), tf.zeros([2, 2]), tf.ones([2]), 0.0, whole
    assert policy.best(admitted, *args).numpy().tolist() == [place] * 2
    assert policy.best(tf.ones([2, 2], tf.bool), *args).numpy().tolist() == [1 - place] * 2


def admitted_by_hand(through, nbytes, target):
    """All combinations that are allowed: each bucket's own of the flat ones, or the one for all."""
    mean = np.average(through[:, WHOLE], weights=nbytes)
    flat = through[:, :WHOLE] >= target
    whole = mean >= target
    if not flat.any(1).all() and not whole:
        best = through[:, :WHOLE].max(1)
        whole = mean > np.average(best, weights=nbytes)
        flat |= (through[:, :WHOLE] == best[:, None]) & (not whole)
    return flat, whole


@pytest.mark.parametrize("seed", range(20))
def test_admitted_is_what_reaches_the_target_or_else_loses_least(seed):
    random = np.random.default_rng(seed)
    through = random.uniform(0, 1, (3, 3)).astype(np.float32)
    nbytes = random.uniform(1, 10, 3).astype(np.float32)
    target = random.uniform(0.2, 1.0)
    lost = model_wide_rules.averaged(1.0 - constant(through), constant(nbytes), WHOLES)
    np.testing.assert_allclose(lost[:, WHOLE], [1 - np.average(through[:, WHOLE], weights=nbytes)] * 3, rtol=1e-5)
    np.testing.assert_array_equal(lost[:, :WHOLE], 1.0 - through[:, :WHOLE])
    not_in_use = tf.fill([3], 99)
    reached = policy.reached(lost, not_in_use, constant(target))
    found = model_wide_rules.admit(reached, lost, constant(nbytes), WHOLES).numpy()
    flat, whole = admitted_by_hand(through, nbytes, target)
    assert (found[:, WHOLE] == whole).all()
    usable = flat.any(1).all()
    assert found[:, :WHOLE].any(1).all() == usable
    if usable:
        np.testing.assert_array_equal(found[:, :WHOLE], flat)


def test_which_choices_are_allowed():
    admitted = np.array([[True, False, True], [False, True, True]])
    options = np.array(list(itertools.product(range(3), repeat=2)), np.int32)
    found = model_wide_rules.allowed(tf.constant(options), tf.constant(admitted)).numpy()
    assert found.tolist() == [bool(admitted[0, a] and admitted[1, b]) for a, b in options]


def test_what_was_lost_in_use_counts_for_all_buckets():
    costs = policy.Costs(*(constant([[0.0, 1e-3]] * 2) for _ in range(4)))
    state = policy.initial(tf.constant([1, 1]), 2)
    state = state._replace(energy=constant([2.0, 0.0]), lost=constant([[0.2, 1.0], [0.0, 0.0]]))
    seen = policy.Measured(
        constant(0.0), constant(0.0), tf.zeros([2]), tf.zeros([2]), tf.constant(0), constant([0.4, 3.0, 4.0]),
        constant([8.0, 10.0]),
    )  # fmt: skip
    after = policy.follow(state, seen, costs)
    shares = policy.shares(after, constant([[0.5, 0.9]] * 2)).numpy()
    # In use: 0.5 before, 0.8 now; what the gradient of bucket 0 lost by itself (3 of 4) does not count.
    np.testing.assert_allclose(shares[0, 1], 0.5 + 0.3 * (0.8 - 0.5), rtol=1e-5)
    np.testing.assert_allclose(shares[0, 0], (0.7 * 0.2 + 0.3 * 0.4) / (0.7 * 2 + 0.3 * 4), rtol=1e-5)
    np.testing.assert_allclose(shares[1], [0.5, 0.9])  # nothing of this bucket was tried yet
    # Not measured: what was tried counts.
    after = policy.follow(state, seen._replace(model_wide=tf.zeros([2])), costs)
    np.testing.assert_allclose(
        policy.shares(after, tf.zeros([2, 2]))[0, 1], (0.7 * 1 + 0.3 * 3) / (0.7 * 2 + 0.3 * 4), rtol=1e-5
    )


def simulate(truth, predicted, steps, whole=WHOLES):
    """Steps with `auto` where all with one candidate take `truth(step)[c]` seconds; what was chosen and in force."""
    random, buckets = np.random.default_rng(0), 4
    table = np.tile(np.array(predicted) / buckets, (buckets, 1))
    if any(whole):
        table[:-1, WHOLE], table[-1, WHOLE] = 0.0, predicted[WHOLE]
    costs = policy.Costs(*map(constant, (0.3 * table, 0 * table, 0.7 * table, 0 * table)))
    state = policy.initial(tf.fill([buckets], NONE), 3)
    votes, chosen, in_force = [(state.choice, tf.constant(-1))], [], []

    @tf.function(autograph=False)
    def learn(state, wire, span, choice, trial):
        seen = policy.Measured(
            wire, span, tf.zeros([buckets]), tf.zeros([buckets]), tf.constant(0), tf.zeros([4]), tf.zeros([2])
        )
        state = policy.follow(state, seen, costs)
        state = policy.in_step(state, choice, trial, tf.constant(True))
        lost = tf.zeros([buckets, 3])
        return policy.propose(state, costs, PLAIN, lost, tf.ones([buckets]), constant(0.0), 0.02, whole)

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
