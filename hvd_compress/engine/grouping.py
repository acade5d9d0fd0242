"""Gradients that are exchanged together."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

from ..formats.base import Shape as Shape


@dataclasses.dataclass(frozen=True)
class TensorGroup:
    """Some of a list of gradients."""

    members: tuple[int, ...]  # their positions in the list
    shapes: tuple[Shape, ...]

    @functools.cached_property
    def sizes(self) -> list[int]:
        """The elements of each member."""
        return [math.prod(shape) for shape in self.shapes]

    @functools.cached_property
    def numel(self) -> int:
        """The elements of all members."""
        return sum(self.sizes)


def assign(
    shapes: Sequence[Shape], members: Sequence[int], limit: int, groups: int | Sequence[Sequence[int]] | None = None
) -> list[TensorGroup]:
    """Divides gradients into groups, in the order of sending: the last layers first, since they are ready first.

    Args:
        shapes: The shapes of all gradients.
        members: Positions of the gradients to divide.
        limit: The largest size of a group in bytes of float32; a larger gradient has a group to itself.
        groups: As Horovod's `groups`: a number of groups, or lists of positions; a gradient in none of the lists has a
            group to itself. Overrides `limit`.
    """
    order = sorted(members, reverse=True)
    if groups is None:
        sizes = [4 * math.prod(shapes[i]) for i in order]
        lists = [order[run.start : run.stop] for run in runs(sizes, limit)]
    elif isinstance(groups, int):
        # As Horovod's `split_list`: runs of almost equal length, none empty.
        count = min(groups, len(order))
        bounds = [len(order) * i // count for i in range(count + 1)] if count else []
        lists = [order[a:b] for a, b in zip(bounds, bounds[1:])]
    else:
        wanted = set(order)
        named = [[i for i in group if i in wanted] for group in groups]
        grouped = {i for group in named for i in group}
        lists = [group for group in named if group] + [[i] for i in order if i not in grouped]
    return [TensorGroup(tuple(positions), tuple(shapes[i] for i in positions)) for positions in lists]


def positions(groups: Any, variables: Sequence[Any]) -> Any:
    """Groups of variables as groups of their positions in `variables`; a number of groups, or None, as it is."""
    if not isinstance(groups, (list, tuple)):
        return groups
    position = {id(variable): i for i, variable in enumerate(variables)}
    return [[position[id(v)] for v in group if id(v) in position] for group in groups]


def runs(sizes: Sequence[int], limit: int) -> list[range]:
    """Consecutive positions whose sizes add up to at most `limit`; a larger size stands alone."""
    ranges: list[range] = []
    room = 0
    for i, size in enumerate(sizes):
        if not ranges or size > room:
            ranges.append(range(i, i))
            room = limit
        ranges[-1] = range(ranges[-1].start, i + 1)
        room -= size
    return ranges
