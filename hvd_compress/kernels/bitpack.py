"""Packs codes of 1 to 8 bits into bytes, without unused bits.

The number of bits is a sum of the powers of two 8, 4, 2 and 1. A code is split into fields of these widths, and each
field is packed separately. Codes that share a byte are a fraction of the block apart (for 4 bits, code j and
code j + block / 2), so that packing and unpacking are shifts of whole rows.
"""

from __future__ import annotations

import tensorflow as tf

from ..formats.sizes import fields


def pack(codes: tf.Tensor, bits: int) -> list[tf.Tensor]:
    """Packs uint8 `codes` [rows, block], each below 2**bits, block a multiple of 8.

    Returns one uint8 tensor [rows, block * width / 8] per field of `fields(bits)`.
    """
    packed = []
    shift = bits
    for width in fields(bits):
        shift -= width
        field = tf.bitwise.right_shift(codes, tf.constant(shift, tf.uint8)) if shift else codes
        if width < 8:
            field = tf.bitwise.bitwise_and(field, tf.constant((1 << width) - 1, tf.uint8))
        per_byte = 8 // width
        step = codes.shape[1] // per_byte
        byte = field[:, :step]
        for i in range(1, per_byte):
            part = field[:, i * step : (i + 1) * step]
            byte = tf.bitwise.bitwise_or(byte, tf.bitwise.left_shift(part, tf.constant(i * width, tf.uint8)))
        packed.append(byte)
    return packed


def unpack(packed: list[tf.Tensor], bits: int) -> tf.Tensor:
    """The inverse of `pack`: int32 codes [rows, a, b], a * b = block.

    They are not flattened: inside a compiled function, XLA writes a reshaped tensor two to three times as slowly.
    """
    unpacked = [_unpack_field(byte, width) for width, byte in zip(fields(bits), packed)]
    if len(unpacked) == 1:
        return unpacked[0]
    codes = None
    for width, field in zip(fields(bits), unpacked):  # each has another shape [rows, a, b]
        field = tf.reshape(field, [-1, 1, field.shape[1] * field.shape[2]])
        codes = field if codes is None else tf.bitwise.bitwise_or(tf.bitwise.left_shift(codes, width), field)
    return codes


def _unpack_field(byte: tf.Tensor, width: int) -> tf.Tensor:
    wide = tf.cast(byte, tf.int32)[:, None, :]
    if width == 8:
        return wide
    shifts = tf.reshape(tf.range(0, 8, width, dtype=tf.int32), [1, -1, 1])
    return tf.bitwise.bitwise_and(tf.bitwise.right_shift(wide, shifts), (1 << width) - 1)
