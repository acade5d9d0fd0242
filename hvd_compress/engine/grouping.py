"""Many gradients in few buckets, each of which crosses the network at once."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class TensorGroup:
    """Which gradients travel together.

    Attributes:
        members: Positions in the list of gradients.
        shapes: Their shapes.
    """

    members: tuple[int, ...]
    shapes: tuple[Shape, ...]

    @property
    def sizes(self) -> list[int]:
        """Elements of each member."""
        return [math.prod(shape) for shape in self.shapes]

    @property
    def numel(self) -> int:
        """Elements of all members."""
        return sum(self.sizes)


def assign(
    shapes: Sequence[Shape],
    members: Sequence[int],
    bucket_bytes: int,
    groups: int | Sequence[Sequence[int]] | None = None,
) -> list[TensorGroup]:
    """Divides gradients into buckets, last layers first: their gradients are ready first.

    Args:
        shapes: The shapes of all gradients.
        members: Positions of those that go into buckets.
        bucket_bytes: A bucket is closed before it exceeds this many bytes of float32; a larger
            gradient has a bucket to itself.
        groups: As Horovod's: a number of buckets, or lists of positions, each of which becomes a bucket
            (what is in none of them has a bucket to itself). Overrides `bucket_bytes`.

    Returns:
        The buckets, in the order in which they should be exchanged.
    """
    order = sorted(members, reverse=True)
    if groups is None:
        sizes = [4 * math.prod(shapes[i]) for i in order]
        member_lists = [order[run.start : run.stop] for run in runs(sizes, bucket_bytes)]
    elif isinstance(groups, int):
        member_lists = _evenly(order, groups)
    else:
        known = set(order)
        chosen = [[i for i in group if i in known] for group in groups]
        grouped = {i for group in chosen for i in group}
        member_lists = [group for group in chosen if group] + [[i] for i in order if i not in grouped]
    return [TensorGroup(tuple(positions), tuple(shapes[i] for i in positions)) for positions in member_lists]


def runs(sizes: Sequence[int], limit: int) -> list[range]:
    """Consecutive positions whose sizes add up to `limit` at most; what is larger stands alone."""
    found: list[range] = []
    room = 0
    for i, size in enumerate(sizes):
        if not found or size > room:
            found.append(range(i, i))
            room = limit
        found[-1] = range(found[-1].start, i + 1)
        room -= size
    return found


def _evenly(order: Sequence[int], count: int) -> list[list[int]]:
    """As Horovod's `split_list`: `count` runs of almost equal length, none empty."""
    count = min(count, len(order))
    bounds = [len(order) * i // count for i in range(count + 1)] if count else []
    return [list(order[a:b]) for a, b in zip(bounds, bounds[1:])]
