"""hadamard against NumPy and Max's optimum."""

import math

import numpy as np
import pytest
import reference
import tensorflow as tf
from compressors import round_trip, seeds

import hvd_compress as hvdc
from hvd_compress.formats.hadamard import LEVELS
from hvd_compress.kernels import hadamard as kernels

Hadamard = hvdc.Compression.hadamard
BITS = [1, 2, 3, 4]


def bfloat16(x):
    return tf.cast(tf.cast(x, tf.bfloat16), tf.float64).numpy()


def nearest(y, levels):
    """Each of `y` [..., n] as the nearest of `levels` and their negatives."""
    every = np.concatenate([levels, -np.array(levels)])
    return every[np.abs(y[..., None] - every).argmin(-1)]


def test_rotation_is_numpys_and_its_own_inverse():
    x = reference.vector("normal", 64 * 10)
    half = kernels.within(kernels.to_blocks(tf.constant(x)), 1 / 4)
    rotated = tf.concat(kernels.across(kernels.slices(half), 1 / 2), 1)
    np.testing.assert_allclose(rotated, reference.rotated_blocks(x), atol=1e-5)
    np.testing.assert_allclose(reference.rotated_blocks(reference.rotated_blocks(x).ravel()).ravel(), x, atol=1e-12)
    assert set(np.abs(reference.rotated_blocks(np.eye(64).ravel())).ravel().round(12)) == {1 / 8}


@pytest.mark.parametrize("bits", BITS)
def test_levels_are_the_means_of_their_intervals(bits):
    """What Lloyd and Max ask for: thresholds are midway between levels, and levels are conditional means."""

    def below(t):
        return math.erf(t / math.sqrt(2)) / 2

    def density(t):
        return math.exp(-t * t / 2) / math.sqrt(2 * math.pi)

    levels = LEVELS[bits]
    assert len(levels) == 2 ** (bits - 1)
    thresholds = [0, *((a + b) / 2 for a, b in zip(levels, levels[1:])), 30]
    for level, low, high in zip(levels, thresholds, thresholds[1:]):
        assert abs(level - (density(low) - density(high)) / (below(high) - below(low))) < 1e-6


@pytest.mark.parametrize("n", [1, 64, 100, 100001])
@pytest.mark.parametrize("kind", ["normal", "heavy", "sparse", "layers", "tiny", "huge"])
@pytest.mark.parametrize("bits", BITS)
def test_decodes_to_the_nearest_levels_of_rotated_blocks(bits, kind, n):
    x = reference.vector(kind, n)
    rotated = reference.rotated_blocks(x)
    scale = bfloat16(np.sqrt(np.pi / 2) * np.abs(rotated).mean(1, keepdims=True))
    levels = nearest(rotated / np.where(scale > 0, scale, 1), LEVELS[bits]) * scale
    expected = reference.rotated_blocks(levels.ravel())
    decoded = np.pad(round_trip(Hadamard(bits), x).astype(np.float64), (0, -n % 64)).reshape(expected.shape)
    full = n // 64
    tolerance = 1e-5 * np.abs(expected).max(1, keepdims=True)
    close = (np.abs(decoded - expected) <= tolerance)[:full].all(1)
    # The others have a value midway between levels, or a scale midway between two of bfloat16.
    assert close.mean() > 0.98 if full else np.allclose(decoded[0, :n], expected[0, :n], rtol=1e-5)


@pytest.mark.parametrize(("bits", "error"), [(1, 0.3634), (2, 0.1175), (3, 0.03454), (4, 0.009497)])
def test_loses_of_white_noise_what_max_found(bits, error):
    """Max 1960, Table I; the deviation of a block of 64 is not exactly known, which costs a little."""
    x = reference.vector("normal", 200_000)
    lost = np.sum((round_trip(Hadamard(bits), x) - x.astype(np.float64)) ** 2) / np.sum(x.astype(np.float64) ** 2)
    assert 0.97 * error < lost < 1.08 * error
    assert Hadamard(bits).estimated_noise_loss(x) == pytest.approx(error, rel=1e-3)


def test_loses_no_more_of_outliers_than_of_noise():
    x = reference.vector("normal", 64 * 500)
    x[::64] *= 20
    quantized, rotated = (np.sum((round_trip(c, x) - x) ** 2) for c in (hvdc.Compression.quantize(2), Hadamard(2)))
    assert rotated < 0.3 * np.sum(x**2) and rotated < quantized


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("kind", reference.KINDS)
def test_error_bound_and_residual(kind, bits):
    x, old = reference.vector(kind, 5000), reference.vector(kind, 5000, seed=1)
    encoded = Hadamard(bits).encode(tf.constant(x), seeds(), keep=True)
    decoded = Hadamard(bits).decode(encoded.parts, encoded.ctx).numpy()
    assert encoded.finite
    reference.assert_error_is_bounded(Hadamard(bits), x, decoded)
    # With a residual: what was sent and what is left are the sum, up to rounding of the block's largest value.
    encoded = Hadamard(bits).encode(tf.constant(x), seeds(), tf.constant(old), 0.5, keep=True)
    total = encoded.residual.numpy().astype(np.float64) + Hadamard(bits).decode(encoded.parts, encoded.ctx)
    exact = x.astype(np.float64) + 0.5 * old
    largest = np.repeat(np.abs(np.pad(exact, (0, -5000 % 64))).reshape(-1, 64).max(1), 64)[:5000]
    assert (np.abs(total - exact) <= 2.0**-19 * largest + 1e-36).all()


@pytest.mark.parametrize("x", [np.full(640, -3.3), np.eye(64)[5] * 7.0, np.zeros(640)], ids=["constant", "one", "zero"])
def test_one_bit_says_all_of_constant_blocks_and_of_single_values(x):
    np.testing.assert_allclose(round_trip(Hadamard(1), x.astype(np.float32)), x, rtol=2.0**-8, atol=1e-6)


@pytest.mark.parametrize("bits", [0, 5, "2", True, 2.0, None])
def test_bits_that_are_none(bits):
    with pytest.raises(ValueError, match="hadamard: bits must be a whole number from 1 to 4"):
        Hadamard(bits)
