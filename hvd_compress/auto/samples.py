"""What `auto` probes its candidates with: a chunk of each bucket and, for model-wide candidates, a gradient."""

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

# Of chunks with so many elements, only a part is probed.
_LARGE_CHUNK = 2**17


def of_bucket(layout: ModelLayout, state: State, gradients: Sequence[Any], b: int, decay: float) -> Sample:
    """The sample of a bucket: its first chunk, and the gradient with the most elements in it.

    Args:
        layout: How gradients are divided.
        state: The plan's variables.
        gradients: All gradients of the plan.
        b: The bucket's index.
        decay: The factor of residuals, `residual_decay`.
    """
    bucket, of_group = layout.buckets[b], layout.group_of(b).layout
    residuals = state.groups[bucket.group].residuals
    chunk = bucket.chunks.start
    tensors = [gradients[i] for i in of_group.tensors.members]
    (size,) = of_group.shapes[chunk]
    # Every eighth element: a part says as much as the whole chunk, and this part contains all of its layers.
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
