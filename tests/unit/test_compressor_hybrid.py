"""hybrid against NumPy: select, then quantize."""

import numpy as np
import pytest
import reference
from compressors import round_trip

import hvd_compress as hvdc

hybrid = hvdc.Compression.hybrid


@pytest.mark.parametrize("bits", [1, 4, 8])
@pytest.mark.parametrize(("n", "ratio"), [(7, 0.3), (3001, 0.01), (20000, 0.1)])
def test_selects_and_quantizes(n, ratio, bits):
    x = reference.vector("normal", n)
    # Fewer significant bits: no ties that are only nearly so.
    x = (np.round(x * 64) + np.where(x < 0, -0.5, 0.5)).astype(np.float32)
    k = reference.num_kept(ratio, n)
    where = reference.strided_rows(x, k) * k + np.arange(k)
    values, clear = reference.nearest_levels(x[where], bits)
    decoded = round_trip(hybrid(ratio, bits), x)
    tolerance = 1e-5 * np.abs(x).max()
    np.testing.assert_allclose(decoded[where][clear], values[clear], rtol=1e-5, atol=tolerance)
    rest = np.ones(n, bool)
    rest[where] = False
    assert (decoded[rest] == 0).all()


@pytest.mark.parametrize("bits", [1, 4, 8])
@pytest.mark.parametrize("kind", ["normal", "heavy", "sparse", "layers", "offset", "negative"])
def test_error_bounds(bits, kind):
    """No element's error exceeds its magnitude; that of the largest is half a step at most."""
    x = reference.vector(kind, 20000)
    k = 2000
    decoded = round_trip(hybrid(0.1, bits), x)
    error = np.abs(decoded.astype(np.float64) - x)
    assert (error <= np.abs(x) * (1 + 1e-6)).all()
    kept = x[reference.strided_rows(x, k) * k + np.arange(k)].astype(np.float64)
    largest = np.argmax(np.abs(x))
    step = reference.steps(kept, bits)[np.argmax(np.abs(kept))]
    assert error[largest] <= step / 2 + 1e-6 * np.abs(x[largest])


def test_a_kept_element_costs_about_one_and_a_half_bytes_at_4_bits():
    assert hybrid(0.01, 4).wire_bytes(10**6) == 10**4 + 40 * (256 // 2 + 8)
