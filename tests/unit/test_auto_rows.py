"""What `auto` predicts to save by compressing the rows of embeddings."""

import pytest
import tensorflow as tf

from hvd_compress.auto.rows import RowSavings
from hvd_compress.compressors.resolve import resolve
from hvd_compress.cost import CostModel, KernelCost, Link
from hvd_compress.engine.embedding_table import EmbeddingTable

RANKS, ROWS, COLUMNS, BETA = 3, 1000, 64, 8e-9
KERNEL = KernelCost(call=1e-4, encode=1e-10, decode=2e-11, decode_rank=3e-11)
# A row's number takes two bytes. Of int8, a step and a base come to 64 codes.
PLAIN, CODED = 2 + 4 * COLUMNS, 2 + 8 + COLUMNS


def table(automatic=True, max_rows=ROWS):
    return EmbeddingTable((ROWS, COLUMNS), tf.float32, resolve("int8"), RANKS, 2**20, max_rows, automatic)


def seconds(rows, link=1.0):
    """Of one table: each rank sends its rows to two others, and decodes those of all."""
    nbytes = 4 * rows * COLUMNS
    kernels = 2 * 1e-4 + nbytes * 1e-10 + 3 * nbytes * (2e-11 + 3e-11)
    return link * 2 * rows * (PLAIN - CODED) * BETA - kernels


def savings(tables, counts=None):
    model = CostModel(Link(1e-4, BETA), RANKS, kernels={"quantize": KERNEL})
    return RowSavings(tables, model, None if counts is None else tf.Variable(tf.constant(counts, tf.int64)))


def test_savings_are_those_of_the_link_without_the_kernels():
    found = savings([table(), table(max_rows=10)], [[300, 0, 400], [6, 0, 7]])
    assert found.any
    assert found.at_most() == pytest.approx(seconds(ROWS) + seconds(10))
    assert found.now(2.0) == pytest.approx(seconds(100, 2.0) + seconds(2, 2.0))


def test_tables_of_other_compressors_save_nothing():
    found = savings([table(automatic=False)], [[300, 0, 400]])
    assert not found.any and found.at_most() == 0.0 and found.now(1.0) == 0.0
    assert savings([]).now(1.0) == 0.0
