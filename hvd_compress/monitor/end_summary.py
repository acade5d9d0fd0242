"""What rank 0 says at the end of a run: bytes, the time waited if it was measured, and Horovod without compression."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import horovod.tensorflow as hvd

from ..common.error_text import error_text
from ..common.units import show_bytes, show_seconds
from ..common.verbosity import say, shows
from ..engine.compression_report import BucketReport, CompressionReport
from ..engine.plan import Plan, bytes_per_step
from ..engine.reducer import Reducer, alive
from . import totals
from .totals import Totals

# Called when the process ends, before the summary.
before: list[Callable[[], None]] = []


class _Trained(NamedTuple):
    """What one plan did; with local steps, what the plans of all fragments did."""

    names: tuple[str, ...]
    exchanges: int  # without local steps, one in each step
    bytes_sent: tuple[int, int]  # of a step at the end, see `Plan.bytes_sent`
    report: CompressionReport
    local_steps: int = 1
    chose_length: bool = False  # with `auto:local_steps`: rounds had other lengths before


class _Deleted:
    """The plans of deleted reducers: the one with the most gradients, and the number of the others.

    A reducer is deleted wherever Python collects garbage, which may be in the middle of a step of another one. So
    nothing here may call TensorFlow before the process ends.
    """

    def __init__(self) -> None:
        self.largest: Plan | None = None
        self.others = 0

    def add(self, plans: Mapping[object, Plan]) -> None:
        for plan in plans.values():
            self.others += self.largest is not None
            if self.largest is None or _elements(plan) >= _elements(self.largest):
                self.largest = _without_residuals(plan)


def _elements(plan: Plan) -> int:
    return sum(math.prod(shape) for shape in plan.layout.shapes)


def _without_residuals(plan: Plan) -> Plan:
    """What the summary needs of a plan, without the variables that have the size of the model."""
    state = dataclasses.replace(
        plan.state, groups=[], factors=[], embeddings=[], velocities={}, waiting={}, waiting_gradients={}
    )
    return dataclasses.replace(plan, state=state, observers=[])


_deleted = _Deleted()


def exchange_lines(
    report: CompressionReport, bytes_sent: tuple[int, int], steps: int, seconds: float | None = None
) -> dict[str, str]:
    """What a step sends, and what stock Horovod would send and is predicted to take: texts by name.

    Args:
        report: The `compression_report()` after training.
        bytes_sent: The `bytes_sent()` after training.
        steps: The number of steps.
        seconds: Seconds of all steps together; None if they were not measured.
    """
    sent, stock = bytes_sent
    lines = {}
    if report.auto is not None:
        lines["chosen"] = chosen(report.buckets)
    lines["sent per step"] = f"{sent:,} bytes by each worker"
    lines["stock Horovod"] = f"{stock:,} bytes"
    extra = extra_seconds(report.buckets)
    if extra is not None and steps:
        if seconds is not None:
            run = seconds + steps * extra
            lines["stock Horovod"] += f"; predicted {run / steps:.3g} s per step, {run:.1f} s in all"
        elif extra:
            lines["stock Horovod"] += (
                f"; predicted {show_seconds(abs(extra))} {'more' if extra >= 0.0 else 'less'} per step, "
                f"{show_seconds(abs(steps * extra))} in all"
            )
    lines["ratio"] = f"{stock / sent:.1f}" if sent else "nothing was sent"
    return lines


def chosen(buckets: Sequence[BucketReport]) -> str:
    """What `auto` chose last, such as "int8 for 3 of 4 buckets, none for 1"."""
    counts = Counter(bucket.chosen for bucket in buckets if not bucket.rows_of).most_common()
    total = sum(count for _, count in counts)
    parts = [f"{spec} for {count}" for spec, count in counts]
    if len(counts) == 1:
        parts = [f"{counts[0][0]} for {'all ' if total > 1 else ''}{total} bucket{'s' if total > 1 else ''}"]
    elif counts:
        parts[0] += f" of {total} buckets"
    return ", ".join(parts + [f"{bucket.chosen} for rows of {bucket.rows_of}" for bucket in buckets if bucket.rows_of])


def extra_seconds(buckets: Sequence[BucketReport]) -> float | None:
    """The predicted seconds by which each step would be longer without compression; None if nothing predicts them.

    Both times are those of `auto`'s cost model. They count as if no gradients were sent during the backward pass.
    """
    automatic = [bucket for bucket in buckets if bucket.candidates]
    plain = [c.predicted for bucket in automatic for c in bucket.candidates if c.compressor == "none"]
    if not automatic or len(plain) < len(automatic):
        return None
    # With a model-wide compressor, each bucket has the time of all of them.
    now = automatic[:1] if automatic[0].together else automatic
    return sum(plain) - sum(bucket.predicted or 0.0 for bucket in now)


def measured_line(measured: Totals, local_steps: int | None = 1) -> str:
    """What a monitor or profile has measured on this rank.

    Args:
        measured: The measured steps; with local steps, the exchanges.
        local_steps: The steps between two exchanges; None if their number has changed.
    """
    what = "steps" if local_steps == 1 else "exchanges"
    text = f"{measured.steps:,} {what} were measured: this rank sent {show_bytes(measured.bytes)}"
    if local_steps is not None:
        text += f" in place of {show_bytes(local_steps * measured.uncompressed_bytes)}"
    if measured.seconds:
        share = measured.waited / measured.seconds
        text += f", and waited {show_seconds(measured.waited)} for exchanges, {share:.0%} of the time"
    return text


def watch(reducer: Reducer) -> None:
    """Says at the end of the process what the plans of this reducer have done. Costs nothing until then."""
    if not _ended_at_exit:
        _ended_at_exit.append(True)
        atexit.register(_at_exit)
    if reducer not in _watched:
        _watched.add(reducer)
        weakref.finalize(reducer, _deleted.add, reducer.plans).atexit = False


_watched: weakref.WeakSet[Reducer] = weakref.WeakSet()
_ended_at_exit: list[bool] = []


def _trained(plans: Iterable[Plan]) -> list[_Trained]:
    """What the plans did that made a step, on the first rank of their process set."""
    trained: list[_Trained] = []
    # Also called when training has failed: nothing may come of it but a missing line.
    with contextlib.suppress(Exception):
        if hvd.is_initialized():
            together: dict[object, list[Plan]] = {}  # those of the fragments of one reducer
            for plan in plans:
                if plan.settings.process_set.rank() != 0:
                    continue
                together.setdefault(plan if plan.settings.local_steps is None else id(plan.settings), []).append(plan)
            trained += [_of_plans(some) for some in together.values() if any(int(plan.state.step) for plan in some)]
    return trained


def _of_plans(plans: Sequence[Plan]) -> _Trained:
    """What one plan did, or the plans of all fragments."""
    local_steps = plans[0].local_steps
    report = CompressionReport(tuple(bucket for plan in plans for bucket in plan.report()))
    return _Trained(
        tuple(plan.name for plan in plans),
        max(int(plan.state.step) for plan in plans),
        bytes_per_step(plans, local_steps),
        report,
        local_steps,
        plans[0].round_length is not None,
    )


def leave_out_exchange() -> None:
    """Leaves `exchange_lines` out of the summary: the script has printed them."""
    _left_out.append(True)


_left_out: list[bool] = []


def _at_exit() -> None:
    for function in before:
        try:
            function()
        except Exception as error:  # a training that has ended well does not end with a traceback
            say(f"what was measured could not be written ({error_text(error)})", "warning")
    if not shows("info"):
        return
    plans = [plan for reducer in alive() for plan in reducer.plans.values()]
    trained = _trained(plans if _deleted.largest is None else [*plans, _deleted.largest])
    if trained:
        largest = max(trained, key=lambda one: one.exchanges * one.local_steps * one.bytes_sent[1])
        for line in lines(largest, len(trained) - 1 + _deleted.others):
            say(line)


def lines(trained: _Trained, others: int = 0) -> list[str]:
    """The summary of the plan that would have sent the most bytes without compression."""
    facts = exchange_lines(trained.report, trained.bytes_sent, trained.exchanges)
    specs = dict.fromkeys(bucket.chosen for bucket in trained.report.buckets)
    spec = "auto" if trained.report.auto is not None else ", ".join(specs) or "none"
    in_rounds = trained.local_steps > 1 or trained.chose_length
    plural = "" if trained.exchanges == 1 else "s"
    text = f"{trained.exchanges:,} {'exchange' if in_rounds else 'step'}{plural} with {spec}"
    if in_rounds:
        text += f", {'last ' if trained.chose_length else ''}local_steps={trained.local_steps}"
    text = "; ".join([text, *(f"{name}: {value}" for name, value in facts.items())])
    if others:
        text += f" (and {others} smaller exchange{'' if others == 1 else 's'})"
    found = [] if _left_out else [text]
    local_steps = None if trained.chose_length else trained.local_steps
    if len(trained.names) == 1:  # of several fragments, a session watches one
        found += [measured_line(totals.measured[n], local_steps) for n in trained.names if n in totals.measured]
    return found
