"""Divides the weights of a model into fragments that are exchanged in different steps. Numbers only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from .grouping import Shape


class Rows(NamedTuple):
    """Rows of one variable: all of it, or a range along its first dimension."""

    variable: int  # its position
    start: int
    stop: int


def whole(shapes: Sequence[Shape]) -> list[Rows]:
    """Each variable as one piece."""
    return [Rows(i, 0, shape[0] if shape else 1) for i, shape in enumerate(shapes)]


def divide(shapes: Sequence[Shape], count: int) -> list[list[Rows]]:
    """Divides variables of these shapes, which lie end to end, into `count` fragments of almost equal size.

    Variables with several dimensions are divided between rows, others not at all. A row belongs to the fragment in
    which its middle lies. So a fragment differs from the others by less than two rows, and may be empty if the model
    has fewer rows than fragments.
    """
    fragments: list[list[Rows]] = [[] for _ in range(count)]
    total = sum(map(math.prod, shapes))
    offset = 0
    for i, shape in enumerate(shapes):
        numel, rows = math.prod(shape), shape[0] if len(shape) > 1 else 1
        for fragment, (start, stop) in enumerate(_cuts(offset, rows, numel // max(rows, 1), total, count)):
            if start < stop and numel:
                fragments[fragment].append(Rows(i, start, stop if len(shape) > 1 else (shape or (1,))[0]))
        offset += numel
    return fragments


def _cuts(offset: int, rows: int, row_size: int, total: int, count: int) -> list[tuple[int, int]]:
    """For each fragment, the first of these rows and the one behind the last; they begin at `offset` of `total`."""
    # The first row whose middle, offset + (row + 0.5) * row_size, is not before k / count of the total.
    middles = (-(-2 * total * k // count) for k in range(1, count))
    cuts = [-(-(middle - 2 * offset - row_size) // max(2 * row_size, 1)) for middle in middles]
    cuts = [0, *(min(max(cut, 0), rows) for cut in cuts), rows]
    return list(zip(cuts, cuts[1:]))
