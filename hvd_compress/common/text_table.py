"""Tables of text."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> list[str]:
    """A line for each row. Columns are as wide as their longest cell, and aligned right except those in `left`."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        "  ".join(
            text.ljust(width) if i in left else text.rjust(width) for i, (text, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    ]
