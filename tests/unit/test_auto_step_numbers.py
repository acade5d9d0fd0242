"""What ranks send each other in a step of auto, against the numbers that went in."""

import numpy as np
import pytest
import tensorflow as tf
import tensorflow.experimental.numpy as tnp

from hvd_compress.auto.progress import ROWS
from hvd_compress.auto.step_numbers import StepNumbers
from hvd_compress.auto.step_times import StepTimes

BUCKETS, CANDIDATES = 3, 4


def times(random, wire):
    waits, coding = random.uniform(0.0, 0.1, (2, BUCKETS))
    return StepTimes(waits, coding, np.array(wire), 0.2, 0.3)


@pytest.mark.parametrize("xp", [np, tnp], ids=["numpy", "tensorflow"])
@pytest.mark.parametrize("ranks", [2, 5, 40])
def test_the_mean_of_all_ranks(ranks, xp):
    random = np.random.default_rng(ranks)
    wires = random.uniform(0.1, 0.2, (ranks, BUCKETS))
    measured = [times(random, wire) for wire in wires]
    probes = random.normal(size=(ranks, ROWS, CANDIDATES))
    choices = random.integers(0, CANDIDATES, (ranks, BUCKETS))
    wanted = random.integers(0, 2, (ranks, CANDIDATES + 2)).astype(np.float32)
    formats = [StepNumbers(ranks, rank, BUCKETS, CANDIDATES) for rank in range(ranks)]
    sent = [
        numbers.pack(choices[r], np.int32(r % CANDIDATES), probes[r], measured[r], wanted[r])
        for r, numbers in enumerate(formats)
    ]
    mean = np.mean(sent, 0, np.float32)
    assert mean.shape == (formats[0].size,)

    choice, trial, agreed = formats[-1].unpack(xp, mean if xp is np else tf.constant(mean))
    np.testing.assert_array_equal(choice, choices[0])  # rank 0 decides
    assert int(trial) == 0
    np.testing.assert_allclose(agreed.progress, probes.mean(0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(agreed.exchange, np.mean([t.wire + t.coding for t in measured], 0), rtol=1e-5)
    np.testing.assert_allclose(agreed.waits, np.mean([t.waits for t in measured], 0), rtol=1e-5)
    assert [float(agreed.span), float(agreed.rest)] == pytest.approx([0.2, 0.3], rel=1e-5)
    # The smallest of the ranks; with more than 16 of them, the smallest mean of those that share a place.
    shares = [wires.sum(1)[place::16].mean() for place in range(min(ranks, 16))]
    assert float(agreed.wire) == pytest.approx(min(shares), rel=1e-5)

    span, of_rank_0 = formats[-1].span_and_wanted(mean)
    assert span == pytest.approx(0.2, rel=1e-5)
    np.testing.assert_array_equal(np.array(of_rank_0) > 0.0, wanted[0] > 0.0)


def test_before_the_first_step_there_is_no_choice():
    numbers = StepNumbers(2, 0, BUCKETS, CANDIDATES)
    choice, trial, measured = numbers.unpack(tnp, tf.zeros([numbers.size]))
    assert choice.numpy().tolist() == [-1] * BUCKETS and int(trial) == -1
    assert not any(np.any(np.asarray(part)) for part in measured)


def test_what_is_not_finite_is_sent_as_zero():
    numbers = StepNumbers(2, 0, 1, 2)
    unknown = StepTimes.unknown(1)._replace(span=float("nan"))
    probe = np.full((ROWS, 2), np.inf)
    sent = numbers.pack(np.array([1]), np.int32(-1), probe, unknown, np.ones(4))
    assert np.isfinite(sent).all() and sent.tolist().count(0.0) == numbers.size - 1 - 4
    # Single numbers of a candidate would say something else than all of them.
    probe = np.ones((ROWS, 2))
    probe[0, 1] = np.nan
    sent = numbers.progress(numbers.pack(np.array([1]), np.int32(-1), probe, unknown, np.ones(4)))
    np.testing.assert_array_equal(sent, np.tile([1.0, 0.0], [ROWS, 1]))
