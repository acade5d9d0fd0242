"""Where gradients lie in the chunks that a compressor sees, and which chunks cross at once: numbers only.

Compressors work on flat chunks of at most 2**20 elements, 4 MB: what one kernel writes, the next one finds in
the processor's cache, and memory of that size is reused from step to step, where the kernel of the operating
system would hand out, and clear, larger blocks anew each time. Measured on one core, residual + int8 over 25M
elements took 163 ms in one chunk and 41 ms in 24. All chunks have the same size, so that each kernel is
compiled once for the whole model.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

from ..exchange import choice
from ..exchange.volume import LARGEST as LARGEST
from ..formats.quantize import BLOCK
from .grouping import Shape, TensorGroup, runs

# Defaults of `hvdc.DistributedOptimizer`.
BUCKET_BYTES = 25 * 2**20
MIN_COMPRESS_SIZE = 1024

# Where small buckets are asked for, chunks are not cut smaller than this.
SMALLEST = 2**12
# Elements in 64 bytes: TensorFlow slices tensors without a copy at multiples of this.
_CELL = 16
# By how much chunks may become larger in order to be aligned.
_ADDED = 1 / 64
# Gradients of fewer elements lie close together, and are cut out of a chunk all at once.
SMALL = 1024
# Pieces of each owner in a full bucket: the first bucket, with one for each, can be smaller then (`int8` between four
# hosts at 1 Gbit/s: 545 ms with three, 580 with one). Not for many ranks, where each bucket costs much latency.
_CHUNKS_OF_OWNER = 3
_FEW_RANKS = 16
# Into how many buckets a model is divided at least, unless they became smaller than so many bytes of float32.
_BUCKETS = 4
_SMALL_BUCKET = 2**20


@dataclasses.dataclass(frozen=True)
class PerTensorLayout:
    """Pieces that are the gradients themselves, for compressors that need their shapes.

    Attributes:
        bucket: Whose gradients.
    """

    tensors: TensorGroup

    @property
    def shapes(self) -> list[Shape]:
        """The shape of each chunk."""
        return list(self.tensors.shapes)

    def in_buckets(self, bucket_bytes: int) -> list[range]:
        """Which chunks cross at once: consecutive ones of up to `bucket_bytes`, but at least one."""
        return runs([4 * size for size in self.tensors.sizes], bucket_bytes)

    def reaching_into(self, chosen: range) -> list[int]:
        """Which gradients lie in the chosen chunks, at least in part."""
        return list(chosen)

    def elements_in(self, chosen: range) -> dict[int, int]:
        """How many elements of which gradient (by its position in the whole list) lie in the chosen chunks."""
        return {self.tensors.members[i]: self.tensors.sizes[i] for i in chosen}


@dataclasses.dataclass(frozen=True)
class FlatLayout:
    """All gradients laid end to end, cut into chunks of the same size; the last ends with zeros.

    Attributes:
        bucket: Whose gradients.
        multiple: The number of chunks is a multiple of this.
        alignment: The size of chunks is a multiple of this if that adds less than 2% to it; or of a half, a fourth, ...
            of this that still is one of 256; or of 256, or of 16, with which slices copy nothing.
        largest: Elements of a chunk at most, but for the alignment.
    """

    tensors: TensorGroup
    multiple: int = 1
    alignment: int = 16
    largest: int = LARGEST

    def __post_init__(self) -> None:
        if self.alignment < 1:
            raise ValueError(
                f"a compressor's alignment must be a whole number from 1 on, got {self.alignment}"
            )

    @functools.cached_property
    def count(self) -> int:
        """The number of chunks."""
        return self.multiple * math.ceil(max(1, self._offsets[-1]) / (self.largest * self.multiple))

    @functools.cached_property
    def size(self) -> int:
        """The elements of each chunk."""
        size = math.ceil(self._offsets[-1] / self.count)
        numbers = [self.alignment]
        while numbers[-1] % (2 * BLOCK) == 0:
            numbers.append(numbers[-1] // 2)
        rounded = (number * math.ceil(size / number) for number in (*numbers, BLOCK, _CELL))
        return next((found for found in rounded if found <= (1 + _ADDED) * size), size)

    @property
    def shapes(self) -> list[Shape]:
        """The shape of each chunk."""
        return [(self.size,)] * self.count

    def in_buckets(self, bucket_bytes: int) -> list[range]:
        """Which chunks cross at once: consecutive ones of up to `bucket_bytes`, but at least `multiple`.

        Of several buckets the first is the smallest, as in PyTorch's DistributedDataParallel, and each next
        one at most twice as large: the link has something to carry sooner, and what it carries lasts until
        the next bucket is encoded.
        """
        largest = self.multiple * max(1, bucket_bytes // (4 * max(1, self.size) * self.multiple))
        found: list[range] = []
        first, take = 0, self.multiple if self.count > largest else largest
        while first < self.count:
            found.append(range(first, min(first + take, self.count)))
            first, take = first + take, min(2 * take, largest)
        return found

    @functools.cached_property
    def _offsets(self) -> list[int]:
        """Where each gradient begins, and the end of the last."""
        cell = _CELL if self.tensors.numel >= 100 * _CELL else 1
        offsets, end = [], 0
        for size in self.tensors.sizes:
            # Small ones leave no gaps: there may be ten thousand of them.
            end = cell * math.ceil(end / cell) if size >= SMALL else end
            offsets.append(end)
            end += size
        return [*offsets, end]

    def reaching_into(self, chosen: range) -> list[int]:
        """Which gradients lie in the chosen chunks, at least in part."""
        return [i for i, spans in enumerate(self.spans) if any(span[0] in chosen for span in spans)]

    def elements_in(self, chosen: range) -> dict[int, int]:
        """How many elements of which gradient (by its position in the whole list) lie in the chosen chunks."""
        found: dict[int, int] = {}
        for i, spans in zip(self.tensors.members, self.spans):
            elements = sum(last - first for chunk, _, first, last in spans if chunk in chosen)
            if elements:
                found[i] = elements
        return found

    def beginning_in(self, chosen: range) -> list[int]:
        """Which gradients begin in the chosen chunks."""
        return [i for i, spans in enumerate(self.spans) if spans and spans[0][0] in chosen]

    @functools.cached_property
    def spans(self) -> list[list[tuple[int, int, int, int]]]:
        """Where each gradient lies: chunk, position in it, first and last element (exclusive) there."""
        size, spans = self.size, []
        for offset, numel in zip(self._offsets, self.tensors.sizes):
            here, first = [], 0
            while first < numel:
                chunk, begin = divmod(offset + first, size)
                last = min(numel, first + size - begin)
                here.append((chunk, begin, first, last))
                first = last
            spans.append(here)
        return spans


def bucket_limit(bucket_bytes: int, numel: int) -> int:
    """Bytes of float32 that cross at once at most, of so many elements.

    Small models are divided, too, so that their last layers cross while the backward pass is at the first.
    """
    # A little more than a quarter, for what chunks are filled up with.
    return min(bucket_bytes, max(_SMALL_BUCKET, math.ceil(4.1 * numel / _BUCKETS)))


def flat(
    bucket: TensorGroup, candidates: Sequence[Any], limit: int, ranks: int, workers: int = 1
) -> FlatLayout:
    """The flat chunks of some gradients.

    Args:
        bucket: The gradients.
        candidates: Compressors or formats, any of which may be used; in each of their stages. Pieces suit all of them;
            where that would take too large ones, none has to add to a chunk. That copies the chunk, where
            quantizers with blocks that do not fill 64 bytes copy codes only.
        limit: Bytes of float32 that cross at once.
        ranks: Between how many.
        workers: On each host, where the exchange may have two levels.
    """
    alignment = math.lcm(*(candidate.alignment for candidate in candidates))

    def chunks_for(owners: int, each: int) -> FlatLayout:
        # So that as many fit into a bucket, aligned, too.
        size = max(SMALLEST, min(LARGEST, int(limit // 4 // (owners * each) / (1 + _ADDED))))
        return FlatLayout(bucket, owners, alignment, size)

    shared = chunks_for(ranks, _CHUNKS_OF_OWNER if ranks <= _FEW_RANKS else 1)
    largest = shared.shapes[: max(map(len, shared.in_buckets(limit)))]
    between = (largest, ranks), (largest[: len(largest) // workers], ranks // workers)
    stages = [stage for each in candidates for stage in each.stages]
    splits = any(choice.choose(c, *each).splits_bucket for c in stages for each in between)
    return shared if splits else chunks_for(workers, 1)


def is_compressed(shape: Shape, min_compress_size: int) -> bool:
    """Whether a gradient of this shape is compressed, or too small for it."""
    size = math.prod(shape)
    if min_compress_size == 0:
        return size > 0
    return len(shape) > 1 and size >= min_compress_size
