"""What is trained: its gradients, and the buckets in which they cross."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import sys
from collections.abc import Sequence

import numpy as np

from ..engine import grouping
from ..engine import layout as geometry
from ..engine.grouping import Shape
from ..engine.layout import BUCKET_BYTES, MIN_COMPRESS_SIZE
from ..exchange import volume
from ..formats import Format


# Each forecast uses it as a cache key: to hash many shapes each time would take long.
@dataclasses.dataclass(frozen=True, eq=False)
class Workload:
    """What is trained."""

    shapes: tuple[Shape, ...]  # of all gradients, first layer first
    # Seconds of the backward pass. Gradients become ready evenly in it, byte by byte, last layer first.
    backward: float = 0.0
    rest: float = 0.0  # seconds of a step in which nothing can cross: forward pass, update
    bucket_bytes: int = BUCKET_BYTES  # of a bucket's gradients, as float32

    @functools.cached_property
    def numel(self) -> int:
        """The number of parameters."""
        return sum(map(math.prod, self.shapes))

    def ready(self, first: int) -> float:
        """The share of the backward pass after which the gradients from this position on are ready."""
        return 1.0 - self._numel_before[first] / self.numel

    @functools.cached_property
    def _numel_before(self) -> list[int]:
        """The number of parameters before each gradient."""
        return [0, *itertools.accumulate(map(math.prod, self.shapes))]


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Gradients that cross together. Buckets are equal if their exchanges are."""

    nbytes: int  # of gradient, as float32
    shapes: Sequence[Shape]  # of its chunks
    ready: float = dataclasses.field(compare=False)  # the share of the backward pass after which it is complete
    dense: bool = False  # whether it is never compressed


@functools.lru_cache(maxsize=1024)
def buckets_of(work: Workload, candidates: tuple[Format, ...], ranks: int, workers: int = 1) -> list[Bucket]:
    """The buckets of a step, in the order in which they cross, as `engine.model_layout` makes them.

    Args:
        work: What is trained.
        candidates: The compressors that all buckets but the dense ones may use.
        ranks: The world size.
        workers: The workers of each host, if the exchange is hierarchical.
    """
    compress = not all(candidate.uncompressed for candidate in candidates)
    chosen = [i for i, shape in enumerate(work.shapes) if compress and geometry.is_compressed(shape, MIN_COMPRESS_SIZE)]
    smallest = geometry.smallest_bucket(ranks)
    rest = sorted(set(range(len(work.shapes))).difference(chosen))
    dense = _dense_buckets(work, rest, geometry.SMALL_BUCKET if chosen else smallest)
    if not chosen:
        return dense
    (gradients,) = grouping.assign(work.shapes, chosen, sys.maxsize)
    limit = geometry.bucket_limit(work.bucket_bytes, gradients.numel, smallest)
    layout: geometry.Layout
    if candidates[0].per_tensor:
        layout = geometry.PerTensorLayout(gradients)
        limit = sys.maxsize if candidates[0].model_wide else limit
    else:
        layout = geometry.flat_layout(gradients, candidates, limit, ranks, workers)
    gradient_ends = np.cumsum(gradients.sizes)
    compressed, end = list[Bucket](), 0
    for chunks in layout.in_buckets(limit):
        shapes = layout.shapes[chunks.start : chunks.stop]
        numel = sum(count * math.prod(shape) for shape, count in volume.counts(shapes).items())
        end = min(end + numel, gradients.numel)
        last = int(np.searchsorted(gradient_ends, end))  # the gradient in which the bucket ends
        compressed.append(Bucket(4 * numel, shapes, work.ready(gradients.members[last])))
    # Dense buckets go before the last compressed one.
    return [*compressed[:-1], *dense, compressed[-1]]


def _dense_buckets(work: Workload, members: list[int], smallest: int) -> list[Bucket]:
    limit = geometry.bucket_limit(work.bucket_bytes, sum(math.prod(work.shapes[i]) for i in members), smallest)
    return [
        Bucket(4 * group.numel, group.shapes, work.ready(min(group.members)), dense=True)
        for group in grouping.assign(work.shapes, members, limit)
    ]
