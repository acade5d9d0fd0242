"""powersgd: its matrices, and its kernels against NumPy."""

import numpy as np
import pytest
import tensorflow as tf

import hvd_compress as hvdc
from hvd_compress.engine.settings import Settings
from hvd_compress.kernels import subspace as low_rank


@pytest.mark.parametrize(
    "shape, matrix",
    [
        ((3, 3, 64, 128), (576, 128)), ((768, 12, 64), (768, 768)), ((12, 64, 768), (768, 768)), ((7, 9), (7, 9)),
        ((4, 4), None), ((1000,), None), ((), None), ((2, 5000), None), ((3, 3, 512, 1), (9, 512)),
    ],
)  # fmt: skip
def test_the_matrix_with_the_shortest_sides(shape, matrix):
    assert hvdc.Compression.powersgd(2).matrix(shape) == matrix


@pytest.mark.parametrize("rank", [1, 2, 5])
def test_orthonormal_spans_the_same(rank):
    random = np.random.default_rng(rank)
    factors = [random.standard_normal((b, rank, n)).astype(np.float32) for b, n in ((3, 40), (1, 700))]
    factors[0][1] *= 1e-30
    vectors, made_with = low_rank.orthonormal([tf.constant(f) for f in factors])
    for found, again in zip(vectors, low_rank.transformed([tf.constant(f) for f in factors], made_with)):
        np.testing.assert_allclose(again, found, atol=1e-6)
    for before, after in zip(factors, vectors):
        for x, q in zip(before.astype(np.float64), after.numpy().astype(np.float64)):
            np.testing.assert_allclose(q @ q.T, np.eye(rank), atol=2e-6)
            best, _ = np.linalg.qr(x.T)
            np.testing.assert_allclose(q.T @ q, best @ best.T, atol=2e-5)


def test_dependent_vectors_become_zero():
    x = np.random.default_rng(0).standard_normal((3, 50)).astype(np.float32)
    x[1], x[2] = 2.0 * x[0], 0.0
    (q,), _ = low_rank.orthonormal([tf.constant(x[None])])
    np.testing.assert_allclose(q[0, 0], x[0] / np.linalg.norm(x[0]), atol=1e-6)
    np.testing.assert_array_equal(q[0, 1:], 0.0)


@pytest.mark.parametrize("rank", [1, 3, 9])
def test_products(rank):
    random = np.random.default_rng(rank)
    m, p, q = (random.standard_normal(s).astype(np.float32) for s in ((30, 50), (rank, 30), (rank, 50)))
    np.testing.assert_allclose(low_rank.left(m, q), q @ m.T, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(low_rank.right(m, p), p @ m, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(low_rank.product(p, q), p.T @ q, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(low_rank.lost(m, p, q), m - p.T @ q, rtol=1e-4, atol=1e-4)


def test_momentum_correction_does_not_go_with_it():
    with pytest.raises(ValueError, match="momentum_correction needs a sparse compressor.*powersgd:rank=2"):
        Settings(hvdc.Compression.powersgd(2), momentum_correction=0.9)


def test_stock_horovod_is_refused():
    payload, _ = hvdc.Compression.powersgd(2).compress(tf.ones([40, 50]))
    with pytest.raises(TypeError, match="hvdc.allreduce"):
        tf.convert_to_tensor(payload)
