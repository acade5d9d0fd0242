"""fp16 and bf16 against NumPy's casts."""

import numpy as np
import pytest
import reference
import tensorflow as tf
from compressors import round_trip

import hvd_compress as hvdc

EDGES = np.float32(
    [0, 1, -1, 1 + 2**-8, 1 + 2**-9, 1 + 2**-11, 1 + 2**-12, 65504, -65504, 2.0**-14, 2.0**-24, 1 / 3, 3.4e4]
)


def to_bfloat16(x):
    """float32 rounded to its upper 16 bits, ties to even."""
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = bits + 0x7FFF + (bits >> np.uint64(16) & np.uint64(1))
    return (rounded & np.uint64(0xFFFF0000)).astype(np.uint32).view(np.float32)


@pytest.mark.parametrize("kind", ["normal", "heavy", "layers", "offset"])
def test_fp16_is_numpys_cast(kind):
    x = np.concatenate([reference.vector(kind, 3000), EDGES])
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(round_trip(hvdc.Compression.fp16, x), expected)


@pytest.mark.parametrize("kind", ["normal", "heavy", "mixed scale", "huge"])
def test_bf16_is_rounding_to_the_upper_16_bits(kind):
    x = np.concatenate([reference.vector(kind, 3000), EDGES])
    np.testing.assert_array_equal(round_trip(hvdc.Compression.bf16, x), to_bfloat16(x))


def test_fp16_overflows_to_infinity_and_bf16_does_not():
    x = np.float32([1e5, -1e5])
    assert np.isinf(round_trip(hvdc.Compression.fp16, x)).all()
    assert np.isfinite(round_trip(hvdc.Compression.bf16, x)).all()


def test_none_returns_the_very_tensor():
    x = tf.constant([1.0, float("nan")])
    payload, ctx = hvdc.Compression.none.compress(x)
    assert payload is x and hvdc.Compression.none.decompress(payload, ctx) is x


def test_payloads_are_of_the_short_dtype():
    x = tf.constant([1.0, 2.0])
    assert hvdc.Compression.fp16.compress(x)[0].dtype == tf.float16
    assert hvdc.Compression.bf16.compress(x)[0].dtype == tf.bfloat16
