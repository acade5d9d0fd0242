"""The steps of error feedback and momentum correction, against NumPy."""

import numpy as np
import pytest
import tensorflow as tf

from hvd_compress.compressors import error_feedback
from hvd_compress.engine import transforms


@pytest.fixture
def pair():
    rng = np.random.default_rng(0)
    return rng.standard_normal((2, 30)).astype(np.float32)


@pytest.mark.parametrize("decay", [1.0, 0.5, 0.0])
def test_add(pair, decay):
    total = error_feedback.add(tf.constant(pair[0]), tf.constant(pair[1]), decay)
    np.testing.assert_allclose(total, pair[0] + decay * pair[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_accelerate(pair, momentum):
    velocity = transforms.accelerate(tf.constant(pair[0]), tf.constant(pair[1]), momentum)
    np.testing.assert_allclose(velocity, momentum * pair[1] + pair[0], rtol=1e-6, atol=1e-6)


def test_mask_clears_the_velocity_of_what_was_sent(pair):
    velocity, sent = pair
    sent[::3] = 0
    masked = transforms.mask(tf.constant(velocity), tf.constant(sent))
    np.testing.assert_array_equal(masked, np.where(sent == 0, velocity, 0))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("n", [1, 7, 1000])
def test_all_finite_finds_a_single_bad_value(bad, n):
    x = np.full(n, 3e38, np.float32)
    assert bool(error_feedback.all_finite(tf.constant(x)))
    x[n // 2] = bad
    assert not bool(error_feedback.all_finite(tf.constant(x)))
