"""Traces that buckets share."""

import numpy as np
import tensorflow as tf
from compressors import seeds

import hvd_compress as hvdc
from hvd_compress.exchange import coding, flags


class TimesTable(hvdc.Compressor):
    """Its context is an array with more elements than `repr` shows."""

    pure = True

    def compress(self, tensor):
        return tensor, np.ones(2000, np.float32)

    def decompress(self, payload, ctx):
        return payload * ctx[1000]


def test_contexts_that_print_alike_do_not_share_a_trace():
    compressor, x = TimesTable(), tf.constant([1.0, 2.0])
    encoded = compressor.encode(x, seeds())
    payload = flags.join([encoded])
    structure, ones = encoded.ctx
    other = ones.copy()
    other[1000] = 5.0
    assert repr(ones) == repr(other)
    for table in (ones, other, ones):
        (decoded,) = coding.decode(compressor, [x.shape], [payload], [(structure, table)], tf.constant(1.0))
        np.testing.assert_array_equal(decoded, x * table[1000])
