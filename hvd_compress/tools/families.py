"""How `tune` closes in on the best of a family: a compressor with one number left open.

What sends less is faster and loses more. So the best of a family lies between what loses too much and what either does
not, or is no faster than the best of all: halving that gap finds it in a few runs, where Optuna's sampler, which does
not know this, needs many.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..engine.layout import BUCKET_BYTES
from .outcomes import ALIKE, Outcome
from .search import BITS, RANKS, RATIOS

_WORTH = 0.95  # of the best step: worth looking for
_CLOSE = 1.2  # ratios that differ by less are alike


class Family(NamedTuple):
    """A compressor with one number left open.

    Attributes:
        number: Its name.
        choices: What it may be, that which sends least first; None for any in `RATIOS`.
        fixed: The other numbers.
    """

    number: str
    choices: Sequence[int] | None
    fixed: dict[str, float]

    def between(self, low: float | None, high: float | None) -> float | None:
        """A number in the middle of two, or an end where one of them is not known; None if there is none."""
        first, last = (self.choices[0], self.choices[-1]) if self.choices else RATIOS
        if low is None or high is None:
            found = first if low is None else last
            return found if found not in (low, high) else None
        if self.choices is None:
            return float(f"{(low * high) ** 0.5:.2g}") if high > _CLOSE * low else None
        some = [choice for choice in self.choices if low < choice < high]
        return some[len(some) // 2] if some else None


FAMILIES = {
    "quantize": Family("bits", BITS, {}),
    "topk": Family("ratio", None, {}),
    "block_topk": Family("ratio", None, {}),
    "randomk": Family("ratio", None, {}),
    "hybrid": Family("ratio", None, {"bits": 4}),
    "block_sparse": Family("ratio", None, {"block": 16}),
    "powersgd": Family("rank", RANKS, {}),
}


def proposal(found: Sequence[Outcome], kinds: Sequence[str], allowed: float) -> dict[str, Any] | None:
    """Optuna's parameters of a trial that halves the gap of the most promising family; None if all are closed.

    Args:
        found: What was tried, the run without compression among it.
        kinds: The compressors that may be tried.
        allowed: By how much the loss may increase.
    """
    best = min(outcome.step for outcome in found if outcome.step and outcome.is_good(allowed))
    gaps = []
    for kind in kinds:
        family = FAMILIES.get(kind)
        if family is None:
            continue
        mine = {
            outcome.numbers[family.number]: outcome
            for outcome in found
            if outcome.numbers.get("compressor") == kind
            and family.fixed.items() <= outcome.numbers.items()
            and outcome.setting.bucket_bytes == BUCKET_BYTES
        }
        known = {number: outcome for number, outcome in mine.items() if outcome.step}
        gap = _gap(known, best, allowed)
        number = family.between(gap.low, gap.high) if gap else None
        if gap and number is not None and number not in mine:  # that one failed
            gaps.append((gap.hope, {"compressor": kind, **family.fixed, family.number: number}))
    if not gaps:
        return None
    return {**min(gaps, key=lambda each: each[0])[1], "bucket_bytes": BUCKET_BYTES}


class _Gap(NamedTuple):
    """Where the best of a family lies.

    Attributes:
        hope: Seconds of a step than which none in it is faster; 0 if that is not known.
        low: The mildest that is known to lose too much.
        high: The strongest one above it.
    """

    hope: float
    low: float | None
    high: float | None


def _gap(known: dict[float, Outcome], best: float, allowed: float) -> _Gap | None:
    """The gap of a family of which these are known, by the number; None if nothing faster than `best` can be in it."""
    bad = [
        number
        for number, outcome in known.items()
        if outcome.loss_increase is not None and not outcome.is_good(allowed)
    ]
    if bad:
        low = max(bad)
        hope = known[low].step or 0.0
        high = min((number for number in known if number > low), default=None)
        return _Gap(hope, low, high) if hope < _WORTH * best else None
    # All are good: is there a faster one than those that are among the fastest?
    fast = known and min(outcome.step or 0.0 for outcome in known.values()) <= ALIKE * best
    return _Gap(0.0, None, min(known)) if fast else None
