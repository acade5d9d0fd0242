"""How gradients become the tensors that a compressor sees, and back.

Compressors work on flat pieces of at most 2**20 elements, 4 MB: what one kernel writes, the next one finds in
the processor's cache, and memory of that size is reused from step to step, where the kernel of the operating
system would hand out, and clear, larger blocks anew each time. Measured on one core, residual + int8 over 25M
elements took 163 ms in one piece and 41 ms in 24. All pieces have the same size, so that each kernel is
compiled once for the whole model. Where a piece lies within one gradient, or a gradient within one piece,
nothing is copied.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence

import tensorflow as tf

from .buckets import Bucket, Shape, runs

LARGEST = 2**20
# Where small buckets are asked for, pieces are not cut smaller than this.
SMALLEST = 2**12
# Elements in 64 bytes: TensorFlow slices tensors without a copy at multiples of this.
_CELL = 16


@dataclasses.dataclass(frozen=True)
class WholeTensors:
    """The gradients themselves, for compressors that need their shapes.

    Attributes:
        bucket: Whose gradients.
    """

    bucket: Bucket

    @property
    def shapes(self) -> list[Shape]:
        """The shape of each piece."""
        return list(self.bucket.shapes)

    def in_buckets(self, bucket_bytes: int) -> list[range]:
        """Which pieces cross at once: consecutive ones of up to `bucket_bytes`, but at least one."""
        return runs([4 * size for size in self.bucket.sizes], bucket_bytes)

    def reaching_into(self, chosen: range) -> list[int]:
        """Which gradients lie in the chosen pieces, at least in part."""
        return list(chosen)

    def elements_in(self, chosen: range) -> dict[int, int]:
        """How many elements of which gradient (by its position in the whole list) lie in the chosen pieces."""
        return {self.bucket.members[i]: self.bucket.sizes[i] for i in chosen}

    def cut(self, tensors: Sequence[tf.Tensor], chosen: range) -> list[tf.Tensor]:
        """The chosen ones of the gradients as float32."""
        return [tf.identity(tf.cast(tensors[i], tf.float32)) for i in chosen]

    def join(self, pieces: Sequence[tf.Tensor], dtypes: Sequence[tf.DType]) -> list[tf.Tensor]:
        """The inverse of `cut`."""
        return [tf.cast(piece, dtype) for piece, dtype in zip(pieces, dtypes)]


@dataclasses.dataclass(frozen=True)
class FlatPieces:
    """All gradients laid end to end, cut into pieces of the same size; the last ends with zeros.

    Attributes:
        bucket: Whose gradients.
        multiple: The number of pieces is a multiple of this.
        alignment: The size of pieces is a multiple of this if that adds less than 1% to it.
        largest: Elements of a piece at most, but for the alignment.
    """

    bucket: Bucket
    multiple: int = 1
    alignment: int = 16
    largest: int = LARGEST

    @functools.cached_property
    def count(self) -> int:
        """The number of pieces."""
        return self.multiple * math.ceil(max(1, self._offsets[-1]) / (self.largest * self.multiple))

    @functools.cached_property
    def size(self) -> int:
        """The elements of each piece."""
        size = math.ceil(self._offsets[-1] / self.count)
        fits = (number for number in (self.alignment, 256, 16) if size >= 100 * number)
        alignment = next(fits, 1)
        return alignment * math.ceil(size / alignment)

    @property
    def shapes(self) -> list[Shape]:
        """The shape of each piece."""
        return [(self.size,)] * self.count

    def in_buckets(self, bucket_bytes: int) -> list[range]:
        """Which pieces cross at once: consecutive ones of up to `bucket_bytes`, but at least `multiple`.

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
        cell = _CELL if self.bucket.numel >= 100 * _CELL else 1
        return [0, *itertools.accumulate(cell * math.ceil(size / cell) for size in self.bucket.sizes)]

    def cut(self, tensors: Sequence[tf.Tensor], chosen: range) -> list[tf.Tensor]:
        """The chosen pieces, float32 [size] each."""
        parts: dict[int, list[tf.Tensor]] = {piece: [] for piece in chosen}
        ends = dict.fromkeys(chosen, 0)

        def fill(piece: int, upto: int) -> None:
            if upto > ends[piece]:
                parts[piece].append(tf.zeros([upto - ends[piece]]))
                ends[piece] = upto

        for tensor, spans in zip(tensors, self._spans):
            here = [span for span in spans if span[0] in chosen]
            flat = tf.cast(tf.reshape(tensor, [-1]), tf.float32) if here else None
            for piece, begin, first, last in here:
                fill(piece, begin)
                parts[piece].append(_slice(flat, first, last))
                ends[piece] = begin + last - first
        for piece in chosen:
            fill(piece, self.size)
        return [_concat(parts[piece]) for piece in chosen]

    def join(self, pieces: Sequence[tf.Tensor], dtypes: Sequence[tf.DType]) -> list[tf.Tensor]:
        """The inverse of `cut`: tensors of the gradients' shapes, in their `dtypes`."""
        tensors = []
        for shape, dtype, spans in zip(self.bucket.shapes, dtypes, self._spans):
            parts = [
                _slice(pieces[piece], begin, begin + last - first) for piece, begin, first, last in spans
            ]
            tensors.append(tf.cast(tf.reshape(_concat(parts), shape), dtype))
        return tensors

    def reaching_into(self, chosen: range) -> list[int]:
        """Which gradients lie in the chosen pieces, at least in part."""
        return [i for i, spans in enumerate(self._spans) if any(span[0] in chosen for span in spans)]

    def elements_in(self, chosen: range) -> dict[int, int]:
        """How many elements of which gradient (by its position in the whole list) lie in the chosen pieces."""
        found: dict[int, int] = {}
        for i, spans in zip(self.bucket.members, self._spans):
            elements = sum(last - first for piece, _, first, last in spans if piece in chosen)
            if elements:
                found[i] = elements
        return found

    def beginning_in(self, chosen: range) -> list[int]:
        """Which gradients begin in the chosen pieces."""
        return [i for i, spans in enumerate(self._spans) if spans and spans[0][0] in chosen]

    @functools.cached_property
    def _spans(self) -> list[list[tuple[int, int, int, int]]]:
        """Where each gradient lies: piece, position in it, first and last element (exclusive) there."""
        size, spans = self.size, []
        for offset, numel in zip(self._offsets, self.bucket.sizes):
            here, first = [], 0
            while first < numel:
                piece, begin = divmod(offset + first, size)
                last = min(numel, first + size - begin)
                here.append((piece, begin, first, last))
                first = last
            spans.append(here)
        return spans


def _concat(parts: Sequence[tf.Tensor]) -> tf.Tensor:
    return parts[0] if len(parts) == 1 else tf.concat(parts, 0) if parts else tf.zeros([0])


def _slice(flat: tf.Tensor, first: int, last: int) -> tf.Tensor:
    return flat if last - first == flat.shape[0] else tf.strided_slice(flat, [first], [last], [1])
