"""onebit against NumPy."""

import numpy as np
import pytest
import reference
from compressors import round_trip

import hvd_compress as hvdc

onebit = hvdc.Compression.onebit


@pytest.mark.parametrize("kind", ["normal", "heavy", "sparse", "ties", "layers", "negative", "huge", "mixed scale"])
@pytest.mark.parametrize("n", [1, 2, 7, 1000, 1024, 100001])
def test_signs_and_means_of_blocks(kind, n):
    x = reference.vector(kind, n)
    np.testing.assert_allclose(round_trip(onebit, x), reference.signs_and_means(x), rtol=1e-5)


def test_zero_has_a_positive_sign():
    np.testing.assert_array_equal(round_trip(onebit, np.float32([0, -0.0, 3, -3])), [1.5, 1.5, 1.5, -1.5])


@pytest.mark.parametrize("value", [1.0, 0.1, -3.3, 1e-30, 1e30, 1e38, -3.4e38])
def test_full_blocks_of_one_magnitude_are_exact_and_others_to_rounding(value):
    signs = np.where(np.random.default_rng(0).random(3000) < 0.5, -1, 1).astype(np.float32)
    x = signs * np.float32(value)
    decoded = round_trip(onebit, x)
    np.testing.assert_array_equal(decoded[:2048], x[:2048])
    np.testing.assert_allclose(decoded[2048:], x[2048:], rtol=1e-6)
