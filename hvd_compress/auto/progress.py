"""How much progress a step makes with each candidate, relative to a step without compression.

To first order, an update lowers the loss by its inner product with the gradient. The gradient g(t+1) of the next step
comes from other examples than that of this step, g(t). So with c(t), what a compressor with error feedback sends in
this step, the relative progress is

    E <g(t+1), P c(t)> / E <g(t+1), P g(t)>

P is the metric of the optimizer: 1 / sqrt(v) for optimizers that divide by the root of the gradients' mean square v,
such as Adam, and 1 for SGD. What is sent late is partly out of date, and this ratio says how much of it still helps.

Elements with large gradients dominate this ratio. That is right where each step's gain is small beside the noise. Where
gradients hardly change from step to step, every element still has far to move. Then each element counts in its own
scale, and the ratio is that of the ways that elements go:

    E <P g(t+1), P c(t)> / E <P g(t+1), P g(t)>

Sparse compressors send small gradients rarely, so this ratio is smaller. The progress is between the two, and at most
the first; see `rates`.

LAMB divides the update of a layer by its norm (You et al. 2020, algorithm 2), which also grows with a compressor's
errors. So with LAMB, each of P c(t) and P g(t) is divided by the norm of its own running mean, which is the update. One
norm is taken of the whole sample, or of each matrix for `powersgd`.

The c(t) of all candidates are simulated on a sample of this rank's gradients, whichever candidate is in use. v is the
mean square of the same sample, never compressed. In its own training, a candidate with less progress than the one in
use makes more of it: see `at_own_speed`. C candidates, K elements.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ..common import tracing
from ..compressors import Auto, Compressor, Seeds
from ..engine.grouping import Shape
from ..kernels.compile import uncompiled
from . import gradient_parts
from .arrays import quotient

_NAME = "hvdc_progress"  # of variables
# Measured are the first steps with all candidates, and later so many steps at a time. Each time begins with residuals
# of zero.
FIRST_STEPS, BURST = 48, 24
_LONGEST_MEAN = 1000.0  # steps that v averages over at most
_MOMENTUM = 0.9  # of optimizers that normalize updates, by default
# v is at least this share of its mean. An element whose gradients were all 0 so far says nothing.
_SMALLEST = 1e-8
LEAST = 0.02  # progress


class Row(enum.IntEnum):
    """The rows of what `ProgressSample.measure` returns. P c(t) and P g(t) are those of the step before."""

    GAIN = 0  # <g(t+1), P c(t)>
    WHOLE_GAIN = 1  # <g(t+1), P g(t)>
    VARIANCE = 2  # of the latter
    WAY = 3  # <P g(t+1), P c(t)>
    WHOLE_WAY = 4  # <P g(t+1), P g(t)>
    OWN_GAIN = 5  # <g(t+1), P g(t+1)>
    LOST = 6  # the energy of what the candidate loses
    ENERGY = 7  # of gradient + residual


ROWS = len(Row)
# Shares of a gradient that the next one repeats. Up to the first one the gain counts, and from the second one on the
# way. The share was below 0.2 where the gain is right (a transformer, a CNN and dense layers on text, with no
# compression in use), and 0.7 where the way is right (an autoencoder with `hybrid` or `powersgd:rank=1` in use).
_NOISY, _STEADY = 0.3, 0.7
# In each step that is measured, the sums of what was measured before decay by this factor; a variance by its square.
_KEPT = np.full([ROWS, 1], 0.97, np.float32)
_KEPT[Row.VARIANCE] **= 2


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
                self._residuals[place].assign(new)
            total = x + old
            now.append(metric * (total - new))
            energies.append((tf.reduce_sum(new * new), tf.reduce_sum(total * total)))
        sent = self._normalized(tf.stack([*now, metric * x]), keep)
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


def rates(xp: Any, measured: Any, prior: Any, choice: Any) -> Any:
    """The relative progress of the candidates, [C], from 0.02 to 1.

    What was measured is gain^(1 - s) way^s, with the two ratios in the docstring of this file, and at most the gain. s
    grows from 0 to 1 with the share of a gradient that the next one repeats. It is averaged with what is known before,
    which counts as much as two standard deviations of what was measured.

    Args:
        xp: The array module, `numpy` or `tf.experimental.numpy`.
        measured: [ROWS, C], the sum of what `ProgressSample.measure` returned; see `policy.follow`.
        prior: [C], the progress that is known before.
        choice: int32 [B], the candidates in use.
    """
    doubt, known = _doubt(xp, measured), xp.maximum(measured[Row.WHOLE_GAIN], 0.0)
    gain = xp.clip(quotient(xp, measured[Row.GAIN], known), LEAST, 1.0)
    repeated = quotient(xp, known, measured[Row.OWN_GAIN])
    ratio = gain * _of_way(xp, measured, gain) ** xp.clip((repeated - _NOISY) / (_STEADY - _NOISY), 0.0, 1.0)
    weight = known + doubt
    speed = xp.mean(xp.take(xp.where(known > 0.0, ratio, xp.where(weight > 0.0, prior, 1.0)), choice))
    average = quotient(xp, known * at_own_speed(xp, ratio, speed) + doubt * prior, weight)
    return xp.clip(xp.where(weight > 0.0, average, prior), LEAST, 1.0)


def _of_way(xp: Any, measured: Any, gain: Any) -> Any:
    """The way that elements go with each candidate, divided by the gain, [C], and limited to 0.02 to 1."""
    way = quotient(xp, measured[Row.WAY], measured[Row.WHOLE_WAY])
    return xp.where(measured[Row.WHOLE_WAY] > 0.0, xp.clip(way / gain, LEAST, 1.0), 1.0)


def at_own_speed(xp: Any, ratio: Any, speed: Any) -> Any:
    """The progress in trainings with the candidates, [C], from those of their simulations beside another one.

    Where weights move slower, what is sent late is less out of date. If a candidate makes progress 1 / (1 + late * v)
    while weights move at speed v, it makes p = 1 / (1 + late * p) in its own training.

    Args:
        xp: The array module.
        ratio: [C], the progress while training with others.
        speed: The progress of those. The speed of an uncompressed training is 1.
    """
    late = (1.0 / ratio - 1.0) / speed
    return 2.0 / (1.0 + xp.sqrt(1.0 + 4.0 * late))


def outweighs_noise(xp: Any, measured: Any) -> Any:
    """Whether what was measured, [ROWS, C], counts more than what is known before, [C]; see `rates`."""
    return measured[Row.WHOLE_GAIN] > _doubt(xp, measured)


def _doubt(xp: Any, measured: Any) -> Any:
    """What is known before counts as much as this, [C]: two standard deviations."""
    return 2.0 * xp.sqrt(measured[Row.VARIANCE])


def add(xp: Any, sums: Any, measured: Any) -> Any:
    """The sums, [ROWS, C], after a step in which `ProgressSample.measure` returned `measured`; see `rates`."""
    return sums * xp.where(xp.max(measured[Row.ENERGY]) > 0.0, _KEPT, np.ones_like(_KEPT)) + measured


def lost_shares(xp: Any, measured: Any, prior: Any) -> Any:
    """The share of the energy that each candidate loses, [C]; `prior` [C] before the first measurement."""
    energy = measured[Row.ENERGY]
    return xp.where(energy > 0.0, quotient(xp, measured[Row.LOST], energy), prior)
