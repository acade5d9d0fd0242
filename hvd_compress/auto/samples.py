"""What `auto` tries its candidates on: of each bucket a piece, and for some candidates a whole gradient."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ..engine.packing import FlatPieces
from ..engine.plan import Plan
from ..engine.state import Section
from ..kernels.compile import fed_back
from .probe import Sample

# Of pieces with so many elements a part is tried.
_LARGE_PIECE = 2**17


def of_bucket(plan: Plan, gradients: Sequence[Any], b: int) -> Sample:
    """The first piece of a bucket, and the gradient that has most elements in the bucket."""
    section, pieces = plan.buckets[b]
    piece = pieces.start
    tensors = [gradients[i] for i in section.layout.bucket.members]
    (size,) = section.layout.shapes[piece]
    # A part of it tells as much: every eighth element, so that all of its layers take part.
    every = 8 if size >= _LARGE_PIECE else 1

    def find() -> tuple[tf.Tensor, tf.Tensor]:
        (cut,) = section.layout.cut(tensors, range(piece, piece + 1))
        kept = section.state.residuals
        cut = cut[::every]
        return cut, kept[piece].read_value()[::every] if kept else tf.zeros_like(cut)

    whole = functools.partial(_largest, section, pieces, tensors, plan.settings.residual_decay)
    return Sample((math.ceil(size / every),), find, whole)


def _largest(section: Section, pieces: range, tensors: Sequence[Any], decay: float) -> tf.Tensor:
    """The gradient with most elements in these pieces, with its residual; float32 in its own shape."""
    elements = section.layout.elements_in(pieces)
    i = section.layout.bucket.members.index(max(elements, key=lambda member: elements[member]))
    gradient = tf.cast(tensors[i], tf.float32)
    if not section.state.residuals:
        return gradient
    assert isinstance(section.layout, FlatPieces)
    return fed_back(gradient, section.layout.take(section.state.residuals, i), decay)
