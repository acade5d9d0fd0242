"""block_sparse against NumPy."""

import numpy as np
import pytest
import reference
from compressors import round_trip

import hvd_compress as hvdc

block_sparse, topk = hvdc.Compression.block_sparse, hvdc.Compression.topk


def numpy_block_sparse(x, ratio, block):
    matrix = x.reshape(-1, x.shape[-1])
    norms = {
        (i, j): np.linalg.norm(matrix[i : i + block, j : j + block].astype(np.float64))
        for i in range(0, matrix.shape[0], block)
        for j in range(0, matrix.shape[1], block)
    }
    out = np.zeros_like(matrix)
    for i, j in sorted(norms, key=norms.__getitem__)[-reference.num_kept(ratio, len(norms)) :]:
        out[i : i + block, j : j + block] = matrix[i : i + block, j : j + block]
    return out.reshape(x.shape)


@pytest.mark.parametrize("ratio", [0.001, 0.1, 0.5, 1.0])
@pytest.mark.parametrize(
    ("shape", "block"),
    [((64, 32), 4), ((64, 32), 1), ((3, 3, 16, 64), 16), ((6, 9), 3), ((2, 5, 4), 2)],
    ids=str,
)
def test_keeps_the_blocks_of_the_largest_norms(shape, block, ratio):
    x = reference.vector("heavy", int(np.prod(shape))).reshape(shape)
    expected = numpy_block_sparse(x, ratio, block)
    np.testing.assert_array_equal(round_trip(block_sparse(ratio, block), x), expected)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_norms_neither_vanish_nor_overflow(scale):
    x = (reference.vector("normal", 64 * 32) * np.float32(scale)).reshape(64, 32)
    np.testing.assert_array_equal(round_trip(block_sparse(0.1, 4), x), numpy_block_sparse(x, 0.1, 4))


@pytest.mark.parametrize("shape", [(2048,), (63, 32), (64, 30), (7,), ()], ids=str)
def test_falls_back_to_topk_where_blocks_do_not_fit(shape):
    x = reference.vector("normal", int(np.prod(shape))).reshape(shape)
    compressor = block_sparse(0.1, 4)
    np.testing.assert_array_equal(round_trip(compressor, x), round_trip(topk(0.1), x))
    assert compressor.wire_bytes(shape) == topk(0.1).wire_bytes(shape)


def test_error_bound():
    """||error||^2 <= (1 - k / m) ||x||^2, with equality where all blocks have one norm."""
    x = np.ones((64, 32), np.float32)
    error = np.sum((x - round_trip(block_sparse(0.1, 4), x)) ** 2)
    assert error == (1 - 13 / 128) * np.sum(x**2)
