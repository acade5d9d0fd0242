"""Measures how much of a gradient each candidate would lose, on a sample."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Callable, NamedTuple

import tensorflow as tf

from ..compressors import Auto
from ..compressors.base import no_seeds
from ..engine.selector import switch_case
from ..kernels.compile import compiled


class Sample(NamedTuple):
    """A chunk of a bucket, and one of the gradients in it."""

    shape: tuple[int, ...]  # of the chunk
    take: Callable[[], tuple[tf.Tensor, tf.Tensor]]  # returns the chunk and its residual
    largest: Callable[[], tf.Tensor]  # returns the gradient, with its residual, in its own shape


def energies(auto: Auto, index: tf.Tensor, samples: Sequence[Sample]) -> tf.Tensor:
    """Returns the energy of a sample's chunk that each candidate loses, and the chunk's energy: float32 [C + 1].

    Model-wide candidates are applied to the sample's gradient: its lost share is multiplied by the chunk's energy.

    Args:
        auto: The compressor `auto`.
        index: int32 scalar, the position of the sample.
        samples: One sample of each bucket.
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
    energies = []
    for candidate in auto.candidates:
        if candidate.model_wide:
            energies.append(tf.constant(0.0))
        else:
            lost = candidate.encode(chunk, no_seeds(), residual, 1.0, True).residual
            energies.append(_energy(lost, None))
    return tf.stack([*energies, _energy(chunk, residual)])


def _shares_of_gradient(auto: Auto, sample: Sample) -> tf.Tensor:
    """The shares of the gradient that model-wide candidates lose, [C + 1]; zeros for the others."""
    gradient = sample.largest()
    shares = [
        candidate.lost_share(gradient) if candidate.model_wide else tf.constant(0.0) for candidate in auto.candidates
    ]
    return tf.stack([*shares, tf.constant(0.0)])


@compiled
def _energy(x: tf.Tensor, residual: tf.Tensor | None) -> tf.Tensor:
    if residual is not None:
        x += tf.cast(residual, tf.float32)
    return tf.reduce_sum(x * x)
