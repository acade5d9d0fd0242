"""The places of gradients in the chunks that a compressor sees, and the chunks of each bucket. Numbers only.

Compressors work on flat chunks of at most 2**20 elements, 4 MB. The output of one kernel is still in the processor's
cache when the next kernel reads it. Memory of that size is also reused from step to step, while larger blocks go back
to the operating system, which clears them. Measured on one core, residual + int8 over 25M elements took 163 ms in one
chunk and 41 ms in 24. All chunks have the same size, so that each kernel is compiled once for the whole model.

On a GPU, starting a kernel takes longer than its work on 25 MB. So chunks have up to 2**24 elements there, and a bucket
is one chunk, or one for each rank that owns a part of it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Union

from ..exchange import choice, volume
from ..exchange.volume import BUCKET_BYTES as BUCKET_BYTES
from ..exchange.volume import LARGEST as LARGEST
from ..exchange.volume import LARGEST_ON_GPU
from ..formats.quantize import BLOCK
from .grouping import Shape, TensorGroup, runs

# The default of `hvdc.DistributedOptimizer`.
MIN_COMPRESS_SIZE = 1024

# Small buckets do not make chunks smaller than this.
SMALLEST = 2**12
# Elements in 64 bytes: TensorFlow slices tensors without a copy at multiples of this.
_CELL = 16
# Chunks may grow by this share in order to be aligned.
_ADDED = 1 / 64
# Gradients of fewer elements have no gaps between them, and one tf.split takes them all out of a chunk.
SMALL = 1024
# In a scatter-reduce, each rank owns this many chunks of a full bucket. The first bucket has one for each rank, and so
# is smaller (`int8` between four hosts at 1 Gbit/s: 545 ms with three, 580 with one). With more than _FEW_RANKS ranks,
# it is one chunk, since each bucket costs much latency.
_CHUNKS_OF_OWNER = 3
_FEW_RANKS = 16
# A model has at least this many buckets, unless they would be smaller than so many bytes of float32. See
# `smallest_bucket`.
_BUCKETS = 4
SMALL_BUCKET, _SMALLEST_BUCKET = 2**20, 2**18


class Span(NamedTuple):
    """A part of a gradient that lies in one chunk."""

    chunk: int
    begin: int  # position in the chunk
    first: int  # of the gradient's elements
    last: int  # exclusive

    @property
    def end(self) -> int:
        """The position in the chunk after the last element."""
        return self.begin + self.last - self.first


@dataclasses.dataclass(frozen=True)
class PerTensorLayout:
    """Each gradient is a chunk of its own, for compressors that need the gradients' shapes."""

    tensors: TensorGroup

    @property
    def shapes(self) -> Sequence[Shape]:
        """The shape of each chunk."""
        return self.tensors.shapes

    def in_buckets(self, bucket_bytes: int) -> list[range]:
        """The chunks of each bucket: consecutive ones of up to `bucket_bytes`, but at least one."""
        return runs([4 * size for size in self.tensors.sizes], bucket_bytes)

    def reaching_into(self, chunks: range) -> list[int]:
        """The gradients of which at least a part lies in these chunks."""
        return list(chunks)

    def elements_in(self, chunks: range) -> dict[int, int]:
        """The number of elements in these chunks of each gradient, by its position in the list of all gradients."""
        return {self.tensors.members[i]: self.tensors.sizes[i] for i in chunks}


@dataclasses.dataclass(frozen=True)
class FlatLayout:
    """All gradients end to end, divided into chunks of one size; the last chunk ends with zeros.

    Raises:
        ValueError: The alignment is below 1.
    """

    tensors: TensorGroup
    multiple: int = 1  # the number of chunks is a multiple of this
    # The size of chunks is a multiple of this if that adds less than 2% to it. Otherwise it is a multiple of a half, a
    # fourth, ... of this, as long as that is a multiple of 256; otherwise of 256 or of 16, with which slices copy
    # nothing.
    alignment: int = 16
    largest: int = LARGEST  # the largest size of a chunk in elements, before it is aligned

    def __post_init__(self) -> None:
        if self.alignment < 1:
            raise ValueError(f"a compressor's alignment must be a whole number from 1 on, got {self.alignment}")

    @functools.cached_property
    def count(self) -> int:
        """The number of chunks: so few that each bucket has a part of a gradient."""
        return self._count_of(max(1, self.size))

    def _count_of(self, size: int) -> int:
        return self.multiple * math.ceil(max(1, self.offsets[-1]) / (size * self.multiple))

    @functools.cached_property
    def size(self) -> int:
        """The elements of each chunk."""
        size = math.ceil(self.offsets[-1] / self._count_of(self.largest))
        alignments = [self.alignment]
        while alignments[-1] % (2 * BLOCK) == 0:
            alignments.append(alignments[-1] // 2)
        aligned = (number * math.ceil(size / number) for number in (*alignments, BLOCK, _CELL))
        return next((candidate for candidate in aligned if candidate <= (1 + _ADDED) * size), size)

    @property
    def shapes(self) -> Sequence[Shape]:
        """The shape of each chunk."""
        return volume.Alike((self.size,), self.count)

    def in_buckets(self, bucket_bytes: int) -> list[range]:
        """The chunks of each bucket: consecutive ones of up to `bucket_bytes`, but at least `multiple`.

        The first of several buckets is the smallest, as in PyTorch's DistributedDataParallel: the link has work sooner.
        Each next bucket is at most twice as large, so that the link is busy until it is encoded.
        """
        largest = self.multiple * max(1, bucket_bytes // (4 * max(1, self.size) * self.multiple))
        buckets: list[range] = []
        first, length = 0, self.multiple if self.count > largest else largest
        while first < self.count:
            buckets.append(range(first, min(first + length, self.count)))
            first, length = first + length, min(2 * length, largest)
        return buckets

    @functools.cached_property
    def offsets(self) -> list[int]:
        """The position of each gradient in all chunks end to end, and the end of the last one."""
        cell = _CELL if self.tensors.numel >= 100 * _CELL else 1
        offsets, end = [], 0
        for size in self.tensors.sizes:
            # No gaps between small gradients: there may be ten thousand of them.
            end = cell * math.ceil(end / cell) if size >= SMALL else end
            offsets.append(end)
            end += size
        return [*offsets, end]

    def reaching_into(self, chunks: range) -> list[int]:
        """The gradients of which at least a part lies in these chunks."""
        return [i for i, spans in enumerate(self.spans) if any(span.chunk in chunks for span in spans)]

    def elements_in(self, chunks: range) -> dict[int, int]:
        """The number of elements in these chunks of each gradient, by its position in the list of all gradients."""
        elements = {
            member: sum(span.last - span.first for span in spans if span.chunk in chunks)
            for member, spans in zip(self.tensors.members, self.spans)
        }
        return {member: count for member, count in elements.items() if count}

    def beginning_in(self, chunks: range) -> list[int]:
        """The gradients whose first element lies in these chunks."""
        return [i for i, spans in enumerate(self.spans) if spans and spans[0].chunk in chunks]

    @functools.cached_property
    def spans(self) -> list[list[Span]]:
        """The parts of each gradient."""
        spans = []
        for offset, numel in zip(self.offsets, self.tensors.sizes):
            of_gradient, first = [], 0
            while first < numel:
                chunk, begin = divmod(offset + first, self.size)
                last = min(numel, first + self.size - begin)
                of_gradient.append(Span(chunk, begin, first, last))
                first = last
            spans.append(of_gradient)
        return spans


Layout = Union[FlatLayout, PerTensorLayout]


def bucket_limit(bucket_bytes: int, numel: int, smallest: int = SMALL_BUCKET) -> int:
    """The largest size of a bucket, in bytes of float32, for gradients of `numel` elements."""
    # Small models have several buckets, too, so that those of the last layers are exchanged during the backward pass.
    # A little more than a quarter, for the padding of chunks.
    return min(bucket_bytes, max(smallest, math.ceil(4.1 * numel / _BUCKETS)))


def smallest_bucket(ranks: int) -> int:
    """The argument `smallest` of `bucket_limit` for buckets that are exchanged during the backward pass on CPUs.

    Between more than two ranks, each bucket costs more latency, and small ones are sent in an allgather.
    """
    return _SMALLEST_BUCKET if ranks <= 2 else SMALL_BUCKET


def flat_layout(
    tensors: TensorGroup, candidates: Sequence[Any], limit: int, ranks: int, workers: int = 1, on_gpu: bool = False
) -> FlatLayout:
    """The flat chunks of some gradients.

    Args:
        tensors: The gradients.
        candidates: Compressors or formats that the chunks must suit, in each of their stages. If that would make
            chunks too large, they are padded when they are encoded. Quantizers then copy only codes.
        limit: The largest size of a bucket, in bytes of float32.
        ranks: The world size.
        workers: The workers on each host if the exchange may be hierarchical, else 1.
        on_gpu: Whether kernels run on a GPU.
    """
    largest = LARGEST_ON_GPU if on_gpu else LARGEST
    alignment = math.lcm(*(candidate.alignment for candidate in candidates))

    def layout_for(owners: int, chunks_of_owner: int) -> FlatLayout:
        # Aligned chunks of this size still fill a bucket.
        size = max(SMALLEST, min(largest, int(limit // 4 // (owners * chunks_of_owner) / (1 + _ADDED))))
        return FlatLayout(tensors, owners, alignment, size)

    scattered = layout_for(ranks, 1 if on_gpu or ranks > _FEW_RANKS else _CHUNKS_OF_OWNER)
    full_bucket = scattered.shapes[: max(map(len, scattered.in_buckets(limit)))]
    share_of_worker = full_bucket[: len(full_bucket) // workers]
    exchanges = (full_bucket, ranks), (share_of_worker, ranks // workers)
    stages = [stage for candidate in candidates for stage in candidate.stages]
    if any(choice.choose(stage, *exchange).splits_bucket for stage in stages for exchange in exchanges):
        return scattered
    return layout_for(workers, 1)


def is_compressed(shape: Shape, min_compress_size: int) -> bool:
    """Whether a gradient of this shape is compressed, or too small for it."""
    size = math.prod(shape)
    return size > 0 if min_compress_size == 0 else len(shape) > 1 and size >= min_compress_size
