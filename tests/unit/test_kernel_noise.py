"""Random numbers: their definition in Python's integers, and their statistics."""

import numpy as np
import pytest
import reference
import tensorflow as tf

from hvd_compress.kernels import noise
from hvd_compress.kernels.compile import compiled

GOLDEN = 0x9E3779B9
N = 1 << 18
SEEDS = [0, 1, -1, 12345, 2**31 - 1, -(2**31)]


def signed(x):
    return x - 2**32 if x >= 2**31 else x


def python_bits(seed, position):
    return reference.mix((position * GOLDEN % 2**32) ^ reference.mix((seed + GOLDEN) % 2**32))


def uniform(seed, n=N):
    return noise.uniform(tf.constant(seed, tf.int32), n).numpy()


def test_mix_is_murmur3s_finalizer():
    # MurmurHash3_x86_32 of the empty string is the finalizer of the seed: its published test vectors.
    vectors = {0: 0, 1: 0x514E28B7, 0xFFFFFFFF: 0x81F16F39}
    assert {x: reference.mix(x) for x in vectors} == vectors
    inputs = [*vectors, 2, 3, 0x80000000, 0xDEADBEEF]
    mixed = noise.mix(tf.constant(inputs, tf.uint32))
    assert mixed.numpy().tolist() == [reference.mix(x) for x in inputs]


def test_each_input_bit_changes_half_of_the_output_bits():
    x = np.random.default_rng(0).integers(0, 2**32, 4000, dtype=np.uint32)
    for bit in range(32):
        changed = noise.mix(tf.constant(x)).numpy() ^ noise.mix(tf.constant(x ^ np.uint32(1 << bit))).numpy()
        flips = np.unpackbits(changed.view(np.uint8)).mean()
        assert abs(flips - 0.5) < 5 * 0.5 / np.sqrt(32 * 4000)


@pytest.mark.parametrize("seed", SEEDS)
def test_bits_and_uniform_are_the_documented_hash_of_seed_and_position(seed):
    expected = [python_bits(seed, p) for p in range(1000)]
    assert noise.bits(tf.constant(seed, tf.int32), 1000).numpy().tolist() == expected
    np.testing.assert_array_equal(uniform(seed, 1000), np.array([b >> 8 for b in expected]) / 2.0**24)


def test_the_same_numbers_under_xla_and_for_a_longer_vector():
    under_xla = compiled(lambda seed: noise.uniform(seed, 1000))(tf.constant(7))
    np.testing.assert_array_equal(under_xla, uniform(7, 1000))
    np.testing.assert_array_equal(uniform(7, 5000)[:1000], uniform(7, 1000))


@pytest.mark.parametrize("seed", SEEDS)
def test_uniform_has_the_moments_of_the_uniform_distribution(seed):
    u = uniform(seed).astype(np.float64)
    assert u.min() >= 0 and u.max() < 1
    assert abs(u.mean() - 1 / 2) < 5 * np.sqrt(1 / 12 / N)
    assert abs(u.var() - 1 / 12) < 5 * np.sqrt(1 / 180 / N)  # Var (u - 1/2)^2 = 1/80 - 1/144 = 1/180
    counts = np.bincount((u * 256).astype(int), minlength=256)
    chi_squared = np.sum((counts - N / 256) ** 2) / (N / 256)
    assert abs(chi_squared - 255) < 5 * np.sqrt(2 * 255)


@pytest.mark.parametrize("seed", SEEDS)
def test_all_32_bits_are_set_half_of_the_time(seed):
    bits = noise.bits(tf.constant(seed, tf.int32), N).numpy()
    shares = [np.mean(bits >> np.uint32(bit) & 1) for bit in range(32)]
    np.testing.assert_allclose(shares, 0.5, atol=5 * 0.5 / np.sqrt(N))


@pytest.mark.parametrize("seed", SEEDS[:4])
@pytest.mark.parametrize("lag", [1, 2, 3, 8, 1024, 65536])
def test_neighbours_are_not_correlated(seed, lag):
    u = uniform(seed).astype(np.float64) - 0.5
    correlation = np.mean(u[lag:] * u[:-lag]) * 12
    assert abs(correlation) < 5 / np.sqrt(N - lag)


def test_streams_of_different_seeds_are_not_correlated():
    streams = np.stack([uniform(seed) - 0.5 for seed in (0, 1, 2, 3, -1, 1 << 16, GOLDEN - 2**32)])
    correlation = streams.astype(np.float64) @ streams.T / N * 12
    np.testing.assert_allclose(correlation, np.eye(len(streams)), atol=5 / np.sqrt(N))


def test_fold_is_the_documented_hash():
    for seed in SEEDS:
        for value in (0, 1, 77, -5):
            inner = reference.mix((seed + GOLDEN) % 2**32)
            expected = signed(reference.mix((inner + value) % 2**32))
            assert int(noise.fold(tf.constant(seed, tf.int32), value)) == expected


def test_fold_gives_each_step_bucket_and_rank_a_seed_of_its_own():
    step = tf.range(100)[:, None, None]
    bucket = noise.fold(step, tf.range(10)[None, :, None])
    rank = noise.fold(bucket, tf.range(1, 9)[None, None, :])
    seeds = np.concatenate([np.ravel(bucket), np.ravel(rank)])
    assert len(np.unique(seeds)) == len(seeds)  # 9000 seeds: a collision by chance has odds of 1 to 100


def test_fold_takes_a_step_of_64_bits():
    assert int(noise.fold(tf.constant(1), tf.constant(3, tf.int64))) == int(noise.fold(tf.constant(1), 3))


def test_below_draws_uniformly_from_each_range():
    limits = np.resize(np.array([1, 2, 3, 7, 100, 2**24], np.int32), 6 * 20000)
    drawn = noise.below(tf.constant(5), tf.constant(limits)).numpy()
    assert drawn.dtype == np.int32
    assert (drawn >= 0).all() and (drawn < limits).all()
    for limit in (1, 2, 3, 7, 100):
        counts = np.bincount(drawn[limits == limit], minlength=limit)
        expected = 20000 / limit
        assert np.sum((counts - expected) ** 2) / expected < limit - 1 + 5 * np.sqrt(2 * limit)
    top = drawn[limits == 2**24] / 2.0**24
    assert abs(top.mean() - 0.5) < 5 * np.sqrt(1 / 12 / 20000)
