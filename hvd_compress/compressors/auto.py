"""The choice between compressors, by a cost model that is measured on the network at hand."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import tensorflow as tf

from ..common.error_text import error_text
from ..formats import Part
from ..formats.base import Shape, check_integer
from ..formats.specs import CANDIDATES, MAX_SLOWDOWN, TARGET
from .base import BuiltinCompressor, Compressor, Encoded, Seeds
from .cast import NoCompression

# The target while `warmup_steps` last: what quantizers of 4 bits and more reach, and sparse compressors do not.
WARMUP_TARGET = 0.95


@dataclasses.dataclass(frozen=True)
class Auto(BuiltinCompressor):
    """In each step and for each bucket, the fastest of some compressors that lets enough of the gradient through.

    How fast they are is predicted by a cost model (`hvdc.CostModel`), which is calibrated at the first step and follows
    what the exchanges then take. How much they let through, 1 - ||x - C(x)||^2 / ||x||^2 with x = gradient +
    residual, is measured while training. All ranks always choose the same; residuals go along.

    Attributes:
        candidates: Compressors or their spec strings. In a spec string: `auto:candidates=(none|int8)`. `powersgd`
            needs gradients in their own shapes, and is chosen for all buckets at once or for none.
        target: The share of a bucket's energy ||x||^2 that a step must let through, 0 to 1, for a compressor to be
            chosen. One that is in use is given up below half of it, as the residual that builds up
            makes what is sent a smaller share.
        warmup_steps: So many first steps have the target 0.95 (or `target` if higher).
        phases: Other targets from later steps on: pairs of step and target, in a spec string
            `auto:phases=(1000:0.1|5000:0.02)`.
        max_slowdown: By how much the exchange may take longer, as a share, if all of the gradient gets through
            thereby.
        probe_every: Each so many steps the candidates are tried on a chunk of one bucket.
    """

    name: ClassVar[str] = "auto"
    automatic = True
    candidates: Sequence[Any] = CANDIDATES  # type: ignore[assignment]
    target: float = TARGET
    warmup_steps: int = 0
    phases: Sequence[Any] = ()
    max_slowdown: float = MAX_SLOWDOWN
    probe_every: int = 50

    def __post_init__(self) -> None:
        from .registry import resolve

        named: Any = self.candidates
        if named is None or isinstance(
            named, (str, Compressor)
        ):  # one alone; "none" in a spec string is None
            named = ("none" if named is None else named,)
        found = [resolve(candidate) for candidate in _several("candidates", named)]
        chosen = tuple(c for i, c in enumerate(found) if c not in found[:i])  # may have no hash
        if not chosen:
            raise ValueError("auto: candidates must name at least one compressor, such as 'int8'")
        for compressor in chosen:
            if compressor.automatic:
                raise ValueError("auto: candidates must be compressors, and auto itself is none")
            if compressor.momentum_settings is not None:
                raise ValueError(
                    f"auto: {compressor.spec} brings momentum, and the others do not: name topk among candidates in "
                    "its place, or use dgc alone"
                )
            if compressor.per_tensor and not compressor.model_wide:
                raise ValueError(
                    f"auto: {compressor.spec} needs each gradient in its own shape and cannot share buckets with "
                    "others: leave it out of candidates"
                )
        object.__setattr__(self, "candidates", chosen)
        object.__setattr__(self, "target", _share("target", self.target))
        object.__setattr__(self, "max_slowdown", _share("max_slowdown", self.max_slowdown))
        check_integer(self.warmup_steps, "warmup_steps", self.name, smallest=0)
        check_integer(self.probe_every, "probe_every", self.name)
        phases = _several("phases", self.phases)
        object.__setattr__(self, "phases", tuple(_phase(phase) for phase in phases))
        steps = [step for step, _ in self.phases]
        if steps != sorted(set(steps)):
            raise ValueError(f"auto: the steps of phases must increase, got {steps}")

    @property
    def error_feedback(self) -> bool:  # type: ignore[override]
        """True if it is for any of the candidates."""
        return any(candidate.error_feedback for candidate in self.candidates)

    @property
    def model_wide_candidates(self) -> list[bool]:
        """For each candidate, whether all gradients of the model are exchanged at once with it."""
        return [candidate.model_wide for candidate in self.candidates]

    def for_rows(self) -> Compressor:
        """The candidate with the most bits per value below 32; no compression if there is none."""
        candidates = [candidate.for_rows() for candidate in self.candidates]
        compressed = [candidate for candidate in candidates if not candidate.uncompressed]
        return max(compressed, key=lambda candidate: candidate.value_bits, default=NoCompression())

    def targets(self) -> list[tuple[int, float]]:
        """From which step on which target holds."""
        found = [(0, max(WARMUP_TARGET, self.target))] if self.warmup_steps else []
        found.append((self.warmup_steps, self.target))
        return found + [phase for phase in self.phases if phase[0] >= self.warmup_steps]

    def target_at(self, step: int) -> float:
        """The target that holds in a step."""
        return [target for first, target in self.targets() if first <= step][-1]

    def parts(self, shape: Shape) -> list[Part]:
        """Not defined: they differ from step to step.

        Raises:
            ValueError: Always.
        """
        raise _not_alone()

    def default_of(self, field: dataclasses.Field[Any]) -> Any:
        """The default as it is kept: candidates are named by strings and kept as compressors."""
        from .registry import Compression

        return tuple(map(Compression.parse, CANDIDATES)) if field.name == "candidates" else field.default

    def encode(
        self,
        gradient: tf.Tensor,
        seeds: Seeds,
        residual: tf.Tensor | None = None,
        decay: float = 1.0,
        keep: bool = False,
    ) -> Encoded:
        """Not defined: the choice belongs to training.

        Raises:
            ValueError: Always.
        """
        raise _not_alone()


def _not_alone() -> ValueError:
    return ValueError(
        "auto chooses from what it measures in training: use it in hvdc.DistributedOptimizer or "
        "hvdc.DistributedGradientTape, and one of its candidates, such as 'int4', here"
    )


def _several(name: str, value: Any) -> list[Any]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise ValueError(f"auto: {name} must be a list, got {error_text(value)}")
    return list(value)


def _share(name: str, value: Any) -> float:
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not number or not 0.0 <= float(value) <= 1.0:
        raise ValueError(f"auto: {name} must be a number from 0 to 1, got {error_text(value)}")
    return float(value)


def _phase(phase: Any) -> tuple[int, float]:
    """A pair of step and target, from a pair or from text such as "1000:0.1"."""
    try:
        step, target = phase.split(":") if isinstance(phase, str) else phase
        step = int(step) if isinstance(step, str) else step
        target = float(target) if isinstance(target, str) else target
    except (TypeError, ValueError):
        raise ValueError(f"auto: phases must be pairs of step and target, got {error_text(phase)}") from None
    return check_integer(step, "the step of a phase", "auto", smallest=0), _share(
        "the target of a phase", target
    )
