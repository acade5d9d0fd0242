"""Vectors as matrices of blocks."""

import numpy as np
import pytest
import tensorflow as tf

from hvd_compress.formats.sizes import block_shape
from hvd_compress.kernels import blocks


@pytest.mark.parametrize(
    ("n", "size"), [(1, 8), (7, 8), (8, 8), (9, 16), (1000, 1000), (1001, 1008), (1024, 1024), (5000, 1024)]
)
def test_block_size_is_the_largest_or_all_rounded_up_to_8(n, size):
    assert block_shape(n, 1024)[1] == size


@pytest.mark.parametrize(("n", "block", "count"), [(1, 8, 1), (8, 8, 1), (9, 8, 2), (1024, 1024, 1), (1025, 1024, 2)])
def test_number_of_blocks(n, block, count):
    assert block_shape(n, block) == (count, block)


@pytest.mark.parametrize(("n", "block"), [(1, 8), (7, 8), (8, 8), (20, 8), (24, 8)])
def test_to_blocks_repeats_the_last_element_and_from_blocks_undoes_it(n, block):
    flat = np.arange(1, n + 1, dtype=np.float32)
    matrix = blocks.to_blocks(tf.constant(flat), block)
    expected = np.concatenate([flat, np.full(-n % block, n)]).reshape(-1, block)
    np.testing.assert_array_equal(matrix, expected)
    np.testing.assert_array_equal(blocks.from_blocks(matrix, [n]), flat)


@pytest.mark.parametrize("width", [1, 2, 3, 5, 8, 17, 1000, 1024])
def test_halving_reduces_whole_rows(width):
    values = np.random.default_rng(width).integers(-1000, 1000, (3, width)).astype(np.float32)
    for reduce_pair, expected in ((tf.maximum, np.max), (tf.minimum, np.min), (tf.add, np.sum)):
        reduced = blocks.halving(tf.constant(values), reduce_pair)
        np.testing.assert_array_equal(reduced, expected(values, axis=1, keepdims=True))
