"""The linear quantizer of blocks: exactness, error bounds, unbiasedness and QSGD's variance bounds."""

import numpy as np
import pytest
import reference
import tensorflow as tf

from hvd_compress.kernels import linear, noise

ROWS = 4000
BITS = range(1, 9)


def quantize(values, bits, seed=None):
    """`values` [rows, block] to levels and back, as float64."""
    values = tf.constant(values, tf.float32)
    low, high, finite = linear.extremes(values)
    assert finite
    np.testing.assert_array_equal(low[:, 0], values.numpy().min(1))
    np.testing.assert_array_equal(high[:, 0], values.numpy().max(1))
    step, base = linear.grid(low, high, bits, stochastic=seed is not None)
    draws = None
    if seed is not None:
        size = values.shape[0] * values.shape[1]
        draws = tf.reshape(noise.uniform(tf.constant(seed), size), values.shape)
    codes, decoded = linear.quantize(values, step, base, bits, draws)
    assert codes.dtype == tf.uint8
    assert int(tf.reduce_max(codes)) < 2**bits
    np.testing.assert_array_equal(decoded, linear.dequantize(codes, step, base))
    return decoded.numpy().astype(np.float64)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan, -np.nan])
@pytest.mark.parametrize("column", [0, 5, 15])
def test_a_value_that_is_not_finite_is_found(bad, column):
    values = np.float32([[1.0, -2.0] * 8, [0.0, 3e38] * 8])
    assert linear.extremes(tf.constant(values))[2]
    values[1, column] = bad
    assert not linear.extremes(tf.constant(values))[2]


def ranges(values):
    """Largest minus smallest value of each row."""
    wide = np.asarray(values, np.float32).astype(np.float64)
    return wide.max(1, keepdims=True) - wide.min(1, keepdims=True)


def data(kind, rows=5, block=128):
    return np.stack([reference.vector(kind, block, seed) for seed in range(rows)])


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("seed", [None, 3])
def test_zero_and_constant_blocks_are_exact(bits, seed):
    constants = [0.0, -0.0, 1.0, -1.0, 0.1, -3.3, 1e-30, -1e-30, 1e30, 1e38, -1e38, 3.4e38, -3.4e38]
    values = np.repeat(np.float32(constants)[:, None], 16, axis=1)
    np.testing.assert_array_equal(quantize(values, bits, seed), values)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("kind", reference.KINDS)
def test_nearest_is_off_by_half_a_step_at_most_and_never_by_more_than_the_value(bits, kind):
    values = data(kind)
    error = np.abs(quantize(values, bits) - values)
    largest = np.abs(values).max(1, keepdims=True)
    rounding = 2.0**-22 * largest.astype(np.float64) + reference.SMALLEST_NORMAL
    assert (error <= np.abs(values) * (1 + 2.0**-22) + reference.SMALLEST_NORMAL).all()
    step = ranges(values) / (2**bits - 1)
    resolved = (step > 2.0**-120) & (step < 2.0**126)  # beyond these a block decodes to zero
    assert (error <= step / 2 + rounding)[np.broadcast_to(resolved, error.shape)].all()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("kind", reference.KINDS)
def test_stochastic_is_off_by_less_than_a_step(bits, kind):
    values = data(kind)
    error = np.abs(quantize(values, bits, seed=1) - values)
    step = ranges(values) / max(1, 2**bits - 2)
    rounding = 2.0**-22 * np.abs(values).max(1, keepdims=True).astype(np.float64) + reference.SMALLEST_NORMAL
    resolved = (step > 2.0**-120) & (step < 2.0**126)
    assert (error < step + rounding)[np.broadcast_to(resolved, error.shape)].all()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("seed", [None, 9])
@pytest.mark.parametrize("kind", ["normal", "sparse", "huge"])
def test_zeros_stay_zeros(bits, seed, kind):
    if seed is not None and bits == 1:
        pytest.skip("one stochastic bit has the levels minimum and maximum only")
    values = data(kind)
    values[:, ::3] = 0
    assert (quantize(values, bits, seed)[:, ::3] == 0).all()


@pytest.mark.parametrize("bits", BITS)
def test_levels_are_multiples_of_the_step_and_nearest_takes_the_nearest(bits):
    values = data("normal", rows=50)
    flat, clear = zip(*(reference.nearest_levels(row, bits) for row in values))
    decoded, expected, clear = quantize(values, bits), np.stack(flat), np.stack(clear)
    assert clear.mean() > 0.99
    np.testing.assert_allclose(decoded[clear], expected[clear], rtol=1e-6)


@pytest.mark.parametrize("bits", BITS)
def test_the_grid_is_the_documented_one(bits):
    values = data("normal")
    for stochastic, intervals in ((False, 2**bits - 1), (True, max(1, 2**bits - 2))):
        step, base = linear.grid(*linear.extremes(tf.constant(values))[:2], bits, stochastic)
        np.testing.assert_allclose(step, ranges(values) / intervals, rtol=1e-6)
        if not (stochastic and bits == 1):
            np.testing.assert_array_equal(base, np.round(base))
        low = (base.numpy() - (0.0 if stochastic else 0.5)) * step.numpy()
        high = (base.numpy() + 2**bits - 1 + (0.0 if stochastic else 0.5)) * step.numpy()
        slack = 1e-6 * np.abs(values).max()
        assert (low <= values.min(1, keepdims=True) + slack).all()
        assert (high >= values.max(1, keepdims=True) - slack).all()


@pytest.mark.parametrize("bits", BITS)
def test_an_offset_costs_no_resolution(bits):
    """5 to 6 has the same step as 0 to 1: the range counts, not the largest value."""
    values = data("offset")
    error = np.abs(quantize(values, bits) - values)
    assert (error <= 0.5 / (2**bits - 1) + 1e-5).all()
    if bits == 8:
        assert error.max() > 0.25 / 255


@pytest.mark.parametrize("seed", [None, 2])
def test_an_offset_that_float32_cannot_resolve(seed):
    """1e6 plus and minus 1: a unit in the last place is 1/16; the step is 2**-22 of the offset, about 4/16."""
    values = np.float32(1e6) + np.random.default_rng(0).uniform(-1, 1, (5, 128)).astype(np.float32)
    error = np.abs(quantize(values, 8, seed) - values)
    assert error.max() <= (3 / 16 if seed is None else 5 / 16)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("seed", [None, 2])
def test_values_that_are_finite_never_become_infinite(bits, seed):
    top = reference.FLOAT32_MAX
    values = np.float32(
        [[top, -top, 1], [top, -top / 6, 0], [2e38, -2e38, 1e38], [3e38, -5e37, 1], [top, top / 2, 1e38]]
    )
    decoded = quantize(values, bits, seed)
    assert np.isfinite(decoded).all()
    if seed is None:
        assert (np.abs(decoded - values) <= np.abs(values.astype(np.float64)) * (1 + 1e-6)).all()


# Stochastic rounding: ROWS independent roundings of the same vector.

VECTORS = {
    "normal": reference.vector("normal", 64),
    "uniform": np.linspace(-1, 1, 64),
    "one spike": np.eye(1, 64, 5)[0],
    "spike and dust": np.where(np.arange(64) == 5, 1.0, 0.003),
    "spike and half steps": np.where(np.arange(64) == 5, 1.0, 0.5 / 126),
    "two spikes and dust": np.where(np.arange(64) < 2, [(-1.0) ** i for i in range(64)], 1e-3),
    "negative spike": np.where(np.arange(64) == 5, -1.0, 1e-2),
    "one-sided": reference.vector("negative", 64),
    "offset": reference.vector("offset", 64),
    "heavy": reference.vector("heavy", 64),
}


@pytest.fixture(scope="module")
def samples():
    """Decoded samples [ROWS, 64] of a vector, made once for each vector and width."""
    cache = {}

    def draw(name, bits):
        if (name, bits) not in cache:
            vector = VECTORS[name].astype(np.float32)
            cache[name, bits] = (
                vector.astype(np.float64),
                quantize(np.tile(vector, (ROWS, 1)), bits, seed=bits),
            )
        return cache[name, bits]

    return draw


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("name", VECTORS)
def test_stochastic_rounding_is_unbiased(samples, name, bits):
    vector, decoded = samples(name, bits)
    step = (vector.max() - vector.min()) / max(1, 2**bits - 2)
    # Five deviations of a mean of values that lie within one step; noise ends 2**-16 below 1.
    tolerance = step * (5 * 0.5 / np.sqrt(ROWS) + 2.0**-16) + 1e-6
    np.testing.assert_allclose(decoded.mean(0), vector, rtol=0, atol=tolerance)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("name", VECTORS)
def test_stochastic_rounding_has_the_variance_of_two_neighbouring_levels(samples, name, bits):
    """A value a share f of a step above its level is off by f or 1 - f: step^2 f (1 - f) on average."""
    vector, decoded = samples(name, bits)
    step = (vector.max() - vector.min()) / max(1, 2**bits - 2)
    origin = vector.min() if bits == 1 else 0.0
    share = (vector - origin) / step % 1.0
    expected = np.sum(step**2 * share * (1 - share))
    squares = np.sum((decoded - vector) ** 2, axis=1)
    deviation = squares.std() / np.sqrt(ROWS)
    assert abs(squares.mean() - expected) <= 5 * deviation + 1e-4 * len(vector) * step**2


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("name", VECTORS)
def test_qsgd_variance_bounds(samples, name, bits):
    """QSGD, Lemma 3.1: E||Q(v) - v||^2 <= min(d / s^2, sqrt(d) / s) ||v||^2, s = 2**(bits - 1) - 1."""
    vector, decoded = samples(name, bits)
    d, s = len(vector), 2 ** (bits - 1) - 1
    squares = np.sum((decoded - vector) ** 2, axis=1)
    bound = min(d / s**2, np.sqrt(d) / s) * np.sum(vector**2)
    assert squares.mean() - 5 * squares.std() / np.sqrt(ROWS) <= bound


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("bits", BITS)
def test_no_conversion_to_bytes_truncates(bits, seed, monkeypatch):
    # XLA converts a number over 255 to its lowest byte on CPUs, and to 255 on a GPU.
    converted, cast = [], tf.cast

    def recording_cast(x, dtype):
        converted.extend([x] if dtype == tf.uint8 else [])
        return cast(x, dtype)

    monkeypatch.setattr(tf, "cast", recording_cast)
    quantize(np.random.default_rng(0).normal(size=[10, 64]), bits, seed)
    assert converted
    for numbers in converted:
        assert int(tf.reduce_min(numbers)) >= 0 and int(tf.reduce_max(numbers)) < 2**bits
