"""When training is in trouble, judged by its own past: pure functions of the loss, and the rules of `CompressionGuard`.

All ranks call these functions with the same numbers, and so come to the same decision. NumPy only.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

# The values of one level of the loss. The best level so far is the lowest median of so many values in a row.
BLOCK = 8
# By how much the loss must rise above its best level: this share of what it has fallen, this many times the noise, and
# this share of the level itself. The last so many values must all lie there.
_JUMP = {"recent": 3, "share": 0.5, "sigmas": 15.0}
_DRIFT = {"recent": 8, "share": 0.25, "sigmas": 8.0}
_LEAST = 0.2
# Before there is a level: the loss is so many times as large as any value before.
_EXPLODES = 10.0
# A metric has one value per epoch.
_METRIC = {"recent": 2, "share": 0.5, "sigmas": 3.0, "block": 3}
# With error feedback, a contraction leaves at most the sum of the norms of all gradients. An owner of chunks that are
# scatter-reduced also keeps what the second encoding lost, hence a factor.
_BEYOND_CONTRACTION = 4.0
# So many values are kept.
_HISTORY = 512
# The standard deviation of a normal distribution, in medians of absolute deviations.
_SIGMA = 1.4826


class Rise(NamedTuple):
    """How far a series has risen."""

    best: float  # its best level
    now: float  # the least of the last values


def rise(values: Sequence[float], recent: int, share: float, sigmas: float, block: int = BLOCK) -> Rise | None:
    """Whether the last `recent` values all lie clearly above the best level before; None if they do not.

    Clearly means above all values of the block of that level, and by more than

    - `share` of what the series has fallen, from the largest value of its first block to that level,
    - `sigmas` standard deviations of the noise, estimated robustly, by medians: that of the block, or that of
      differences between neighbours, whichever is larger,
    - a fifth of the level.

    Args:
        values: The series, oldest first. What is not finite counts as infinite; of the values before the last ones, it
            is left out.
        recent: The number of last values.
        share: Of what the series has fallen.
        sigmas: Standard deviations of the noise.
        block: The number of values that make a level.
    """
    series = np.asarray(values, np.float64)
    last = np.where(np.isfinite(series[-recent:]), series[-recent:], math.inf)
    before = series[:-recent]
    before = before[np.isfinite(before)]
    if len(before) < block:
        return None
    blocks = np.lib.stride_tricks.sliding_window_view(before, block)
    levels = np.median(blocks, 1)
    of_best = blocks[np.lexsort((blocks.max(1), levels))[0]]
    best, now = float(levels.min()), float(last.min())
    fallen = max(float(before[:block].max()) - best, 0.0)
    least = max(share * fallen, sigmas * max(_spread(of_best), noise(before)), _LEAST * abs(best))
    return Rise(best, now) if now - best > least and now > of_best.max() else None


def noise(values: np.ndarray) -> float:
    """The standard deviation of the noise of a series that moves slowly, by the median difference of neighbours."""
    differences = np.abs(np.diff(values))
    return _SIGMA * float(np.median(differences)) / math.sqrt(2.0) if len(differences) else 0.0


def _spread(values: np.ndarray) -> float:
    return _SIGMA * float(np.median(np.abs(values - np.median(values))))


def loss_alarm(values: Sequence[float]) -> str | None:
    """What is wrong with a series of losses, in words; None if nothing is.

    The loss jumped (the last three values), stays above its trend (the last eight), or was multiplied before it had a
    trend.
    """
    for words, rule in (("jumped", _JUMP), ("stays above its trend: it rose", _DRIFT)):
        risen = rise(values, **rule)  # type: ignore[arg-type]
        if risen is not None:
            return f"the loss {words} from {risen.best:.4g} to {risen.now:.4g}"
    series = np.asarray(values, np.float64)
    before, last = series[:-3], np.where(np.isfinite(series[-3:]), series[-3:], math.inf)
    if 0 < len(before) < BLOCK and np.isfinite(before).all():
        largest = float(np.abs(before).max())
        if largest > 0.0 and last.min() > _EXPLODES * largest:
            return f"the loss jumped from {before[-1]:.4g} to {last.min():.4g}"
    return None


def metric_alarm(values: Sequence[float], name: str, larger_is_better: bool) -> str | None:
    """What is wrong with a metric that has one value per epoch, in words; None if nothing is."""
    sign = -1.0 if larger_is_better else 1.0
    risen = rise([sign * value for value in values], **_METRIC)  # type: ignore[arg-type]
    return None if risen is None else f"{name} fell behind: from {sign * risen.best:.4g} to {sign * risen.now:.4g}"


def residual_alarm(residual: float, gradients: float) -> str | None:
    """Whether the residual is larger than error feedback with a contraction can leave it, in words.

    With ||x - C(x)|| <= ||x||, the residual of step t has at most the norm ||g_1|| + ... + ||g_t||.

    Args:
        residual: The norm of the residuals of all ranks.
        gradients: The sum of the norms of all gradients so far, of all ranks.
    """
    if residual <= _BEYOND_CONTRACTION * gradients:
        return None
    return (
        f"the residual grows without bound: its norm, {residual:.3g}, is beyond that of all gradients together, "
        f"{gradients:.3g}"
    )


class Change(NamedTuple):
    """A step of the guard to another level."""

    level: int
    reason: str


class Caution:
    """Decides at which level compression is: 0 as configured, each higher one milder.

    An alarm leads to the next level. There it stays for `calm` batches; then it goes back by one level if the loss has
    recovered, and otherwise to the next one. After a return, `calm` is twice as long.

    Args:
        calm: Batches.
        milder: Returns the next level that is milder than a level, with the gradients and compressors of now; None if
            there is none.

    Attributes:
        level: The level.
    """

    def __init__(self, calm: int, milder: Callable[[int], int | None]) -> None:
        self.level = 0
        self._calm, self._milder = calm, milder
        self._levels = [0]  # those that it went through, to this one
        self._losses: deque[float] = deque(maxlen=_HISTORY)
        self._metrics: deque[float] = deque(maxlen=_HISTORY)
        self._waited = 0  # batches since the last change or alarm
        self._recovered_at = math.inf  # the loss is back at its level if it is not above this

    def start_at(self, level: int) -> None:
        """Goes on at a level that other ranks are at, with an empty history."""
        if level != self.level:
            self._go(level)

    def see(self, loss: float | None, residual: float, gradients: float, batches: int) -> Change | None:
        """The change after a window of batches; None if there is none.

        Args:
            loss: The mean loss of the window; None if it is not known.
            residual: See `residual_alarm`.
            gradients: See `residual_alarm`.
            batches: The batches in the window.
        """
        if loss is not None:
            self._losses.append(loss)
        self._waited += batches
        alarm = residual_alarm(residual, gradients) or loss_alarm(self._losses)
        if alarm is not None:
            return self._on_alarm(alarm)
        return self._on_calm() if self.level and self._waited >= self._calm else None

    def see_metric(self, value: float, name: str, larger_is_better: bool) -> Change | None:
        """The change after an epoch with this value of the metric; None if there is none."""
        self._metrics.append(value)
        alarm = metric_alarm(self._metrics, name, larger_is_better)
        return None if alarm is None else self._on_alarm(alarm)

    def _on_alarm(self, reason: str) -> Change | None:
        level = self._milder(self.level)
        if level is None:  # It is not due to compression: this is the trend from now on.
            self._forget()
            return None
        if not self.level:
            risen = rise(self._losses, 1, 0.0, 0.0)
            highest = max((loss for loss in self._losses if math.isfinite(loss)), default=math.inf)
            self._recovered_at = math.inf if risen is None else 0.5 * (risen.best + highest)
        self._go(level)
        return Change(level, reason)

    def _on_calm(self) -> Change:
        recent = list(self._losses)[-BLOCK:]
        recovered = not recent or not float(np.median(recent)) > self._recovered_at
        level = None if recovered else self._milder(self.level)
        if level is not None:
            self._go(level)
            return Change(level, f"the loss, {np.median(recent):.4g}, has not come back")
        self._calm *= 2
        waited = self._waited
        self._go(self._levels[-2])
        why = f"nothing was wrong for {waited} batches" if recovered else "a milder compressor did not help"
        return Change(self.level, why)

    def _go(self, level: int) -> None:
        self._levels = [one for one in self._levels if one < level] + [level]
        self.level = level
        self._forget()

    def _forget(self) -> None:
        self._losses.clear()
        self._metrics.clear()
        self._waited = 0
