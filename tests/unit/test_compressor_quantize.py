"""quantize, int8 and int4: against NumPy's rounding and percentiles."""

import numpy as np
import pytest
import reference
import tensorflow as tf
from compressors import payload_bytes, round_trip, seeds

import hvd_compress as hvdc
from hvd_compress.compressors.quantize import clip_to_percentile

quantize = hvdc.Compression.quantize


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("kind", ["normal", "offset", "negative", "layers"])
def test_nearest_against_numpy(bits, kind):
    x = reference.vector(kind, 100001)  # the last of its blocks has 673 elements
    expected, clear = reference.nearest_levels(x, bits)
    decoded = round_trip(quantize(bits), x)
    assert clear.mean() > 0.98
    tolerance = 1e-6 * np.abs(x).max()
    np.testing.assert_allclose(decoded[clear], expected[clear], rtol=1e-5, atol=tolerance)


@pytest.mark.parametrize("n", [1, 7, 1000, 2048, 100001])
@pytest.mark.parametrize("value", [0.1, -2.5, 1e38, -1e38])
@pytest.mark.parametrize("spec", ["int8", "int4", "quantize:bits=1", "quantize:bits=2,rounding=stochastic"])
def test_constant_vectors_are_exact(spec, n, value):
    x = np.full(n, value, np.float32)
    np.testing.assert_array_equal(round_trip(hvdc.Compression.parse(spec), x), x)


def test_blocks_do_not_influence_each_other():
    x = reference.vector("normal", 2048) * np.repeat([1e-6, 1e6], 1024).astype(np.float32)
    error = np.abs(round_trip(hvdc.Compression.int8, x) - x)
    assert error[:1024].max() <= 0.5 * np.ptp(x[:1024].astype(np.float64)) / 255 * (1 + 1e-4)


def test_presets():
    assert hvdc.Compression.int8 == quantize(8) and hvdc.Compression.int4 == quantize(4)


# Randomness


def encoded(compressor, x, **seed):
    parts, ctx, _, _ = compressor.encode(tf.constant(x), seeds(**seed))
    return b"".join(part.numpy().tobytes() for part in parts), compressor.decode(parts, ctx).numpy()


def test_stochastic_rounding_draws_from_the_local_seed_and_its_own():
    x = reference.vector("normal", 1000)
    first, _ = encoded(quantize(4, "stochastic"), x, shared=1, local=1)
    assert encoded(quantize(4, "stochastic"), x, shared=2, local=1)[0] == first
    assert encoded(quantize(4, "stochastic"), x, shared=1, local=2)[0] != first
    assert encoded(quantize(4, "stochastic", seed=7), x, shared=1, local=1)[0] != first


def test_nearest_rounding_draws_from_none():
    x = reference.vector("normal", 1000)
    assert encoded(quantize(4), x, shared=1, local=1)[0] == encoded(quantize(4), x, shared=5, local=6)[0]


@pytest.mark.parametrize("bits", [2, 4])
def test_stochastic_rounding_averages_to_the_input_over_steps(bits):
    x = reference.vector("normal", 1000)
    draws = 300
    mean = np.mean([encoded(quantize(bits, "stochastic"), x, local=s)[1] for s in range(draws)], axis=0, dtype=float)
    step = reference.steps(x, bits, stochastic=True)
    # Deviation of the mean is half a step over sqrt(draws) at most; 1000 elements stay within 5 of these.
    assert (np.abs(mean - x) <= step * (5 * 0.5 / np.sqrt(draws) + 2.0**-16)).all()
    # And together they stay closer still: a bias common to all would show here.
    assert abs(np.mean((mean - x) / step)) <= 5 * 0.5 / np.sqrt(draws * x.size) + 2.0**-16


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("kind", ["normal", "sparse", "spike"])
def test_qsgd_variance_bound_of_a_block(bits, kind):
    """QSGD, Lemma 3.1, over blocks of b = 128: min(b / s^2, sqrt(b) / s) ||x||^2."""
    x = np.float32(np.arange(128) == 77) + np.float32(1e-3) if kind == "spike" else reference.vector(kind, 128)
    squares = [
        np.sum((encoded(quantize(bits, "stochastic"), x, local=s)[1].astype(np.float64) - x) ** 2) for s in range(40)
    ]
    s = 2 ** (bits - 1) - 1
    bound = min(128 / s**2, np.sqrt(128) / s) * np.sum(x.astype(np.float64) ** 2)
    assert np.mean(squares) - 5 * np.std(squares) / np.sqrt(40) <= bound


# Clipping


@pytest.mark.parametrize("percentile", [0.5, 50, 90, 99, 99.9, 100])
@pytest.mark.parametrize("n", [1, 7, 5000, 100001, 200000])
def test_clip_is_numpys_percentile(n, percentile):
    x = reference.vector("heavy", n)
    sample = x if n <= 65536 else x[:: n // 65536]
    limit = np.percentile(np.abs(sample.astype(np.float64)), percentile)
    clipped = clip_to_percentile(tf.constant(x), percentile)
    np.testing.assert_allclose(clipped, np.clip(x, -limit, limit), rtol=1e-5)


def test_clipping_gives_up_outliers_for_the_resolution_of_the_rest():
    x = reference.vector("normal", 1000)
    x[17] = 1000.0
    clipped = round_trip(quantize(4, clip=99), x)
    limit = np.percentile(np.abs(x), 99)
    assert np.abs(clipped).max() <= limit * (1 + 1e-6) + limit / 15
    inside = np.abs(x) <= limit
    assert np.abs(clipped - x)[inside].max() <= limit / 15 * (1 + 1e-5)
    assert np.abs(round_trip(quantize(4), x) - x)[inside].max() > 10 * limit / 15


def test_clip_of_100_percent_changes_nothing(monkeypatch):
    monkeypatch.setenv("HVD_COMPRESS_KERNELS", "xla")  # native kernels do not clip
    x = reference.vector("normal", 1000)
    a, b = (payload_bytes(quantize(8, clip=clip).compress(tf.constant(x))[0]) for clip in (None, 100))
    assert a == b
