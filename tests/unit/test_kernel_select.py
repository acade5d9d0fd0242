"""Selection: exact top-k, strided blocks, and their way back."""

import numpy as np
import pytest
import reference
import tensorflow as tf

from hvd_compress.kernels import blocks, select


def assert_is_top_k(flat, k):
    chosen = select.top_k(tf.constant(flat), k).numpy()
    assert chosen.shape == (k,) and chosen.dtype == np.int64
    assert (np.diff(chosen) > 0).all()
    magnitude = np.abs(flat)
    largest = np.partition(magnitude, len(flat) - k)[len(flat) - k :]
    np.testing.assert_array_equal(np.sort(magnitude[chosen]), np.sort(largest))
    if k < len(flat) and np.partition(magnitude, len(flat) - k - 1)[len(flat) - k - 1] < largest.min():
        expected = np.argpartition(magnitude, len(flat) - k)[len(flat) - k :]
        np.testing.assert_array_equal(chosen, np.sort(expected))


@pytest.mark.parametrize("kind", reference.KINDS)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (100, 1), (100, 7), (100, 100), (65536, 655)])
def test_top_k_of_small_vectors(kind, n, k):
    flat = reference.vector(kind, n)
    if kind == "denormal":
        flat *= np.float32(1e10)  # what is subnormal counts as zero
    assert_is_top_k(flat, k)


@pytest.mark.parametrize("kind", [kind for kind in reference.KINDS if kind != "denormal"])
@pytest.mark.parametrize(("n", "k"), [(65537, 65), (200000, 1), (200000, 200), (200000, 20000), (200000, 60000)])
def test_top_k_of_large_vectors_from_a_sampled_threshold(kind, n, k):
    assert_is_top_k(reference.vector(kind, n), k)


@pytest.mark.parametrize("k", [100, 2000, 20000])
@pytest.mark.parametrize("direction", [1, -1])
def test_top_k_of_sorted_vectors(k, direction):
    assert_is_top_k(np.arange(200000, dtype=np.float32)[::direction].copy(), k)


@pytest.mark.parametrize("k", [100, 2000, 20000])
@pytest.mark.parametrize("period", [2, 3, 6])
def test_top_k_where_a_strided_sample_sees_only_the_largest_or_none_of_them(k, period):
    """200,000 elements are sampled with stride 6."""
    noise = reference.vector("normal", 200000)
    seen = np.arange(200000) % period == 0
    assert_is_top_k(np.where(seen, 1000 + noise, noise), k)
    assert_is_top_k(np.where(seen, noise, 1000 + noise), k)
    assert_is_top_k(np.where(seen, noise, 0), k)


def test_top_k_with_fewer_nonzeros_than_k():
    flat = np.zeros(200000, np.float32)
    where = np.random.default_rng(0).permutation(200000)[:50]
    flat[where] = 1.0
    chosen = select.top_k(tf.constant(flat), 2000).numpy()
    assert set(where) <= set(chosen)
    assert_is_top_k(flat, 2000)


def top1(flat, k):
    """Rows, values and finiteness for NumPy input."""
    rows, values, finite = select.strided_top1((select.strided(tf.constant(flat), k), None, 1.0))
    return rows.numpy().astype(int), values.numpy(), bool(finite)


STRIDED = [(1, 1), (5, 5), (7, 3), (8, 7), (1000, 10), (1003, 10), (65536, 256), (3000, 1), (30000, 30)]


@pytest.mark.parametrize(("n", "k"), STRIDED)
def test_strided_top1_is_the_first_largest_of_each_block(n, k):
    # Few significant bits, hence many exact ties and none that are only nearly so.
    flat = np.random.default_rng(n).integers(-30, 31, n).astype(np.float32)
    rows, values, finite = top1(flat, k)
    np.testing.assert_array_equal(rows, reference.strided_rows(flat, k))
    np.testing.assert_array_equal(values, flat[rows * k + np.arange(k)])
    assert finite


@pytest.mark.parametrize("decay", [1.0, 0.5])
@pytest.mark.parametrize(("n", "k"), STRIDED)
def test_strided_top1_and_rest_of_a_gradient_with_residual(n, k, decay):
    rng = np.random.default_rng(n)
    gradient, residual = rng.integers(-30, 31, (2, n)).astype(np.float32) * 2
    x = gradient + decay * residual
    terms = (*(select.strided(tf.constant(flat), k) for flat in (gradient, residual)), decay)
    rows, values, _ = select.strided_top1(terms)
    expected = reference.strided_rows(x, k)
    np.testing.assert_array_equal(rows, expected)
    where = expected * k + np.arange(k)
    np.testing.assert_array_equal(values, x[where])
    rest = blocks.from_blocks(select.strided_rest(terms, rows, values - 1.0), [n])
    left = x.copy()
    left[where] = 1.0
    np.testing.assert_array_equal(rest, left)


@pytest.mark.parametrize(("n", "k"), STRIDED)
@pytest.mark.parametrize("kind", ["normal", "mixed scale", "huge", "sparse", "denormal"])
def test_strided_top1_misses_the_largest_only_by_its_last_bits(n, k, kind):
    flat = reference.vector(kind, n)
    rows = top1(flat, k)[0]
    depth = -(-n // k)
    # Of 23 bits of the significand, those stay that the row leaves.
    near = 2.0 ** (max(1, (depth - 1).bit_length()) - 23)
    assert depth > 256 or near <= 2.0**-15
    for j in range(k):
        magnitude = np.abs(flat[j::k].astype(np.float64))
        assert rows[j] < len(magnitude)
        assert magnitude[rows[j]] >= magnitude.max() * (1 - near) - reference.SMALLEST_NORMAL


def test_strided_top1_takes_nan_and_infinity_for_the_largest():
    flat = np.arange(12, dtype=np.float32)
    flat[3], flat[4] = -np.inf, np.nan
    rows, _, finite = top1(flat, 4)
    assert rows.tolist() == [1, 2, 2, 0][: len(rows)] and not finite


def test_strided_top1_keeps_most_of_the_energy_of_exact_top_k():
    """DESIGN: 0.85 to 0.94 on normal, Laplace and Student-t vectors with blocks of 128."""
    n, k = 128 * 1024, 1024
    rng = np.random.default_rng(0)
    for flat in (rng.standard_normal(n), rng.laplace(size=n), rng.standard_t(4, n)):
        flat = flat.astype(np.float32)
        rows = top1(flat, k)[0]
        energy = np.sum(flat[rows * k + np.arange(k)] ** 2)
        best = np.sum(np.sort(flat**2)[-k:])
        assert 0.8 < energy / best <= 1


@pytest.mark.parametrize(("n", "k"), STRIDED)
def test_strided_counts_and_indices(n, k):
    assert select.strided_counts(n, k).numpy().tolist() == [len(range(j, n, k)) for j in range(k)]
    rows = np.random.default_rng(0).integers(0, 5, k).astype(np.int32)
    expected = [row * k + j for j, row in enumerate(rows)]
    assert select.strided_indices(tf.constant(rows)).numpy().tolist() == expected


@pytest.mark.parametrize(("n", "k"), [(500000, 5000), (499999, 5000), (10000, 9999), (5000, 5000)])
def test_strided_random_is_uniform_over_each_block(n, k):
    counts = np.array([len(range(j, n, k)) for j in range(k)])
    rows = select.strided_random(n, k, tf.constant(11)).numpy()
    assert (rows >= 0).all() and (rows < counts).all()
    seen = np.bincount(rows, minlength=counts.max())
    expected = np.array([np.sum((counts > row) / counts) for row in range(counts.max())])
    assert np.sum((seen - expected) ** 2 / expected) < len(seen) + 5 * np.sqrt(2 * len(seen))


def test_strided_random_is_uniform_over_the_seeds_too():
    draws = np.stack([select.strided_random(23, 4, tf.constant(seed)).numpy() for seed in range(600)])
    for j in range(4):
        size = len(range(j, 23, 4))
        seen = np.bincount(draws[:, j], minlength=size)
        assert len(seen) == size
        assert np.sum((seen - 600 / size) ** 2) / (600 / size) < size - 1 + 5 * np.sqrt(2 * size)
    assert abs(np.corrcoef(draws[:, 0], draws[:, 1])[0, 1]) < 5 / np.sqrt(600)


@pytest.mark.parametrize(("n", "k"), STRIDED)
@pytest.mark.parametrize("ranks", [1, 3])
def test_spread_puts_and_sums(n, k, ranks):
    rng = np.random.default_rng(n)
    counts = np.array([len(range(j, n, k)) for j in range(k)])
    values = rng.integers(-9, 10, (ranks, k)).astype(np.float32)
    rows = (rng.random((ranks, k)) * counts).astype(np.int32)
    expected = np.zeros(n)
    for rank in range(ranks):
        for j in range(k):
            expected[rows[rank, j] * k + j] += values[rank, j]
    pairs = [(tf.constant(v), tf.constant(r)) for v, r in zip(values, rows)]
    spread = select.spread(pairs, (n,), tf.constant(0.5))
    np.testing.assert_array_equal(spread, 0.5 * expected)


def test_spread_passes_nan_to_every_element():
    spread = select.spread([(tf.ones([3]), tf.constant([0, 1, 1]))], (7,), tf.constant(np.nan, tf.float32))
    assert np.isnan(spread).all()
