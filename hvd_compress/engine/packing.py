"""How gradients become the tensors that a compressor sees, and back.

Where they lie in these is in `geometry`. Where a chunk lies within one gradient, or a gradient within one chunk,
nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from . import layout as geometry
from .layout import LARGEST as LARGEST


class PerTensorPacking(geometry.PerTensorLayout):
    """The gradients themselves."""

    def cut(self, tensors: Sequence[tf.Tensor], chosen: range) -> list[tf.Tensor]:
        """The chosen ones of the gradients as float32."""
        return [tf.identity(tf.cast(tensors[i], tf.float32)) for i in chosen]

    def join(self, chunks: Sequence[tf.Tensor], dtypes: Sequence[tf.DType]) -> list[tf.Tensor]:
        """The inverse of `cut`."""
        return [tf.cast(chunk, dtype) for chunk, dtype in zip(chunks, dtypes)]


class FlatPacking(geometry.FlatLayout):
    """All gradients laid end to end, cut into chunks of the same size; the last ends with zeros."""

    def cut(self, tensors: Sequence[tf.Tensor], chosen: range) -> list[tf.Tensor]:
        """The chosen chunks, float32 [size] each."""
        parts: dict[int, list[tf.Tensor]] = {chunk: [] for chunk in chosen}
        ends = dict.fromkeys(chosen, 0)

        def fill(chunk: int, upto: int) -> None:
            if upto > ends[chunk]:
                parts[chunk].append(tf.zeros([upto - ends[chunk]]))
                ends[chunk] = upto

        for tensor, spans in zip(tensors, self.spans):
            here = [span for span in spans if span[0] in chosen]
            flat = tf.cast(tf.reshape(tensor, [-1]), tf.float32) if here else None
            for chunk, begin, first, last in here:
                fill(chunk, begin)
                parts[chunk].append(_slice(flat, first, last))
                ends[chunk] = begin + last - first
        for chunk in chosen:
            fill(chunk, self.size)
        return [_concat(parts[chunk]) for chunk in chosen]

    def join(self, chunks: Sequence[tf.Tensor], dtypes: Sequence[tf.DType]) -> list[tf.Tensor]:
        """The inverse of `cut`: tensors of the gradients' shapes, in their `dtypes`."""
        parts: list[list[tf.Tensor]] = [[] for _ in self.spans]
        run: list[
            tuple[int, int, int, int]
        ] = []  # small ones that follow each other: gradient, chunk, begin, end

        def cut_run() -> None:
            if run:
                chunk, start = run[0][1:3]
                ends = tf.split(
                    _slice(chunks[chunk], start, run[-1][3]), [end - begin for *_, begin, end in run]
                )
                for (i, *_), part in zip(run, ends):
                    parts[i].append(part)
                run.clear()

        for i, spans in enumerate(self.spans):
            for chunk, begin, first, last in spans:
                end = begin + last - first
                if self.tensors.sizes[i] >= geometry.SMALL:
                    parts[i].append(_slice(chunks[chunk], begin, end))
                    continue
                if run and (run[-1][1], run[-1][3]) != (chunk, begin):
                    cut_run()
                run.append((i, chunk, begin, end))
        cut_run()
        joined = zip(parts, self.tensors.shapes, dtypes)
        return [tf.cast(tf.reshape(_concat(found), shape), dtype) for found, shape, dtype in joined]

    def take(self, chunks: Sequence[Any], i: int) -> tf.Tensor:
        """Gradient `i`, of those in the bucket, out of all chunks (tensors or variables), in its shape."""
        parts = [
            _slice(tf.convert_to_tensor(chunks[chunk]), begin, begin + last - first)
            for chunk, begin, first, last in self.spans[i]
        ]
        return tf.reshape(_concat(parts), self.tensors.shapes[i])


def _concat(parts: Sequence[tf.Tensor]) -> tf.Tensor:
    return parts[0] if len(parts) == 1 else tf.concat(parts, 0) if parts else tf.zeros([0])


def _slice(flat: tf.Tensor, first: int, last: int) -> tf.Tensor:
    return flat if last - first == flat.shape[0] else tf.strided_slice(flat, [first], [last], [1])
