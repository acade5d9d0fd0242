"""What `auto` predicts to save by compressing the rows of embeddings."""

import dataclasses
import math

import numpy as np
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
    return EmbeddingTable((ROWS, COLUMNS), tf.float32, resolve("int8"), RANKS, 2**20, False, max_rows, automatic)


def seconds(rows, link=1.0):
    """Of one table: each rank sends its rows to two others, and decodes those of all."""
    nbytes = 4 * rows * COLUMNS
    kernels = 2 * 1e-4 + nbytes * 1e-10 + 3 * nbytes * (2e-11 + 3e-11)
    return link * 2 * rows * (PLAIN - CODED) * BETA - kernels


def savings(tables, burst=0.0):
    model = CostModel(Link(1e-4, BETA, burst=burst), RANKS, kernels={"quantize": KERNEL})
    return RowSavings(tables, model)


def counts(*rows):
    return np.array([[n, 0, n] for n in rows], np.int64).reshape(-1, 3)


def test_savings_are_those_of_the_link_without_the_kernels():
    found = savings([table(max_rows=300), table(max_rows=10)])
    assert found.any
    assert found.at_most() == pytest.approx(seconds(300) + seconds(10))
    assert found.now(counts(300, 6), 2.0) == pytest.approx(seconds(100, 2.0) + seconds(2, 2.0))


def test_a_burst_is_not_for_rows():
    """A shaped link lets some bytes pass at once, but the buckets of the step use that up."""
    assert savings([table(max_rows=300)], burst=1e6).at_most() == pytest.approx(seconds(300))


def test_tables_of_other_compressors_save_nothing():
    found = savings([table(automatic=False)])
    assert not found.any and found.at_most() == 0.0 and found.now(counts(300), 1.0) == 0.0
    assert savings([]).now(counts(), 1.0) == 0.0


def test_a_table_that_is_sent_as_a_dense_gradient_saves_what_that_saves():
    # Of 3,000 rows on all ranks, 1,000 different ones at most: both forms are sent as dense gradients.
    sent = [dense * BETA for dense in (table().uncompressed.dense_bytes, table().dense_bytes)]
    kernels = seconds(ROWS, 0.0)
    assert savings([table()]).now(counts(3000), 5.0) == pytest.approx(5 * (sent[0] - sent[1]) + kernels, rel=1e-3)


def test_rows_of_an_unknown_compressor_are_always_compressed():
    unknown = dataclasses.replace(table(), compressor=resolve("onebit"))
    assert savings([unknown]).at_most() == math.inf
