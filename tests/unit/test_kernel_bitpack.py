"""Codes of 1 to 8 bits in bytes, against NumPy."""

import numpy as np
import pytest
import tensorflow as tf

from hvd_compress.kernels import bitpack
from hvd_compress.kernels.compile import compiled

WIDTHS = {1: [1], 2: [2], 3: [2, 1], 4: [4], 5: [4, 1], 6: [4, 2], 7: [4, 2, 1], 8: [8]}


def numpy_pack(codes, bits):
    """The documented layout, bit by bit: fields of the code from the top, each spread over its own bytes."""
    rows, block = codes.shape
    ones = (codes[..., None] >> np.arange(bits)[::-1]) & 1  # [rows, block, bits], most significant bit first
    packed, top = [], 0
    for width in WIDTHS[bits]:
        step = block * width // 8
        out = np.zeros((rows, step), np.int64)
        for code in range(block):
            for bit in range(width):
                place = code // step * width + (width - 1 - bit)
                out[:, code % step] += ones[:, code, top + bit].astype(np.int64) << place
        packed.append(out.astype(np.uint8))
        top += width
    return packed


def codes_for(bits, rows, block):
    """Every code value occurs, at places that have nothing to do with it."""
    codes = np.resize(np.arange(2**bits), rows * block)
    return np.random.default_rng(bits).permutation(codes).reshape(rows, block).astype(np.uint8)


@pytest.mark.parametrize("bits", range(1, 9))
def test_fields_are_powers_of_two_widest_first(bits):
    assert bitpack.fields(bits) == WIDTHS[bits]


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize(("rows", "block"), [(1, 8), (3, 24), (2, 1024)])
def test_pack_is_the_documented_layout_without_a_bit_to_spare(bits, rows, block):
    codes = codes_for(bits, rows, block)
    packed = bitpack.pack(tf.constant(codes), bits)
    assert sum(part.numpy().nbytes for part in packed) * 8 == rows * block * bits
    for part, expected in zip(packed, numpy_pack(codes, bits)):
        assert part.dtype == tf.uint8
        np.testing.assert_array_equal(part, expected)


@pytest.mark.parametrize("bits", range(1, 9))
def test_round_trip_of_all_code_values(bits):
    codes = codes_for(bits, 2, 1024)
    assert set(codes.ravel()) == set(range(2**bits))

    @compiled
    def round_trip(x):
        return bitpack.unpack(bitpack.pack(x, bits), bits)

    for unpacked in (round_trip(tf.constant(codes)), round_trip.__wrapped__(tf.constant(codes))):
        assert unpacked.dtype == tf.int32 and unpacked.shape.rank == 3
        np.testing.assert_array_equal(tf.reshape(unpacked, codes.shape), codes)
