"""How much progress a step makes with each candidate, relative to a step without compression.

To first order, an update lowers the loss by its inner product with the gradient. The gradient g(t+1) of the next step
comes from other examples than that of this step, g(t). So with c(t), what a compressor with error feedback sends in
this step, the relative progress is

    E <g(t+1), P c(t)> / E <g(t+1), P g(t)>

P is the metric of the optimizer: 1 / sqrt(v) for optimizers that divide by the root of the gradients' mean square v,
such as Adam, and 1 for SGD. What is sent late is partly out of date, and this ratio says how much of it still helps.

Elements with large gradients dominate this ratio. That is right where each step's gain is small beside the noise. Where
gradients hardly change from step to step, every element still has far to move. Then each element counts in its own
scale. A second ratio, that of the ways that elements go, says so:

    E <P g(t+1), P c(t)> / E <P g(t+1), P g(t)>

Sparse compressors send small gradients rarely, so this ratio is smaller. The progress is between the two, and at most
the first; see `rates`.

`progress_sample` measures these numbers. In its own training, a candidate with less progress than the one in use makes
more of it: see `at_own_speed`. C candidates.
"""

from __future__ import annotations

import enum
from typing import Any

import numpy as np

from .arrays import quotient

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
    return sums * xp.where(measured[Row.ENERGY] > 0.0, _KEPT, np.ones_like(_KEPT)) + measured


def lost_shares(xp: Any, measured: Any, prior: Any) -> Any:
    """The share of the energy that each candidate loses, [C]; `prior` [C] before the first measurement."""
    energy = measured[Row.ENERGY]
    return xp.where(energy > 0.0, quotient(xp, measured[Row.LOST], energy), prior)
