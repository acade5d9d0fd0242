"""int2 against NumPy."""

import numpy as np
import pytest
import reference
import tensorflow as tf
from compressors import round_trip, seeds

import hvd_compress as hvdc
from hvd_compress.kernels import native

int2 = hvdc.Compression.int2


@pytest.fixture(autouse=True, params=native.KINDS)
def kind_of_kernels(request, monkeypatch):
    """The kernels that are in use."""
    if request.param == "native" and native.library() is None:
        pytest.skip("the native kernels are not built")
    monkeypatch.setenv(native.VARIABLE, request.param)


def expected_of(x):
    """What the docstring says, in float64: decoded values [blocks, 64], and which are not midway between levels."""
    blocks = np.pad(x.astype(np.float64), (0, -len(x) % 64)).reshape(-1, 64)
    low, high = np.minimum(blocks.min(1, keepdims=True), 0.0), np.maximum(blocks.max(1, keepdims=True), 0.0)
    mantissa, exponent = np.frexp((high - low) / 3)
    step = np.ldexp(np.round(mantissa * 2**7) / 2**7, exponent)  # 7 significant bits
    with np.errstate(divide="ignore", invalid="ignore"):
        start, position = (np.where(step > 0, values / step, 0.0) for values in (low, blocks))
    base = np.clip(np.round(start), -3, 0)
    clear = (np.abs(position % 1.0 - 0.5) > 1e-3) & (np.abs(start % 1.0 - 0.5) > 1e-3)
    return (base + np.clip(np.round(position) - base, 0, 3)) * step, clear


@pytest.mark.parametrize("n", [1, 64, 100, 100001])
@pytest.mark.parametrize("kind", ["normal", "heavy", "sparse", "layers", "tiny", "huge"])
def test_decodes_to_the_documented_levels(kind, n):
    x = reference.vector(kind, n)
    expected, clear = expected_of(x)
    decoded = np.pad(round_trip(int2, x), (0, -n % 64)).reshape(expected.shape)
    np.testing.assert_allclose(decoded[clear], expected[clear], rtol=1e-5, atol=1e-36)
    assert clear.ravel()[:n].mean() > 0.9


@pytest.mark.parametrize("kind", reference.KINDS)
def test_error_bound_and_residual(kind):
    x, old = reference.vector(kind, 5000), reference.vector(kind, 5000, seed=1)
    encoded = int2.encode(tf.constant(x), seeds(), keep=True)
    assert encoded.finite
    reference.assert_error_is_bounded(int2, x, int2.decode(encoded.parts, encoded.ctx).numpy())
    encoded = int2.encode(tf.constant(x), seeds(), tf.constant(old), 0.5, keep=True)
    total = encoded.residual.numpy().astype(np.float64) + int2.decode(encoded.parts, encoded.ctx)
    exact = x.astype(np.float64) + 0.5 * old
    largest = np.repeat(np.abs(np.pad(exact, (0, -5000 % 64))).reshape(-1, 64).max(1), 64)[:5000]
    assert (np.abs(total - exact) <= 2.0**-20 * largest + 1e-36).all()


def test_zeros_stay_zero_and_an_outlier_moves_little():
    x = np.zeros(640, np.float32)
    x[::64] = np.linspace(1.0, 10.0, 10)
    decoded = round_trip(int2, x)
    assert np.count_nonzero(decoded) == 10
    np.testing.assert_allclose(decoded, x, rtol=2.0**-7)
    negative = round_trip(int2, -x)
    np.testing.assert_array_equal(negative, -decoded)


def test_loses_less_of_white_noise_than_larger_blocks_at_the_same_bytes():
    x = reference.vector("normal", 64 * 4000)

    def lost(compressor):
        return np.sum((round_trip(compressor, x) - x.astype(np.float64)) ** 2) / np.sum(x.astype(np.float64) ** 2)

    assert lost(int2) < 0.75 * lost(hvdc.Compression.quantize(2))
    assert int2.estimated_noise_loss(x) == pytest.approx(lost(int2), rel=0.05)
    assert int2.wire_bytes(len(x)) == hvdc.Compression.quantize(2).wire_bytes(len(x))


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_a_block_that_is_not_finite_is_not_finite(bad):
    x = reference.vector("normal", 200)
    x[70] = bad
    encoded = int2.encode(tf.constant(x), seeds(), keep=True)
    assert not encoded.finite
    decoded = int2.decode(encoded.parts, encoded.ctx).numpy()
    assert np.isnan(decoded[64:128]).all()
    assert np.isfinite(np.delete(decoded, range(64, 128))).all()


def test_rows_of_embeddings_are_rotated():
    assert int2.for_rows() == hvdc.Compression.hadamard
