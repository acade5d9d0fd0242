"""How much of a gradient each candidate would let through, tried on a part of it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Callable, NamedTuple

import tensorflow as tf

from ..compressors import Auto
from ..compressors.base import no_seeds
from ..kernels.compile import compiled


class Sample(NamedTuple):
    """A chunk of a bucket, and a whole gradient in it."""

    shape: tuple[int, ...]  # of the chunk
    find: Callable[[], tuple[tf.Tensor, tf.Tensor]]  # returns it and its residual
    whole: Callable[[], tf.Tensor]  # returns the gradient, with its residual


def energies(auto: Auto, turn: tf.Tensor, some: Sequence[Sample]) -> tf.Tensor:
    """The energy that each candidate loses of a sample's chunk, and that of the chunk, [C + 1].

    Candidates that see gradients whole are tried on the gradient: the same share of the chunk's energy.

    Args:
        auto: The settings.
        turn: int32 scalar, which of the samples.
        some: One of each bucket.
    """
    shapes = list(dict.fromkeys(sample.shape for sample in some))
    alike = [[i for i, sample in enumerate(some) if sample.shape == shape] for shape in shapes]

    def measure(members: list[int]) -> tf.Tensor:
        place = [members.index(i) if i in members else 0 for i in range(len(some))]
        return _of_chunk(auto, *switch(tf.gather(place, turn), [some[i].find for i in members]))

    # A call of its own: dissolved in the graph, TensorFlow would go through all of it in each step.
    @tf.function(autograph=False, experimental_attributes={"_noinline": True})
    def measure_one() -> tf.Tensor:
        kind = [shapes.index(sample.shape) for sample in some]
        found = switch(tf.gather(kind, turn), [functools.partial(measure, members) for members in alike])
        if any(auto.model_wide_candidates):
            shares = switch(turn, [functools.partial(_shares_of_gradient, auto, sample) for sample in some])
            found += shares * found[-1]
        return found

    return measure_one()


def _of_chunk(auto: Auto, chunk: tf.Tensor, kept: tf.Tensor) -> tf.Tensor:
    lost = []
    for candidate, is_whole in zip(auto.candidates, auto.model_wide_candidates):
        left = None if is_whole else candidate.encode(chunk, no_seeds(), kept, 1.0, True).residual
        lost.append(tf.constant(0.0) if is_whole else _energy(left, None))
    return tf.stack([*lost, _energy(chunk, kept)])


def _shares_of_gradient(auto: Auto, sample: Sample) -> tf.Tensor:
    """What candidates lose that see the gradient whole, [C + 1]; zeros for the others."""
    gradient = sample.whole()
    lost = [
        candidate.lost_share(gradient) if is_whole else tf.constant(0.0)
        for candidate, is_whole in zip(auto.candidates, auto.model_wide_candidates)
    ]
    return tf.stack([*lost, tf.constant(0.0)])


def switch(index: tf.Tensor, branches: Sequence[Callable[[], Any]]) -> Any:
    """What the branch of this index returns; without an operation for it if there is but one."""
    return branches[0]() if len(branches) == 1 else tf.switch_case(index, list(branches))


@compiled
def _energy(x: tf.Tensor, residual: tf.Tensor | None) -> tf.Tensor:
    if residual is not None:
        x += tf.cast(residual, tf.float32)
    return tf.reduce_sum(x * x)
