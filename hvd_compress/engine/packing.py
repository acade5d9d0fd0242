"""Gradients packed into the chunks of a layout, and back.

Nothing is copied where a chunk lies within one gradient, or a gradient within one tensor of chunks.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

import tensorflow as tf

from ..exchange.transfers import concat
from .layout import SMALL, Layout, PerTensorLayout

# Pieces of fewer elements are put together with their neighbours: a bucket may have ten thousand of them.
_SMALL_PIECE = 2**14


def pack(layout: Layout, tensors: Sequence[tf.Tensor], chunks: range) -> list[tf.Tensor]:
    """The chunks of a layout, float32.

    Args:
        layout: The layout.
        tensors: All gradients of the layout, in the order of its members.
        chunks: Positions of the wanted chunks.
    """
    return [concat(of_chunk) for of_chunk in pieces(layout, tensors, chunks)]


def pieces(layout: Layout, tensors: Sequence[tf.Tensor], chunks: range) -> list[list[tf.Tensor]]:
    """As `pack`, but the pieces of each chunk: one tensor, or several that form the chunk end to end."""
    if isinstance(layout, PerTensorLayout):
        return [[tf.identity(tf.cast(tensors[i], tf.float32))] for i in chunks]
    parts: dict[int, list[tf.Tensor]] = {chunk: [] for chunk in chunks}
    filled = dict.fromkeys(chunks, 0)

    def pad(chunk: int, end: int) -> None:
        if end > filled[chunk]:
            parts[chunk].append(tf.zeros([end - filled[chunk]]))

    for tensor, spans in zip(tensors, layout.spans):
        wanted = [span for span in spans if span.chunk in chunks]
        flat = tf.cast(tf.reshape(tensor, [-1]), tf.float32) if wanted else None
        for span in wanted:
            pad(span.chunk, span.begin)
            parts[span.chunk].append(_slice(flat, span.first, span.last))
            filled[span.chunk] = span.end
    for chunk in chunks:
        pad(chunk, layout.size)
    return [_with_small_joined(of_chunk) for of_chunk in parts.values()]


def _with_small_joined(parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    joined: list[tf.Tensor] = []
    for is_small, run in itertools.groupby(parts, lambda part: part.shape[0] < _SMALL_PIECE):
        of_run = list(run)
        joined += [concat(of_run)] if is_small else of_run
    return joined or [tf.zeros([0])]


def unpack(layout: Layout, chunks: Sequence[tf.Tensor], dtypes: Sequence[tf.DType]) -> list[tf.Tensor]:
    """The inverse of `pack` for all chunks: tensors of the gradients' shapes, in their `dtypes`.

    Each of `chunks` may be several chunks end to end.
    """
    if isinstance(layout, PerTensorLayout):
        return [tf.cast(chunk, dtype) for chunk, dtype in zip(chunks, dtypes)]
    offsets, sizes = layout.offsets, layout.tensors.sizes
    ends = list(itertools.accumulate(chunk.shape[0] for chunk in chunks))
    begins = [0, *ends]

    def run_of(i: int) -> int:
        """The tensor that holds all of a small gradient; a negative number of its own for any other gradient."""
        at = bisect.bisect_right(ends, offsets[i])
        return at if 0 < sizes[i] < SMALL and offsets[i] + sizes[i] <= ends[at] else -1 - i

    parts: list[list[tf.Tensor]] = []  # of each gradient
    # There are no gaps between small gradients that follow each other.
    for at, run in itertools.groupby(range(len(sizes)), run_of):
        members = list(run)
        first, lengths = offsets[members[0]], [sizes[i] for i in members]
        last = first + sum(lengths)
        if at >= 0:
            parts += [[part] for part in tf.split(_slice(chunks[at], first - begins[at], last - begins[at]), lengths)]
            continue
        places = range(bisect.bisect_right(ends, first), bisect.bisect_left(ends, last) + 1) if last > first else ()
        parts.append([_slice(chunks[t], max(first - begins[t], 0), min(last, ends[t]) - begins[t]) for t in places])
    return [
        tf.cast(tf.reshape(concat(of_gradient) if of_gradient else tf.zeros([0]), shape), dtype)
        for of_gradient, shape, dtype in zip(parts, layout.tensors.shapes, dtypes)
    ]


def _slice(flat: tf.Tensor, first: int, last: int) -> tf.Tensor:
    return flat if last - first == flat.shape[0] else tf.strided_slice(flat, [first], [last], [1])
