"""The size of rows of a table (an embedding) that are sent one by one."""

from __future__ import annotations

import math

from .base import Format
from .cast import Cast
from .quantize import BLOCK, SIGN_BLOCK, OneBit, Quantize


def index_bytes(table: int) -> int:
    """Bytes of a row's number in a table of `table` rows. The number `table` itself fits, too: it means no row."""
    return math.ceil(table.bit_length() / 8)


def blocks_of(columns: int, largest: int) -> tuple[int, int]:
    """How many blocks of equal size a row is divided into, and this size: a multiple of 8."""
    count = max(1, math.ceil(columns / largest))
    return count, 8 * math.ceil(columns / count / 8)


def row_bytes(form: Format, table: int, columns: int, itemsize: int = 4) -> int:
    """The bytes of one row of a table of `table` rows, including its number.

    `form` is none, with elements of `itemsize` bytes, fp16, bf16, quantize or onebit.

    Raises:
        TypeError: Rows are not sent in another form.
    """
    if isinstance(form, Cast):
        return index_bytes(table) + columns * (itemsize if form.uncompressed else 2)
    if isinstance(form, Quantize):
        count, block = blocks_of(columns, BLOCK)
        return index_bytes(table) + count * (8 + block * form.bits // 8)
    if isinstance(form, OneBit):
        count, block = blocks_of(columns, SIGN_BLOCK)
        return index_bytes(table) + count * (4 + block // 8)
    raise TypeError(f"{form} is no form for rows")
