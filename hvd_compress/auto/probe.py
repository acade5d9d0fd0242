"""Measures how much each candidate would lose of a chunk or, if the candidate is model-wide, of a gradient."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, Callable, NamedTuple

import tensorflow as tf

from ..compressors import Auto
from ..compressors.base import no_seeds
from ..engine.layout import FlatLayout
from ..engine.model_layout import ModelLayout
from ..engine.packing import pack, unpack_one
from ..engine.selector import switch_case
from ..engine.state import State
from ..kernels.compile import compiled, fed_back

# Of chunks with so many elements, only a part is probed.
_LARGE_CHUNK = 2**17


class Sample(NamedTuple):
    """A bucket's first chunk, and the gradient with the most elements in the bucket."""

    shape: tuple[int, ...]  # of the chunk
    take: Callable[[], tuple[tf.Tensor, tf.Tensor]]  # returns the chunk and its residual
    largest: Callable[[], tf.Tensor]  # returns the gradient, with its residual, in its own shape


def sample_of(layout: ModelLayout, state: State, gradients: Sequence[Any], b: int, decay: float) -> Sample:
    """The sample of the bucket with the index `b`; `decay` is the factor of residuals."""
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


def energies(auto: Auto, index: tf.Tensor, samples: Sequence[Sample]) -> tf.Tensor:
    """Measures what each candidate loses of a sample's chunk. The energy of a tensor is the sum of its squares.

    Model-wide candidates are applied to the sample's gradient: its lost share is multiplied by the chunk's energy.

    Args:
        auto: The compressor `auto`.
        index: int32 scalar, the position of the sample.
        samples: One sample of each bucket.

    Returns:
        The energy that each candidate loses, and last the chunk's energy: float32 [candidates + 1].
    """
    shapes = list(dict.fromkeys(sample.shape for sample in samples))
    of_shape = [[i for i, sample in enumerate(samples) if sample.shape == shape] for shape in shapes]

    def measure(members: list[int]) -> tf.Tensor:
        place = [members.index(i) if i in members else 0 for i in range(len(samples))]
        return _of_chunk(auto, *switch_case(tf.gather(place, index), [samples[i].take for i in members]))

    # Not inlined: TensorFlow would go through all of its operations in each step, also when no probe is due.
    @tf.function(autograph=False, experimental_attributes={"_noinline": True})
    def measure_one() -> tf.Tensor:
        kind = [shapes.index(sample.shape) for sample in samples]
        branches = [functools.partial(measure, members) for members in of_shape]
        lost = switch_case(tf.gather(kind, index), branches)
        if any(auto.model_wide_candidates):
            branches = [functools.partial(_shares_of_gradient, auto, sample) for sample in samples]
            lost += switch_case(index, branches) * lost[-1]
        return lost

    return measure_one()


def _of_chunk(auto: Auto, chunk: tf.Tensor, residual: tf.Tensor) -> tf.Tensor:
    """The energy of the chunk that each candidate loses, and the chunk's: [C + 1]; zeros for model-wide candidates."""
    lost = [
        tf.constant(0.0)
        if candidate.model_wide
        else _energy(candidate.encode(chunk, no_seeds(), residual, 1.0, True).residual, None)
        for candidate in auto.candidates
    ]
    return tf.stack([*lost, _energy(chunk, residual)])


def _shares_of_gradient(auto: Auto, sample: Sample) -> tf.Tensor:
    """The shares of the gradient that model-wide candidates lose, [C + 1]; zeros for the others."""
    gradient = sample.largest()
    shares = [c.lost_share(gradient) if c.model_wide else tf.constant(0.0) for c in auto.candidates]
    return tf.stack([*shares, tf.constant(0.0)])


@compiled
def _energy(x: tf.Tensor, residual: tf.Tensor | None) -> tf.Tensor:
    if residual is not None:
        x += tf.cast(residual, tf.float32)
    return tf.reduce_sum(x * x)
