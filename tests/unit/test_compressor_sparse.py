"""topk, block_topk and randomk against NumPy and their expectations."""

import numpy as np
import pytest
import reference
import tensorflow as tf
from compressors import payload_bytes, round_trip, seeds

import hvd_compress as hvdc

topk, block_topk, randomk = hvdc.Compression.topk, hvdc.Compression.block_topk, hvdc.Compression.randomk


@pytest.mark.parametrize(
    ("ratio", "n"),
    [(0.01, 1), (0.01, 100), (0.07, 100), (0.29, 100), (0.01, 101), (1 / 3, 3), (1.0, 50), (1e-9, 50)],
)
def test_exactly_k_elements_are_kept(ratio, n):
    x = 1 + np.random.default_rng(n).random(n).astype(np.float32)
    for compressor in (topk(ratio), block_topk(ratio), randomk(ratio)):
        assert np.count_nonzero(round_trip(compressor, x)) == reference.num_kept(ratio, n)


@pytest.mark.parametrize("n", [10**4 + 1, 10**6 + 1, 25 * 10**6 + 1, 2**31 - 1])
def test_k_is_rounded_up_for_large_tensors_too(n):
    assert randomk(0.01).wire_bytes(n) == 4 * -(-n // 100)
    assert randomk(0.1).wire_bytes(n) == 4 * -(-n // 10)


@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("n", [7, 3000, 100001])
def test_topk_keeps_the_largest_as_they_are(ratio, n):
    x = reference.vector("heavy", n)
    k = reference.num_kept(ratio, n)
    expected = np.zeros_like(x)
    largest = np.argpartition(np.abs(x), n - k)[n - k :]
    expected[largest] = x[largest]
    np.testing.assert_array_equal(round_trip(topk(ratio), x), expected)


@pytest.mark.parametrize("kind", ["normal", "ties", "sparse", "zeros", "layers"])
@pytest.mark.parametrize("n", [3000, 100001])
def test_topk_error_bound(kind, n):
    """||x - topk(x)||^2 <= (1 - k / n) ||x||^2 (Stich et al. 2018, Lemma A.1)."""
    x = reference.vector(kind, n).astype(np.float64)
    error = np.sum((x - round_trip(topk(0.1), x.astype(np.float32))) ** 2)
    assert error <= (1 - reference.num_kept(0.1, n) / n) * np.sum(x**2) * (1 + 1e-9)


def test_topk_of_equal_magnitudes_meets_its_bound_with_equality():
    x = np.where(np.arange(1000) % 3, 1.0, -1.0).astype(np.float32)
    assert np.sum((x - round_trip(topk(0.1), x)) ** 2) == 900


@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("n", [7, 3001])
def test_block_topk_keeps_the_largest_of_each_strided_block(ratio, n):
    x = np.random.default_rng(n).integers(-50, 51, n).astype(np.float32)
    k = reference.num_kept(ratio, n)
    expected = np.zeros_like(x)
    where = reference.strided_rows(x, k) * k + np.arange(k)
    expected[where] = x[where]
    np.testing.assert_array_equal(round_trip(block_topk(ratio), x), expected)


@pytest.mark.parametrize("kind", ["normal", "heavy", "sparse", "layers"])
def test_block_topk_error_bound_holds_in_each_block(kind):
    """||error||^2 <= (1 - 1 / B) ||x||^2 per block of B."""
    n, k = 12800, 100
    x = reference.vector(kind, n)
    error = (x - round_trip(block_topk(k / n), x)).astype(np.float64)
    for j in range(k):
        assert np.sum(error[j::k] ** 2) <= (1 - (1 - 2.0**-15) / 128) * np.sum(x[j::k].astype(np.float64) ** 2)


# randomk


def choice(compressor, x, **seed):
    parts, ctx, _, _ = compressor.encode(tf.constant(x), seeds(**seed))
    return compressor.decode(parts, ctx).numpy()


def test_randomk_draws_from_the_shared_seed_and_its_own_only():
    x = 1 + np.random.default_rng(0).random(1000).astype(np.float32)
    first = choice(randomk(0.1), x, shared=1, local=1)
    np.testing.assert_array_equal(choice(randomk(0.1), x, shared=1, local=99), first)
    assert (choice(randomk(0.1), x, shared=2, local=1) != first).any()
    assert (choice(randomk(0.1, seed=5), x, shared=1, local=1) != first).any()
    # The choice does not look at the values: else ranks would disagree.
    other = choice(randomk(0.1), x[::-1].copy(), shared=1, local=1)
    np.testing.assert_array_equal(other != 0, first != 0)


def test_randomk_sends_one_element_of_each_strided_block():
    for n, k in ((1000, 100), (1003, 101)):
        kept = choice(randomk(k / n), np.ones(n, np.float32), shared=3) != 0
        assert [int(kept[j::k].sum()) for j in range(k)] == [1] * k


def test_randomk_payloads_may_be_summed():
    x, y = reference.vector("normal", 500), reference.vector("normal", 500, seed=1)
    compressor = randomk(0.1)
    (a, ctx), (b, _), (c, _) = (compressor.compress(tf.constant(t)) for t in (x, y, x + y))
    np.testing.assert_allclose(a + b, c, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(compressor.decompress(a + b, ctx), choice(compressor, x) + choice(compressor, y))


DRAWS = 300


@pytest.fixture(scope="module")
def draws():
    """x and what DRAWS seeds make of it, biased and unbiased: n = 1000, k = 100."""
    x = reference.vector("normal", 1000).astype(np.float64)
    decoded = {
        unbiased: np.stack([choice(randomk(0.1, unbiased), np.float32(x), shared=s) for s in range(DRAWS)])
        for unbiased in (False, True)
    }
    return x, decoded


@pytest.mark.parametrize(("unbiased", "factor"), [(False, 1 - 0.1), (True, 1 / 0.1 - 1)])
def test_randomk_error_in_expectation(draws, unbiased, factor):
    """E||error||^2 = (1 - k / n) ||x||^2; unbiased (n / k - 1) ||x||^2."""
    x, decoded = draws
    squares = np.sum((decoded[unbiased] - x) ** 2, axis=1)
    assert abs(squares.mean() - factor * np.sum(x**2)) < 5 * squares.std() / np.sqrt(DRAWS)


def test_randomk_chooses_all_elements_equally_often(draws):
    _, decoded = draws
    times = (decoded[False] != 0).sum(0)
    assert times.sum() == 100 * DRAWS
    variance = DRAWS * 0.1 * 0.9
    assert np.abs(times - DRAWS * 0.1).max() < 5 * np.sqrt(variance)
    assert 0.8 < times.var() / variance < 1.2


def test_randomk_unbiased_averages_to_the_input(draws):
    x, decoded = draws
    # Each draw is 10 x with odds 1 / 10, else 0: variance 9 x^2.
    np.testing.assert_array_less(np.abs(decoded[True].mean(0) - x), 5 * 3 * np.abs(x) / np.sqrt(DRAWS))
    np.testing.assert_allclose(decoded[True], 10 * decoded[False], rtol=1e-6)


def test_randomk_unbiased_scales_by_the_size_of_each_block():
    """n = 1003 in 101 blocks: 94 of 10 elements, 7 of 9."""
    sizes = np.array([len(range(j, 1003, 101)) for j in range(101)])
    decoded = choice(randomk(101 / 1003, True), np.ones(1003, np.float32), shared=1)
    where = np.flatnonzero(decoded)
    np.testing.assert_array_equal(decoded[where], sizes[where % 101])


def test_without_a_step_the_choice_is_that_of_the_seed():
    x = tf.constant(reference.vector("normal", 100))
    assert payload_bytes(randomk(0.1).compress(x)[0]) == payload_bytes(randomk(0.1).compress(x)[0])
    assert payload_bytes(randomk(0.1, seed=1).compress(x)[0]) != payload_bytes(randomk(0.1).compress(x)[0])
