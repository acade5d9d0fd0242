"""Measures, while training, the numbers from which `progress` estimates the progress of each candidate.

What all candidates send, c(t), is simulated on a sample of this rank's gradients, whichever candidate is in use. The
mean square v of the same sample, never compressed, makes the optimizer's metric P.

LAMB divides the update of a layer by its norm (You et al. 2020, algorithm 2), which also grows with a compressor's
errors. So with LAMB, each of P c(t) and P g(t) is divided by the norm of its own running mean, which is the update. One
norm is taken of the whole sample, or of each matrix for `powersgd`.

C candidates, K elements.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from ..common import tracing
from ..compressors import Auto, Compressor, Seeds
from ..engine.grouping import Shape
from ..kernels.compile import uncompiled
from . import gradient_parts
from .progress import ROWS

_NAME = "hvdc_progress"  # of variables
# Measured are the first steps of a trace, and later so many steps at a time. Each time begins with residuals of zero.
FIRST_STEPS, BURST = 48, 24
_LONGEST_MEAN = 1000.0  # steps that v averages over at most
_MOMENTUM = 0.9  # of optimizers that normalize updates, by default
# v is at least this share of its mean. An element whose gradients were all 0 so far says nothing.
_SMALLEST = 1e-8


class ProgressSample:
    """Simulates the candidates on a sample of one rank's gradients.

    Its variables differ between ranks and are in no checkpoint: they begin with zeros.

    Args:
        auto: The compressor `auto`.
        shapes: The shapes of the gradients that `auto` compresses, by their positions.
        decays: The factor of each candidate's residual in each step; 0 without error feedback.
        adaptive: Whether the optimizer divides by the root of the gradients' mean square.
        normalized: Whether it divides updates by their norm.
        columns: The positions of the candidates to simulate.

    Attributes:
        columns: As above.
    """

    def __init__(
        self,
        auto: Auto,
        shapes: Mapping[int, Shape],
        decays: Sequence[float],
        adaptive: bool,
        normalized: bool,
        columns: Sequence[int],
    ) -> None:
        self._auto, self.columns = auto, columns
        with tf.device("CPU"):
            self._calls = tracing.variable(tf.constant(0, tf.int64), _NAME)
            flat = [c for c in columns if not auto.candidates[c].model_wide]
            self._samples: list[tuple[_Simulation, Callable[[Sequence[Any]], tf.Tensor]]] = []
            if flat:
                sizes = [math.prod(shape) for shape in shapes.values()]
                stride = gradient_parts.stride_of(sizes)
                elements = sum(gradient_parts.segments(size, stride).numel for size in sizes)
                simulation = _Simulation(auto, flat, (elements,), decays, adaptive, normalized)
                take = functools.partial(gradient_parts.segments_of, tuple(shapes), stride)
                self._samples.append((simulation, take))
            parts: dict[tuple[int, Shape, Shape], list[int]] = {}  # with the candidates that are simulated on them
            for c in (c for c in columns if c not in flat):
                for part in gradient_parts.matrices_of(auto.candidates[c], shapes):
                    parts.setdefault(part, []).append(c)
            for (i, matrix, shape), of_part in parts.items():
                simulation = _Simulation(auto, of_part, shape, decays, adaptive, normalized)
                self._samples.append((simulation, functools.partial(gradient_parts.part_of, i, matrix, shape)))

    def measure(self, seeds: Seeds, gradients: Sequence[Any]) -> tf.Tensor:
        """Simulates one step, if this step is measured.

        Args:
            seeds: For random choices of the candidates.
            gradients: All gradients of the plan.

        Returns:
            float32 [ROWS, C], see `Row`. Zeros for candidates that are not simulated, and if this step is not measured.
        """
        with tf.device("CPU"):
            due, begins = self._due(self._calls.assign_add(1, read_value=True) - 1)
        count = len(self._auto.candidates)

        # Not inlined: TensorFlow would go through all of its operations in each step.
        @tf.function(autograph=False, experimental_attributes={"_noinline": True})
        def simulate() -> tf.Tensor:
            samples = [take(gradients) for _, take in self._samples]  # where the gradients are
            columns: dict[int, tf.Tensor] = {}
            with tf.device("CPU"), uncompiled():
                for (simulation, _), sample in zip(self._samples, samples):
                    for c, numbers in simulation.step(sample, seeds, begins).items():
                        columns[c] = columns[c] + numbers if c in columns else numbers
                return tf.stack([columns.get(c, tf.zeros([ROWS])) for c in range(count)], 1)

        return tf.cond(due, simulate, lambda: tf.zeros([ROWS, count]))

    def _due(self, step: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Whether the step with this number is measured, and whether measuring begins anew with it."""
        every = self._auto.probe_every
        if every <= BURST:
            return tf.constant(True), step == 0
        of_burst = step % every
        return (step < FIRST_STEPS) | (of_burst < BURST), of_burst == 0


class _Simulation:
    """Some candidates with error feedback on the same gradients of one shape.

    `columns` are the positions of the candidates. See `ProgressSample` for the other arguments.
    """

    def __init__(
        self,
        auto: Auto,
        columns: Sequence[int],
        shape: Shape,
        decays: Sequence[float],
        adaptive: bool,
        normalized: bool,
    ) -> None:
        self._candidates = {c: auto.candidates[c] for c in columns}
        self._shape, self._decays, self._adaptive = shape, decays, adaptive
        elements, count = math.prod(shape), len(columns)
        zeros = tf.zeros([elements])
        self._mean_square, self._steps = (tracing.variable(x, _NAME) for x in (zeros, tf.constant(0.0)))
        self._residuals = [tracing.variable(zeros, _NAME) for _ in columns]
        # P c(t) of each candidate, then P g(t); each divided by the norm of its update if updates are normalized.
        self._sent = tracing.variable(tf.zeros([count + 1, elements]), _NAME)
        self._updates: tf.Variable | None = None
        if normalized:  # weighted sums of P c(t) and P g(t), and the sum of the weights
            self._updates = tracing.variable(tf.zeros([count + 1, elements]), _NAME)
            self._weight = tracing.variable(tf.constant(0.0), _NAME)
        factors = [candidate.initial_factors([shape]) for candidate in self._candidates.values()]
        self._factors = [None if x is None else tracing.variable(x, _NAME) for x in factors]

    def step(self, gradient: tf.Tensor, seeds: Seeds, begins: tf.Tensor) -> dict[int, tf.Tensor]:
        """Simulates one step with a gradient, float32 of `shape`. Returns [ROWS] by the candidate's position."""
        finite = tf.math.is_finite(tf.reduce_sum(gradient * gradient))
        x = tf.reshape(tf.where(finite, gradient, tf.zeros_like(gradient)), [-1])
        keep = 1.0 - tf.cast(begins, tf.float32)
        sent = self._sent.read_value() * keep
        square = x * x
        variance = tf.reduce_sum(square * tf.square(sent[-1]))  # if all elements were independent noise
        metric = self._metric(square, finite)
        gains, ways = (tf.unstack(row) for row in tf.unstack(tf.matmul([x, metric * x], sent, transpose_b=True)))
        now, energies = [], []
        for place, (c, candidate) in enumerate(self._candidates.items()):
            old = self._residuals[place].read_value() * (keep * self._decays[c])
            new = self._lost(place, candidate, x, old, seeds)
            if self._decays[c]:
                self._residuals[place].assign(_finite(new))
            total = x + old
            now.append(metric * (total - new))
            energies.append((tf.reduce_sum(new * new), tf.reduce_sum(total * total)))
        sent = self._normalized(_finite(tf.stack([*now, metric * x])), keep)
        self._sent.assign(sent)
        own_gain = tf.reduce_sum(x * sent[-1]) * keep  # as the others, 0 where measuring begins
        return {
            c: tf.stack([gains[place], gains[-1], variance, ways[place], ways[-1], own_gain, *energies[place]])
            for place, c in enumerate(self._candidates)
        }

    def _lost(self, place: int, candidate: Compressor, x: tf.Tensor, old: tf.Tensor, seeds: Seeds) -> tf.Tensor:
        """What the candidate does not send of a gradient and its old residual, [K]."""
        if candidate.uncompressed:
            return tf.zeros_like(x)
        shaped = [tf.reshape(tensor, self._shape) for tensor in (x, old)]
        factor = self._factors[place]
        if factor is None:
            lost = candidate.encode(shaped[0], seeds, shaped[1], 1.0, True).residual
        else:
            lost, new_factor = candidate.encode_alone(shaped[0] + shaped[1], factor.read_value())
            factor.assign(new_factor)
        return tf.reshape(tf.cast(lost, tf.float32), [-1])

    def _normalized(self, sent: tf.Tensor, keep: tf.Tensor) -> tf.Tensor:
        """P c(t) of each candidate and P g(t), [C + 1, K], divided by the norms of the updates where these are."""
        if self._updates is None:
            return sent
        kept = _MOMENTUM * keep
        sums = self._updates.assign(kept * self._updates + (1.0 - _MOMENTUM) * sent, read_value=True)
        weight = self._weight.assign(kept * self._weight + (1.0 - _MOMENTUM), read_value=True)
        return tf.math.divide_no_nan(sent, tf.norm(sums / weight, axis=1, keepdims=True))

    def _metric(self, square: tf.Tensor, finite: tf.Tensor) -> tf.Tensor | float:
        """The optimizer's metric: [K], or 1."""
        if not self._adaptive:
            return 1.0
        self._steps.assign_add(tf.cast(finite, tf.float32))
        weight = tf.cast(finite, tf.float32) / tf.clip_by_value(self._steps.read_value(), 1.0, _LONGEST_MEAN)
        mean = self._mean_square.read_value()
        mean = self._mean_square.assign(mean + weight * (square - mean), read_value=True)
        least = _SMALLEST * tf.reduce_mean(mean)
        return tf.where(mean > least, tf.math.rsqrt(tf.maximum(mean, least)), 0.0)


def _finite(x: tf.Tensor) -> tf.Tensor:
    """Zeros in place of what is not finite: a value that overflows in fp16 would never leave the running means."""
    return tf.where(tf.math.is_finite(x), x, tf.zeros_like(x))
