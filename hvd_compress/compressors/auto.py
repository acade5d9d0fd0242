"""Automatic choice between compressors, by a cost model that is calibrated on the current network."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from ..common import checks
from ..common.error_text import error_text
from ..common.link import Link
from ..common.units import parse_link, parse_seconds
from ..formats.auto import CANDIDATES, MAX_SLOWDOWN, OBJECTIVES, TARGET
from .base import Compressor
from .builtin import BuiltinCompressor
from .cast import compressed_rows, most_precise_rows
from .registry import parse, register
from .resolve import resolve

# The target during `warmup_steps`: quantizers of 4 bits and more reach it, sparse compressors do not.
WARMUP_TARGET = 0.95
# Of the energy of white noise. With `hadamard` (0.12) recall was as good as with 4 bits, and with 2 evenly spaced bits
# (0.3, in blocks of 256) it was not.
_MOST_LOST_OF_ROWS = 0.15
_ROW = [(256,)]  # any shape: the share is the same


@register
@dataclasses.dataclass(frozen=True)
class Auto(BuiltinCompressor):
    """Chooses, in each step and for each bucket, the candidate with which training makes the most progress per second.

    A cost model (`hvdc.CostModel`) predicts how long a step takes with each candidate. It is calibrated at the first
    step, or takes the bandwidth and latency in `link`, and is updated from the measured times of exchanges. How much
    progress a step makes with each candidate, relative to a step without compression, is measured on a sample of the
    gradients (see `auto.progress`). All ranks always choose the same compressor; a new choice takes over the residual.

    Attributes:
        candidates: Compressors or their spec strings. In a spec string: `auto:candidates=(none|int8)`. `powersgd`
            needs gradients in their own shapes, and is chosen for all buckets at once or for none.
        objective: "progress" maximizes the progress per second. "step" minimizes the seconds per step, among candidates
            that let the share `target` of the gradient through.
        min_progress: Candidates that are estimated to make less progress per step than this are not chosen, 0 to 1.
        budget: Seconds that the exchange may add to a step, in a spec string also `50ms`: the candidate that makes the
            most progress per step within this time is chosen. 0 for no budget.
        link: The bandwidth and latency of the network between the ranks (between hosts, if exchanges are
            hierarchical), in place of timed allreduces before the first step: text such as `1gbit+50us` (a latency of
            50 us if left out), or a `hvdc.Link` (its burst is not used). Kept as text. None: it is measured.
        target: With objective="step", the share of the energy ||x||^2, x = gradient + residual, that a candidate must
            let through to be chosen, 0 to 1. The current choice is kept down to half of it, because the residual that
            builds up reduces this share.
        warmup: A compressor for the first `warmup_steps` steps, in which nothing is chosen: `auto:warmup=int8`. It is
            one of the candidates, or is added to them. Empty: `auto` chooses from the first step on.
        warmup_steps: The number of steps with `warmup`. Without it, with objective="step": the number of first steps
            that have the target 0.95 (or `target` if higher).
        phases: Other targets from later steps on: pairs of step and target, in a spec string
            `auto:phases=(1000:0.1|5000:0.02)`.
        max_slowdown: By how much, as a share, a step may take longer if all of the gradient then gets through.
        probe_every: Every this many steps, the progress with each traced candidate is measured for 24 steps. The
            first 48 steps of each trace are measured, too. A candidate that is traced alone and hardly in doubt, such
            as `int2`, is measured only once another trace takes a small share of the time.
        local_steps: The numbers of steps to choose from for a round of local steps, in a spec string
            `auto:local_steps=(1|8|32)`: with the outer optimizer "average", ranks exchange the movements of their
            weights once per round (docs/local-steps.md). The candidate is then chosen in the first step, and stays; the
            number of steps follows from measured times. Empty: gradients are exchanged in each step.
        delay: In a spec string `auto:delay=(0|1)`: whether each step applies the gradients of the step before, which
            are then exchanged beside it (docs/delay.md). The candidate is chosen in the first step, and stays; the
            delay begins when measured times say that it pays. Empty: as the argument `delay` says.
    """

    name = "auto"
    examples = ("auto:candidates=(none|int8)",)
    automatic = True
    candidates: Sequence[Any] = CANDIDATES  # type: ignore[assignment]
    objective: str = OBJECTIVES[0]
    min_progress: float = 0.0
    budget: Any = 0.0
    link: Any = None
    target: float = TARGET
    warmup: Any = ()
    warmup_steps: int = 0
    phases: Sequence[Any] = ()
    max_slowdown: float = MAX_SLOWDOWN
    probe_every: int = 250
    local_steps: Sequence[int] = ()
    delay: Sequence[int] = ()

    def __post_init__(self) -> None:
        given: Any = "none" if self.candidates is None else self.candidates  # "none" in a spec string is None
        if isinstance(given, (str, Compressor)):
            given = (given,)
        if not isinstance(self.objective, str) or self.objective not in OBJECTIVES:
            names = " or ".join(map(repr, OBJECTIVES))
            raise ValueError(f"auto: objective must be {names}, got {error_text(self.objective)}")
        warmup = _warmup(self.warmup)
        candidates: list[Compressor] = []
        for compressor in (*map(resolve, checks.items("auto: candidates", given)), *warmup):
            if compressor not in candidates:  # not a set: a user's compressor may have no hash
                candidates.append(compressor)
        if not candidates:
            raise ValueError("auto: candidates must name at least one compressor, such as 'int8'")
        for compressor in candidates:
            if compressor.automatic:
                where = "warmup" if compressor in warmup else "candidates"
                raise ValueError(f"auto: {where} must be compressors, and auto itself is none")
            if compressor.momentum_settings is not None:
                raise ValueError(
                    f"auto: {compressor.spec} brings momentum, and the others do not: name topk among candidates in "
                    "its place, or use dgc alone"
                )
            if len(compressor.stages) > 1:
                raise ValueError(
                    f"auto: {compressor.spec} changes by itself: name its compressors among candidates in its place"
                )
            if compressor.per_tensor and not compressor.model_wide:
                raise ValueError(
                    f"auto: {compressor.spec} needs each gradient in its own shape and cannot share buckets with "
                    "others: leave it out of candidates"
                )
        self._set(
            candidates=tuple(candidates),
            warmup=warmup,
            min_progress=checks.number("auto: min_progress", self.min_progress, 0, 1),
            budget=_seconds("auto: budget", self.budget),
            link=_link(self.link),
            target=checks.number("auto: target", self.target, 0, 1),
            max_slowdown=checks.number("auto: max_slowdown", self.max_slowdown, 0, 1),
            warmup_steps=checks.integer("auto: warmup_steps", self.warmup_steps, 0),
            probe_every=checks.integer("auto: probe_every", self.probe_every, 1),
            phases=tuple(map(_phase, checks.items("auto: phases", self.phases))),
            local_steps=_whole_numbers("auto: local_steps", self.local_steps, 1),
            delay=_whole_numbers("auto: delay", self.delay, 0, 1),
        )
        if self.delay and self.local_steps:
            raise ValueError("auto: delay and local_steps cannot go together: leave one of them out")
        for name in ("local_steps", "delay"):
            if getattr(self, name):
                self._check_one_candidate(name)
        for name in ("min_progress", "budget"):
            if self.objective == "step" and getattr(self, name):
                raise ValueError(f"auto: {name} needs objective='progress': leave it out, or objective='step'")
        steps = [step for step, _ in self.phases]
        if steps != sorted(set(steps)):
            raise ValueError(f"auto: the steps of phases must increase, got {steps}")
        if self.warmup and not self.warmup_steps:
            raise ValueError("auto: warmup needs warmup_steps, the number of steps that use it, such as 1000")
        only_for_step = [("target", TARGET), ("phases", ()), *([] if self.warmup else [("warmup_steps", 0)])]
        for name, default in only_for_step:
            if self.objective == "progress" and getattr(self, name) != default:
                more = ", or name a compressor as warmup" if name == "warmup_steps" else ""
                raise ValueError(f"auto: {name} needs objective='step': leave it out, or pass objective='step'{more}")

    def _check_one_candidate(self, name: str) -> None:
        # What only acts on a choice that is made again and again.
        for other in ("objective", "budget", "warmup", "max_slowdown", "probe_every"):
            value = getattr(self, other)
            if value != getattr(Auto, other):
                given = f"{other}={value!r}" if isinstance(value, str) else other
                raise ValueError(f"auto: {name} and {given} cannot go together: leave one of them out")
        if all(self.model_wide_candidates):
            raise ValueError(
                f"auto: with {name}, it does not choose {self.candidates[0].spec}: add another candidate, such as int4"
            )

    @property
    def error_feedback(self) -> bool:  # type: ignore[override]
        """True if any of the candidates uses error feedback."""
        return any(candidate.error_feedback for candidate in self.candidates)

    @property
    def model_wide_candidates(self) -> list[bool]:
        """For each candidate, whether all gradients of the model are exchanged at once with it."""
        return [candidate.model_wide for candidate in self.candidates]

    def for_rows(self) -> Compressor:
        """The candidate with the fewest bits per value, of those that lose little.

        If none does, the one with the most bits; no compression if no candidate compresses rows.
        """
        good = [rows for rows in compressed_rows(self.candidates) if rows.noise_loss(_ROW) <= _MOST_LOST_OF_ROWS]
        return min(good, key=lambda rows: rows.value_bits, default=most_precise_rows(self.candidates))

    @property
    def warmup_position(self) -> int | None:
        """The position of `warmup` among the candidates; None without one."""
        return self.candidates.index(self.warmup[0]) if self.warmup else None

    def warms_up(self, steps: int) -> bool:
        """Whether the next step, after so many, uses `warmup`."""
        return bool(self.warmup) and steps < self.warmup_steps

    @property
    def known_link(self) -> Link | None:
        """The link that the user knows."""
        return None if self.link is None else Link.of_rate(*parse_link(self.link))

    def targets(self) -> list[tuple[int, float]]:
        """Pairs of a step and the target that holds from it on."""
        warmup = [(0, max(WARMUP_TARGET, self.target))] if self.warmup_steps and not self.warmup else []
        first = self.warmup_steps if warmup else 0
        phases = [(0, self.target), *self.phases]
        begun = [target for step, target in phases if step <= first]
        return [*warmup, (first, begun[-1]), *(phase for phase in phases if phase[0] > first)]

    def target_at(self, step: int) -> float:
        """The target that holds in a step."""
        return [target for first, target in self.targets() if first <= step][-1]

    def default_of(self, field: dataclasses.Field[Any]) -> Any:
        """The default as it is stored: candidates are given by spec strings and stored as compressors."""
        return tuple(map(parse, CANDIDATES)) if field.name == "candidates" else field.default

    def _only_in_training(self, *_: Any, **__: Any) -> Any:
        """Not defined, as the choice belongs to training.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            "auto chooses from what it measures in training: use it in hvdc.DistributedOptimizer or "
            "hvdc.DistributedGradientTape, and one of its candidates, such as 'int4', here"
        )

    parts = encode = stateless = _only_in_training


def _phase(phase: Any) -> tuple[int, float]:
    """A pair of step and target, from a pair or from text such as "1000:0.1"."""
    try:
        step, target = phase.split(":") if isinstance(phase, str) else phase
        step = int(step) if isinstance(step, str) else step
        target = float(target) if isinstance(target, str) else target
    except (TypeError, ValueError):
        raise ValueError(f"auto: phases must be pairs of step and target, got {error_text(phase)}") from None
    return (
        checks.integer("auto: the step of a phase", step, 0),
        checks.number("auto: the target of a phase", target, 0, 1),
    )


def _warmup(value: Any) -> tuple[Compressor, ...]:
    """The one compressor of the warm-up, or none; "none" in a spec string is None."""
    given: Any = "none" if value is None else value
    compressors = (given,) if isinstance(given, (str, Compressor)) else checks.items("auto: warmup", given)
    if len(compressors) > 1:
        raise ValueError(f"auto: warmup must be one compressor, such as 'int8', got {error_text(value)}")
    return tuple(map(resolve, compressors))


def _whole_numbers(name: str, value: Any, low: int, high: float = math.inf) -> tuple[int, ...]:
    """Different numbers in ascending order, from a list or from one of them, as text or not."""
    given = (value,) if isinstance(value, (int, str)) else checks.items(name, value)
    numbers = [int(one) if isinstance(one, str) and one.isdecimal() else one for one in given]
    return tuple(sorted({checks.integer(name, one, low, high) for one in numbers}))


def _link(value: Any) -> str | None:
    """A rate and a latency as text, from such text or from a link; None for None."""
    if isinstance(value, Link):
        if not value.beta or value.gamma:
            raise ValueError(f"auto: link must have beta above 0 and no gamma, got {error_text(value)}")
        value = f"{8.0 / float(value.beta)!r}bit+{float(value.alpha)!r}s"
    if value is not None:
        try:
            parse_link(value if isinstance(value, str) else "")
        except ValueError:
            raise ValueError(
                "auto: link must be a rate and a latency, such as '1gbit+50us', or a hvdc.Link, got "
                f"{error_text(value)}"
            ) from None
        value = "".join(value.split())
    return value


def _seconds(name: str, value: Any) -> float:
    """Seconds, from a number or from text such as "50ms"."""
    if isinstance(value, str):
        try:
            value = parse_seconds(value)
        except ValueError:
            raise ValueError(f"{name} must be seconds, such as 0.05 or '50ms', got {error_text(value)}") from None
    return checks.number(name, value, 0, math.inf)
