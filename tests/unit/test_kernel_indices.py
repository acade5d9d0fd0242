"""Index sets: their sizes, and that every one comes back."""

import numpy as np
import pytest
import reference
import tensorflow as tf

from hvd_compress.compressors import payload
from hvd_compress.formats.sizes import PAGE, index_parts
from hvd_compress.kernels import indices

SIZES = [1, 2, 63, 64, 65, 1023, 1024, 1025, 65535, 65536, 65537, 200000]


def subsets(n):
    """k and sorted distinct indices: random ones, and all at the beginning, at the end, at page borders."""
    rng = np.random.default_rng(n)
    for k in sorted({1, min(n, 3), max(1, n // 100), max(1, n // 17), max(1, n // 2), n}):
        yield np.sort(rng.permutation(n)[:k])
        yield np.arange(k)
        yield np.arange(n - k, n)
    borders = [i for i in (0, 1, 65535, 65536, 65537, 131071, 131072, n - 1) if i < n]
    yield np.unique(borders)


@pytest.mark.parametrize("n", SIZES)
def test_round_trip_and_size(n):
    for chosen in subsets(n):
        k = len(chosen)
        packed = indices.pack(tf.constant(chosen, tf.int64), n)
        assert sum(part.numpy().nbytes for part in packed) == reference.index_bytes(n, k)
        for part, spec in zip(packed, index_parts(n, k)):
            assert (part.shape, part.dtype) == (spec.shape, spec.dtype)
        unpacked, good = indices.unpack(packed, n, k)
        assert good and unpacked.dtype == tf.int64 and unpacked.shape == [k]
        np.testing.assert_array_equal(unpacked, chosen)


@pytest.mark.parametrize("n", SIZES)
def test_the_form_is_the_smaller_one(n):
    bitmap = -(-n // 64) * 8 if n <= 1024 else -(-n // 1024) * 128
    for k in {1, max(1, n // 20), max(1, n // 16), max(1, n // 15), n}:
        pages = 2 * k + (4 * -(-n // 65536) if n > 65536 else 0)
        if bitmap != pages:
            assert indices.form(n, k) == ("bitmap" if bitmap < pages else "pages")


@pytest.mark.parametrize("n", [64, 65536, 200000])
def test_the_bitmap_has_one_bit_per_element(n):
    chosen = np.sort(np.random.default_rng(0).permutation(n)[: n // 2])
    (bitmap,) = indices.pack(tf.constant(chosen, tf.int64), n)
    assert int(np.unpackbits(bitmap.numpy()).sum()) == n // 2


def test_pages_hold_16_bits_per_index_and_the_count_of_each_page():
    counts, low = indices.pack(tf.constant([0, 65535, 65536, 196609], tf.int64), 200000)
    assert counts.numpy().tolist() == [2, 1, 0, 1]
    assert low.numpy().tolist() == [0, 65535, 0, 1]


@pytest.mark.parametrize(("n", "k"), [(1024, 500), (1000, 500), (1000, 3), (70000, 9), (70000, 30000)])
def test_what_is_damaged_keeps_its_shape_and_bounds_and_is_noticed(n, k):
    packed = indices.pack(tf.range(k, dtype=tf.int64), n)
    for value in (0, 255):
        for part, i in zip(packed, range(len(packed))):
            filled = tf.bitcast(tf.fill([part.shape[0] * part.dtype.size], tf.constant(value, tf.uint8)), tf.uint8)
            spec = [tf.TensorSpec(part.shape, part.dtype)]
            damaged = [*packed[:i], payload.split(filled, spec)[0], *packed[i + 1 :]]
            unpacked, good = indices.unpack(damaged, n, k)
            assert unpacked.shape == [k]
            assert (unpacked.numpy() < n).all() and (unpacked.numpy() >= 0).all()
            # Zeros are indices, though not distinct ones; of two pages, the first has any; the others are wrong.
            assert bool(good) == (part.dtype == tf.uint16 and (value == 0 or n > PAGE))
