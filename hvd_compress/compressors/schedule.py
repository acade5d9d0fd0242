"""Several compressors, one after the other in the course of training."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from ..common import checks
from ..common.error_text import error_text
from .base import Compressor
from .builtin import BuiltinCompressor
from .cast import most_precise_rows
from .registry import register
from .resolve import resolve

_BEGIN = re.compile(r"(\d+)(epochs?)?|(\d+(?:\.\d*)?|\.\d+)(?:[eE]([+-]?\d+))?%")
# Sums of 1 / steps miss whole numbers and shares by much less than this, and a step is much longer.
_ROUNDING = 1e-9


@register
@dataclasses.dataclass(frozen=True)
class Schedule(BuiltinCompressor):
    """Uses one compressor after the other: `schedule:(0=int8|30%=quantize:bits=6|60%=int4)`.

    A phase begins at a step (`1000`), at an epoch (`2epochs`) or at a share of training (`30%`), and lasts until the
    next one. The first phase begins at 0, and all others count in one unit:

    * Steps are those of the optimizer, on each rank, from 0 on: `0=int8|1000=int4` sends the first 1000 steps with
      `int8`.
    * Epochs are those of Keras, from 0 on: `0=int8|2epochs=int4` sends the first two epochs with `int8`.
      `hvdc.callbacks.BroadcastGlobalVariablesCallback` (or `hvdc.elastic.UpdateEpochStateCallback`) reports them.
    * A share of training is one of the epochs of `fit`, as the same callbacks report it. It grows with each step; if
      Keras does not know how many steps an epoch has, with each epoch. Without Keras's `fit`, say how many steps
      training has: `schedule:(0=int8|30%=int4),steps=10000`.

    In Python, phases are a mapping or pairs, and compressors may be objects, also your own:
    `hvdc.Compression.schedule({0: "int8", "30%": MyCompressor()})`.

    All ranks change at the same step. The next compressor takes over the residuals of the one before; one without
    error feedback sends them. How far training is, is saved with the residuals. It never goes back: not in a second
    `fit`, and not after an elastic reset. `bytes_sent()`, `compression_report()` and `CompressionMonitor` report the
    current compressor. Rows of embeddings are sent in all phases with the compressor that keeps most of them.

    Wire size and error: those of the current compressor. A schedule has no size of its own, so `wire_bytes`,
    `hvdc.CostModel`, `hvdc.allreduce` and `hvd-compress plan` take the compressors one by one: `schedule.stages`.

    Attributes:
        phases: Two or more pairs of a begin and a compressor, or a mapping. Kept as pairs of text and compressor.
        steps: The number of steps of the optimizer in all of training, on each rank, for shares of training. None:
            Keras's `fit` says it.

    Raises:
        ValueError: Phases do not begin with 0, do not increase or count in several units; `steps` is given for other
            units than shares. Or a compressor cannot be part of a schedule: `auto`, `dgc`, `powersgd`, another
            schedule, or one that needs gradients in their own shapes beside one that does not.
    """

    name = "schedule"
    phases: Any = ()
    steps: int | None = None

    def __post_init__(self) -> None:
        given = self.phases.items() if isinstance(self.phases, Mapping) else self.phases
        phases = tuple(map(_phase, checks.items("schedule: phases", given)))
        if len(phases) < 2:
            raise ValueError("schedule: name two compressors or more, such as schedule:(0=int8|30%=int4)")
        self._set(phases=phases)
        begins = [begin for begin, _ in phases]
        if begins[0] != "0":
            raise ValueError(f"schedule: the first phase must begin at 0, got {begins[0]}")
        units = {_parsed(begin)[1]: begin for begin in begins[1:]}
        if len(units) > 1:
            raise ValueError(
                "schedule: all phases after the first must begin at steps (1000), at epochs (2epochs) or at shares of "
                f"training (30%), got {' and '.join(units.values())}"
            )
        starts = [_parsed(begin)[0] for begin in begins]
        if any(first >= second for first, second in zip(starts, starts[1:])):
            raise ValueError(f"schedule: each phase must begin after the one before, got {', '.join(begins)}")
        if self.steps is not None:
            self._set(steps=checks.integer("schedule: steps", self.steps, 1))
            if self.counts != "training":
                raise ValueError(
                    f"schedule: steps is the length of training for phases such as 30%, and {begins[1]} needs none: "
                    "leave it out"
                )
        for compressor in self.stages:
            _check_stage(compressor, self.stages[0])

    @functools.cached_property
    def stages(self) -> tuple[Any, ...]:
        """The compressors, in the order of the phases."""
        return tuple(compressor for _, compressor in self.phases)

    @property
    def counts(self) -> str:  # type: ignore[override]
        """The unit of the phases: "steps", "epochs" or "training"."""
        return _parsed(self.phases[1][0])[1]

    @property
    def steps_per_count(self) -> int | None:
        """The number of steps in all of training."""
        return self.steps

    def stage_at(self, progress: tf.Tensor) -> tf.Tensor:
        """The index in `stages` at this number of steps or epochs, or share of training; int32 scalar."""
        later = [_parsed(begin)[0] - _ROUNDING for begin, _ in self.phases[1:]]
        reached = tf.cast(progress, tf.float64) >= tf.constant(later, tf.float64)
        return tf.reduce_sum(tf.cast(reached, tf.int32))

    def without_steps(self) -> Compressor:
        """The schedule without the number of steps in training."""
        return dataclasses.replace(self, steps=None)

    @property
    def spec(self) -> str:
        """One line that `hvdc.Compression.parse` turns back into this schedule if its compressors are built in."""
        phases = "|".join(f"{begin}={compressor.spec}" for begin, compressor in self.phases)
        return f"schedule:({phases})" + ("" if self.steps is None else f",steps={self.steps}")

    @property
    def stages_in_words(self) -> str:
        """The compressors and where they begin, in words."""
        (_, first), *later = self.phases
        return ", ".join([first.spec, *(f"from {_in_words(begin)} {compressor.spec}" for begin, compressor in later)])

    @property
    def error_feedback(self) -> bool:  # type: ignore[override]
        """True if any of the compressors uses error feedback."""
        return any(stage.error_feedback for stage in self.stages)

    @property
    def sparse(self) -> bool:  # type: ignore[override]
        """Whether all compressors are sparse."""
        return all(stage.sparse for stage in self.stages)

    @property
    def per_tensor(self) -> bool:  # type: ignore[override]
        """Whether the compressors need gradients in their own shapes."""
        return bool(self.stages[0].per_tensor)

    @property
    def alignment(self) -> int:  # type: ignore[override]
        """The least common multiple of the alignments of all compressors."""
        return math.lcm(*(stage.alignment for stage in self.stages))

    def for_rows(self) -> Compressor:
        """That of the compressor that keeps most of a row."""
        return most_precise_rows(self.stages)

    def stateless(self) -> Compressor:
        """Not defined: a schedule follows training.

        Raises:
            ValueError: Always.
        """
        return self._only_in_training()

    def _only_in_training(self, *_: Any, **__: Any) -> Any:
        raise ValueError(
            "schedule follows training: use it in hvdc.DistributedOptimizer, or for variables in "
            f"hvdc.DistributedGradientTape, and one of its compressors, such as {self.stages[-1].spec!r}, here"
        )

    parts = encode = estimated_noise_loss = _only_in_training


def _in_words(begin: str) -> str:
    """A begin as `step 1000`, `epoch 2` or `30%`."""
    unit = _parsed(begin)[1]
    return f"{unit[:-1]} {begin.removesuffix('epochs')}" if unit in ("steps", "epochs") else begin


def _phase(phase: Any) -> tuple[str, Compressor]:
    """A pair of begin and compressor, from a pair or from text such as "30%=int8"."""
    if isinstance(phase, str):
        begin, equals, compressor = (part.strip() for part in phase.partition("="))
        if not equals:
            raise ValueError(f"schedule: a phase is written as 30%=int8, begin and compressor, got {error_text(phase)}")
    else:
        try:
            begin, compressor = phase
        except (TypeError, ValueError):
            raise ValueError(
                f"schedule: a phase is a pair of a begin and a compressor, got {error_text(phase)}"
            ) from None
    text = _canonical(begin)
    if compressor is None:
        raise ValueError(f"schedule: the compressor at {text} is None: write 'none' for no compression")
    try:
        return text, resolve(compressor)
    except (TypeError, ValueError) as error:
        raise type(error)(f"schedule: at {text}: {error}") from None


def _canonical(begin: Any) -> str:
    """A begin as text; "0" in all units."""
    text = begin if isinstance(begin, str) else str(begin) if checks.is_number(begin) else ""
    match = _BEGIN.fullmatch(text.strip())
    if match is None:
        raise ValueError(
            "schedule: a phase begins at a step such as 1000, at an epoch such as 2epochs, or at a share of training "
            f"such as 30%, got {error_text(begin)}"
        )
    whole, epochs, share, exponent = match.groups()
    number = int(whole) if share is None else float(f"{share}e{exponent or 0}")
    if not number:
        return "0"
    if share is None:
        return f"{number}epochs" if epochs else str(number)
    if number >= 100.0:
        raise ValueError(f"schedule: a phase must begin before the end of training, 100%, got {error_text(begin)}")
    return f"{int(number) if number == int(number) else number}%"


def _parsed(begin: str) -> tuple[float, str]:
    """The number and the unit of a canonical begin."""
    if begin.endswith("%"):
        return float(begin[:-1]) / 100.0, "training"
    return float(begin.removesuffix("epochs")), "epochs" if begin.endswith("epochs") else "steps"


def _check_stage(compressor: Compressor, first: Compressor) -> None:
    """Raises a ValueError if a schedule with this first compressor cannot have `compressor`."""
    reason = ""
    if compressor.automatic:
        reason = (
            "it changes by itself: use it alone, or in policy for other variables; for a beginning with another "
            "compressor, write auto:warmup=int8,warmup_steps=1000"
        )
    elif compressor.momentum_settings is not None:
        reason = "it brings momentum, and the others do not: name topk in its place, or use dgc alone"
    elif len(compressor.stages) > 1:
        reason = "it has phases of its own: name its compressors in one schedule"
    elif compressor.model_wide:
        reason = "it exchanges all gradients at once and keeps factors: use it alone"
    elif compressor.per_tensor != first.per_tensor:
        needs = compressor if compressor.per_tensor else first
        reason = f"{needs.spec} needs each gradient in its own shape, and the others do not: leave it out"
    if reason:
        raise ValueError(f"schedule: {compressor.spec} cannot be part of it, as {reason}")
