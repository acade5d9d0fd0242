"""What `auto` tries its candidates on: a chunk of each bucket, and for some candidates a gradient in its own shape."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ..engine.layout import FlatLayout
from ..engine.model_layout import ModelLayout
from ..engine.packing import pack, unpack_one
from ..engine.state import State
from ..kernels.compile import fed_back
from .probe import Sample

# Of chunks with so many elements a part is tried.
_LARGE_CHUNK = 2**17


def of_bucket(layout: ModelLayout, state: State, gradients: Sequence[Any], b: int, decay: float) -> Sample:
    """The first chunk of a bucket, and the gradient with the most elements in the bucket.

    Args:
        layout: How gradients are divided.
        state: The plan's variables.
        gradients: All of the plan.
        b: The bucket's index.
        decay: Of residuals.
    """
    bucket, of_group = layout.buckets[b], layout.group_of(b).layout
    residuals = state.groups[bucket.group].residuals
    chunk = bucket.chunks.start
    tensors = [gradients[i] for i in of_group.tensors.members]
    (size,) = of_group.shapes[chunk]
    # A part of it tells as much: every eighth element, so that all of its layers take part.
    every = 8 if size >= _LARGE_CHUNK else 1

    def take() -> tuple[tf.Tensor, tf.Tensor]:
        (elements,) = pack(of_group, tensors, range(chunk, chunk + 1))
        elements = elements[::every]
        return elements, residuals[chunk].read_value()[::every] if residuals else tf.zeros_like(elements)

    def largest() -> tf.Tensor:
        counts = of_group.elements_in(bucket.chunks)
        i = of_group.tensors.members.index(max(counts, key=lambda member: counts[member]))
        gradient = tf.cast(tensors[i], tf.float32)
        if not residuals:
            return gradient
        assert isinstance(of_group, FlatLayout)
        return fed_back(gradient, unpack_one(of_group, residuals, i), decay)

    return Sample((math.ceil(size / every),), take, largest)
