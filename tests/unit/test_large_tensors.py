"""More elements than one float32 can count: 2**24."""

import numpy as np
import pytest
import tensorflow as tf
from compressors import seeds

import hvd_compress as hvdc

N = 2**24 + 4096
# Odd numbers above 2**24 have no float32 of their own.
FAR = np.array([5, 2**23 + 1, 2**24 - 1, 2**24 + 1, 2**24 + 3, 2**24 + 1023, N - 1])


@pytest.fixture(scope="module")
def vector():
    x = np.random.default_rng(0).random(N, np.float32)
    x[FAR] = 100.0 + np.arange(len(FAR))
    return x


@pytest.mark.parametrize("spec", ["topk:ratio=1e-5", "block_topk:ratio=1e-4"])
def test_elements_beyond_two_to_the_24_come_back_at_their_places(vector, spec):
    compressor = hvdc.Compression.parse(spec)
    payload, ctx = compressor.compress(tf.constant(vector))
    assert payload.nbytes == compressor.wire_bytes(N)
    decoded = compressor.decompress(payload, ctx).numpy()
    np.testing.assert_array_equal(decoded[FAR], vector[FAR])
    where = np.flatnonzero(decoded)
    assert len(where) == -(-N // round(1 / compressor.ratio))
    np.testing.assert_array_equal(decoded[where], vector[where])


def test_randomk_chooses_beyond_two_to_the_24(vector):
    compressor = hvdc.Compression.randomk(0.001)
    x = np.arange(N, dtype=np.float64)  # as float32 these are not distinct
    parts, ctx, _, _ = compressor.encode(tf.constant(vector), seeds(shared=1))
    decoded = compressor.decode(parts, ctx).numpy()
    where = np.flatnonzero(decoded)
    np.testing.assert_array_equal(decoded[where], vector[where])
    assert len(where) == -(-N // 1000) and where.max() > 2**24
    assert (where % 2).mean() == pytest.approx(0.5, abs=0.05)
    del x
