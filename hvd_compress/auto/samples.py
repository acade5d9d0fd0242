"""What `auto` tries its candidates on: of each bucket a chunk, and for some candidates a whole gradient."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ..engine.packing import FlatPacking
from ..engine.plan import Plan
from ..engine.state import ParamGroup
from ..kernels.compile import fed_back
from .probe import Sample

# Of chunks with so many elements a part is tried.
_LARGE_CHUNK = 2**17


def of_bucket(plan: Plan, gradients: Sequence[Any], b: int) -> Sample:
    """The first chunk of a bucket, and the gradient that has most elements in the bucket."""
    param_group, chunks = plan.buckets[b]
    chunk = chunks.start
    tensors = [gradients[i] for i in param_group.layout.tensors.members]
    (size,) = param_group.layout.shapes[chunk]
    # A part of it tells as much: every eighth element, so that all of its layers take part.
    every = 8 if size >= _LARGE_CHUNK else 1

    def find() -> tuple[tf.Tensor, tf.Tensor]:
        (cut,) = param_group.layout.cut(tensors, range(chunk, chunk + 1))
        kept = param_group.state.residuals
        cut = cut[::every]
        return cut, kept[chunk].read_value()[::every] if kept else tf.zeros_like(cut)

    whole = functools.partial(_largest, param_group, chunks, tensors, plan.settings.residual_decay)
    return Sample((math.ceil(size / every),), find, whole)


def _largest(param_group: ParamGroup, chunks: range, tensors: Sequence[Any], decay: float) -> tf.Tensor:
    """The gradient with most elements in these chunks, with its residual; float32 in its own shape."""
    elements = param_group.layout.elements_in(chunks)
    i = param_group.layout.tensors.members.index(max(elements, key=lambda member: elements[member]))
    gradient = tf.cast(tensors[i], tf.float32)
    if not param_group.state.residuals:
        return gradient
    assert isinstance(param_group.layout, FlatPacking)
    return fed_back(gradient, param_group.layout.take(param_group.state.residuals, i), decay)
