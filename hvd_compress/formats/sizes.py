"""Numbers of blocks, bits and bytes of codes and indices, shared by kernels and formats."""

from __future__ import annotations

import math

from .base import Part

PAGE = 65536  # elements of a page of indices; see `kernels.indices`
ROW = 1024  # bitmap bits packed as one row


def block_shape(n: int, largest: int) -> tuple[int, int]:
    """Returns how many blocks hold `n` elements, and their size.

    The size is `largest`, or `n` rounded up to a multiple of 8 if that is less.
    """
    block = min(largest, 8 * math.ceil(max(n, 1) / 8))
    return math.ceil(n / block), block


def fields(bits: int) -> list[int]:
    """The widths of the fields that a code of `bits` bits is split into, widest first: [4, 2, 1] for 7."""
    return [width for width in (8, 4, 2, 1) if bits & width]


def stride_blocks(n: int, k: int) -> int:
    """Elements per block when `n` elements form `k` blocks with stride k: j, j + k, j + 2k, ..."""
    return math.ceil(n / k)


def row_dtype(rows: int) -> str:
    """The smallest integer dtype for the number of one of `rows` rows."""
    return "uint8" if rows <= 256 else "uint16" if rows <= 65536 else "int32"


def index_form(n: int, k: int) -> str:
    """`"pages"` or `"bitmap"`, whichever takes fewer bytes for `k` of `n` indices; see `kernels.indices`."""
    pages_bytes = 2 * k + (4 * math.ceil(n / PAGE) if n > PAGE else 0)
    return "bitmap" if bitmap_bytes(n) < pages_bytes else "pages"


def index_parts(n: int, k: int) -> list[Part]:
    """The parts of `k` packed indices below `n`."""
    if index_form(n, k) == "bitmap":
        return [Part((bitmap_bytes(n),), "uint8")]
    low = Part((k,), "uint16")
    return [low] if n <= PAGE else [Part((math.ceil(n / PAGE),), "int32"), low]


def bitmap_bytes(n: int) -> int:
    """Bytes of a bitmap of `n` elements."""
    return 8 * math.ceil(n / 64) if n <= ROW else ROW // 8 * math.ceil(n / ROW)
