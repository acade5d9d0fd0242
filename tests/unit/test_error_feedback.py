"""Error feedback on one process: what it promises, and the example that shows why it is needed."""

import numpy as np
import pytest
import reference
import tensorflow as tf
from compressors import seeds
from specs import ALL

import hvd_compress as hvdc
from hvd_compress.compressors import Seeds

parse = hvdc.Compression.parse
FED_BACK = [spec for spec in ALL if parse(spec).error_feedback]


def sign_descent(with_residual, steps=600, epsilon=0.5):
    """Minimizes epsilon |x1 + x2| + |x1 - x2| from (1, 1); returns the path of x.

    Karimireddy et al. 2019, Counterexample 2; `onebit` is its scaled sign.
    """
    onebit = hvdc.Compression.onebit
    x, e, path = np.array([1.0, 1.0]), tf.zeros([2]), []

    @tf.function
    def send(p):
        parts, ctx, lost, _ = onebit.encode(p, seeds(), keep=True)
        return onebit.decode(parts, ctx), lost

    for t in range(steps):
        path.append(x)
        sum_sign, difference_sign = (1.0 if s >= 0 else -1.0 for s in (x[0] + x[1], x[0] - x[1]))
        gradient = epsilon * sum_sign * np.array([1, 1]) + difference_sign * np.array([1, -1])
        rate = 0.1 / np.sqrt(1 + t / 10)
        sent, lost = send(tf.constant(rate * gradient, tf.float32) + e)
        x = x - sent.numpy()
        e = lost if with_residual else e
    return np.array(path)


def test_sign_descent_without_a_residual_never_gets_anywhere():
    path = sign_descent(with_residual=False)
    np.testing.assert_allclose(path.sum(1), 2.0, atol=1e-5)
    assert np.abs(np.diff(path, axis=0)).min() > 1e-3  # though it does move


def test_sign_descent_with_a_residual_converges():
    path = sign_descent(with_residual=True)
    value = 0.5 * np.abs(path.sum(1)) + np.abs(path[:, 0] - path[:, 1])
    assert value[0] == 1.0
    assert value[-100:].max() < 0.1
    assert np.abs(path[-100:].sum(1)).max() < 0.1


@pytest.mark.parametrize("spec", FED_BACK)
def test_nothing_is_lost_over_many_steps(spec):
    """Sum of what was sent plus the last residual is the sum of the gradients."""
    compressor = parse(spec)
    shape, steps = (64, 32), 20

    @tf.function
    def step(gradient, e, t):
        parts, ctx, lost, _ = compressor.encode(gradient, Seeds(t, t), e, keep=True)
        return compressor.decode(parts, ctx), lost

    e = tf.zeros(shape)
    sent, total = np.zeros(shape), np.zeros(shape)
    norms = []
    for t in range(steps):
        gradient = reference.vector("normal", 2048, seed=t).reshape(shape)
        decoded, e = step(tf.constant(gradient), e, tf.constant(t))
        sent += decoded.numpy()
        total += gradient
        norms.append(np.linalg.norm(e))
    np.testing.assert_allclose(sent + e.numpy(), total, atol=1e-5 * steps)
    assert np.isfinite(norms).all()


@pytest.mark.parametrize("spec", FED_BACK)
def test_residuals_stay_bounded(spec):
    """With a contraction of factor 1 - delta, ||e|| stays below 2 ||g|| / delta (Karimireddy 2019, Lemma 3)."""
    compressor = parse(spec)

    @tf.function
    def step(gradient, e, t):
        return compressor.encode(gradient, Seeds(t, t), e, keep=True).residual

    e, norms = tf.zeros([64, 32]), []
    for t in range(150):
        e = step(tf.constant(reference.vector("normal", 2048, seed=t % 10).reshape(64, 32)), e, tf.constant(t))
        norms.append(np.linalg.norm(e))
    assert np.mean(norms[-30:]) < 1.5 * np.mean(norms[-80:-50]) + 1e-3
