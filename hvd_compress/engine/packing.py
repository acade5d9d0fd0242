"""Gradients packed into the chunks of a layout, and back.

Nothing is copied where a chunk lies within one gradient, or a gradient within one chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from .layout import SMALL, Layout, PerTensorLayout, Span


def pack(layout: Layout, tensors: Sequence[tf.Tensor], chunks: range) -> list[tf.Tensor]:
    """The chunks of a layout, float32.

    Args:
        layout: The layout.
        tensors: All gradients of the layout, in the order of its members.
        chunks: Positions of the wanted chunks.
    """
    if isinstance(layout, PerTensorLayout):
        return [tf.identity(tf.cast(tensors[i], tf.float32)) for i in chunks]
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
    return [_concat(of_chunk) for of_chunk in parts.values()]


def unpack(layout: Layout, chunks: Sequence[tf.Tensor], dtypes: Sequence[tf.DType]) -> list[tf.Tensor]:
    """The inverse of `pack` for all chunks: tensors of the gradients' shapes, in their `dtypes`."""
    if isinstance(layout, PerTensorLayout):
        return [tf.cast(chunk, dtype) for chunk, dtype in zip(chunks, dtypes)]
    parts: list[list[tf.Tensor]] = [[] for _ in layout.spans]
    neighbours: list[tuple[int, Span]] = []  # small gradients that follow each other in a chunk

    def split_neighbours() -> None:
        if neighbours:
            first, last = neighbours[0][1], neighbours[-1][1]
            joined = _slice(chunks[first.chunk], first.begin, last.end)
            sizes = [span.end - span.begin for _, span in neighbours]
            for (i, _), part in zip(neighbours, tf.split(joined, sizes)):
                parts[i].append(part)
            neighbours.clear()

    for i, spans in enumerate(layout.spans):
        for span in spans:
            if layout.tensors.sizes[i] >= SMALL:
                parts[i].append(_slice(chunks[span.chunk], span.begin, span.end))
                continue
            if neighbours:
                before = neighbours[-1][1]
                if (before.chunk, before.end) != (span.chunk, span.begin):
                    split_neighbours()
            neighbours.append((i, span))
    split_neighbours()
    return [
        tf.cast(tf.reshape(_concat(of_gradient), shape), dtype)
        for of_gradient, shape, dtype in zip(parts, layout.tensors.shapes, dtypes)
    ]


def _concat(parts: Sequence[tf.Tensor]) -> tf.Tensor:
    return parts[0] if len(parts) == 1 else tf.concat(parts, 0) if parts else tf.zeros([0])


def _slice(flat: tf.Tensor, first: int, last: int) -> tf.Tensor:
    return flat if last - first == flat.shape[0] else tf.strided_slice(flat, [first], [last], [1])
