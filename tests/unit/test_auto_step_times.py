"""How the time of a step is divided, against steps whose times are known."""

import numpy as np
import pytest

from hvd_compress.auto.step_times import UNTIMED, StepTimer

NOW = 1.7e9  # seconds since the epoch


def step(gradients, encode, wire, decode):
    """The timestamps of a step, float64 [4, B]: one processor encodes, and the wire carries one bucket at a time."""
    encoded = received = 0.0
    rows = []
    for gradient, encoding, crossing, decoding in zip(gradients, encode, wire, decode):
        ready = max(gradient, encoded)
        encoded = ready + encoding
        received = max(encoded, received) + crossing
        rows.append((ready, encoded, received, received + decoding))
    return NOW + np.array(rows).T


def of_step(stamps):
    """The times of one step."""
    timer = StepTimer()
    for _ in range(UNTIMED):
        timer.measure(stamps - 1.0)
    return timer.measure(stamps)


@pytest.mark.parametrize("buckets", [1, 2, 7])
def test_the_times_of_a_step(buckets):
    random = np.random.default_rng(buckets)
    gradients = np.cumsum(random.uniform(0.0, 0.02, buckets))
    encode, wire, decode = random.uniform(0.001, 0.02, (3, buckets))
    stamps = step(gradients, encode, wire, decode)
    times = of_step(stamps)
    np.testing.assert_allclose(times.coding, encode + decode, atol=1e-6)
    np.testing.assert_allclose(times.wire, wire, atol=1e-6)
    ends = gradients[0] + np.cumsum(times.waits + encode)  # of the encoding
    np.testing.assert_allclose(ends, stamps[1] - NOW, atol=1e-6)
    assert times.span == pytest.approx(stamps[3].max() - stamps[0, 0], abs=1e-6)


def test_no_time_is_negative():
    """TensorFlow may take a timestamp late, so that they are not in order."""
    times = of_step(NOW + np.array([[0.0, 0.2], [0.3, 0.1], [0.2, 0.1], [0.1, 0.4]]))
    assert all((part >= 0.0).all() for part in (times.waits, times.coding, times.wire))
    assert times.span == pytest.approx(0.4, abs=1e-6)


def test_the_rest_of_a_step_and_steps_that_do_not_count():
    timer = StepTimer()
    begun = NOW

    def next_step(rest, span):
        nonlocal begun
        stamps = begun + np.array([[0.0], [0.0], [span], [span]])
        begun += span + rest
        times = timer.measure(stamps)
        return times.rest, times.span

    steps = [(0.2, 0.1), (0.3, 0.1), (0.0, 0.2), (-0.05, 0.4), (0.1, 0.1)]
    measured = [next_step(*step) for step in steps]
    # A step that began before the one before had ended has no rest before it.
    expected = [(0.0, 0.0), (0.0, 0.0), (0.3, 0.2), (0.0, 0.4), (0.0, 0.1)]
    np.testing.assert_allclose(measured, expected, atol=1e-6)
    timer.restart()
    measured = [next_step(0.5, 0.1) for _ in range(UNTIMED + 1)]
    np.testing.assert_allclose(measured, [(0.0, 0.0)] * UNTIMED + [(0.5, 0.1)], atol=1e-6)
