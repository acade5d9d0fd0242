"""What `auto` reports to users."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ..common.verbosity import say, shows
from ..compressors import Auto
from ..engine.compression_report import OF_ALL, AutoReport, BucketReport, Candidate, StepForecast, milliseconds
from . import choices, policy, trials


@dataclasses.dataclass(frozen=True)
class Known:
    """What reports are made from; see `Predictions`.

    `others` are the costs, [B, 1] each, of compressors that are no candidates, and make the progress of an uncompressed
    step.
    """

    auto: Auto
    nbytes: Sequence[int]
    costs: policy.Costs
    others: Mapping[str, policy.Costs]
    value: policy.Value  # arrays
    state: policy.State

    @functools.cached_property
    def seconds(self) -> np.ndarray:
        """Predicted seconds of each bucket's exchange with each candidate, [B, C]."""
        return np.asarray(policy.predicted(self.costs, self.state.link) * self.state.bias)


def of_steps(known: Known, step: int) -> AutoReport:
    """Reports on steps with the choice and with each candidate, after `step` steps."""
    auto, others, state, value = known.auto, known.others, known.state, known.value
    chosen, sizes = np.array(state.choice, np.int32), np.array(known.nbytes, np.float64)
    share = sizes / sizes.sum()
    # As `trials` does for candidates that are not in use.
    bias = np.exp(trials.COMMON_SHARE * float(np.log(np.array(state.bias))[chosen] @ share))
    more = [bias * policy.predicted(cost, state.link) for cost in others.values()]
    seconds = np.concatenate([known.seconds, *more], 1)
    progress = np.append(value.progress, np.ones(len(others)))
    lost = np.append(value.lost, np.zeros(len(others)))
    buckets, count = seconds.shape
    picks = np.concatenate([chosen[None], np.repeat(np.arange(count, dtype=np.int32)[:, None], buckets, 1)])
    rest, waits = float(state.rest) or policy.FIRST_REST, np.array(state.waits)

    def cost_of(progress: np.ndarray, lost: np.ndarray, max_slowdown: float) -> list[float]:
        cost = choices.cost_of(np, picks, waits, seconds, sizes, rest, progress, lost, max_slowdown)
        return [float(x) for x in cost]

    steps = cost_of(np.ones(count), np.zeros(count), 0.0)
    per_progress = cost_of(progress, lost, auto.max_slowdown)
    specs = [*(candidate.spec for candidate in auto.candidates), *others]
    ages = [int(age) for age in state.age]
    choice = StepForecast("auto", steps[0], float(progress[chosen] @ share), per_progress[0])
    fixed = [
        StepForecast(spec, steps[c + 1], float(progress[c]), per_progress[c + 1],
                     ages[c] if c < len(ages) and ages[c] < trials.STALE_STEPS else None)
        for c, spec in enumerate(specs)
    ]  # fmt: skip
    return AutoReport(step, choice, tuple(fixed))


def of_buckets(known: Known, step: int) -> list[BucketReport]:
    """Reports on each bucket of `auto` after `step` steps."""
    of_all_buckets = of_steps(known, step)
    auto, state, seconds, value = known.auto, known.state, known.seconds, known.value
    is_model_wide = auto.model_wide_candidates
    # Seconds of all buckets: with each candidate alone, and with the choice.
    totals = seconds.sum(0)
    total_now = sum(float(seconds[b, c]) for b, c in enumerate(state.choice))
    reports = []
    for b, bucket_bytes in enumerate(known.nbytes):
        chosen = int(state.choice[b])
        candidates = []
        for c, candidate in enumerate(auto.candidates):
            predicted = float(totals[c] if is_model_wide[c] else seconds[b, c])
            own, now, of_what = predicted, float(seconds[b, chosen]), ""
            if is_model_wide[c] or is_model_wide[chosen]:
                own, now = float(totals[c]), total_now
                of_what = OF_ALL if is_model_wide[c] else " for all buckets"
            why = "" if c == chosen else _why(auto, value, c, chosen, own, now, of_what, step)
            through, gained = 1.0 - float(value.lost[c]), float(value.progress[c])
            candidates.append(Candidate(candidate.spec, predicted, through, gained, why))
        measured = float(sum(state.measured) if is_model_wide[chosen] else state.measured[b])
        reports.append(
            BucketReport(
                bucket_bytes,
                auto.candidates[chosen].spec,
                candidates[chosen].predicted,
                measured or None,
                int(state.switches[b]),
                tuple(candidates),
                together=is_model_wide[chosen],
                auto=of_all_buckets,
            )
        )
    return reports


def _why(auto: Auto, value: policy.Value, c: int, chosen: int, own: float, now: float, of_what: str, step: int) -> str:
    """Why candidate `c`, which takes `own` seconds, was not chosen; the chosen one takes `now` seconds."""
    if auto.warms_up(step):
        return f"the warm-up lasts until step {auto.warmup_steps}"
    through, target, times = 1.0 - float(value.lost[c]), auto.target_at(step), f"{milliseconds(own)}{of_what}"
    gained, least = float(value.progress[c]), auto.min_progress
    if auto.objective == "step":
        if through < target:
            return f"lets {100 * through:.2g}% of the energy through, the target is {100 * target:.3g}%"
        if own > now:
            return f"slower: predicted {times}"
        return f"predicted {times}: nothing gained for the step, or too little so far"
    if gained < least:
        return f"makes {100 * gained:.0f}% of the progress of an uncompressed step, min_progress is {100 * least:.3g}%"
    if own > now and gained <= float(value.progress[chosen]):
        return f"slower: predicted {times}, and {100 * gained:.0f}% of the progress"
    return f"predicted {times}, {100 * gained:.0f}% of the progress: nothing gained per second, or too little so far"


def log_start(auto: Auto, nbytes: Sequence[int], seconds: np.ndarray, choice: np.ndarray, warms_up: bool) -> None:
    """Prints one line about the choice of the first step, int [B]; `seconds` [B, C] are those of the exchanges."""
    parts = []
    for b, c in enumerate(choice):
        predicted, of_what = seconds[b, c], ""
        if auto.model_wide_candidates[c]:
            predicted, of_what = seconds[:, c].sum(), OF_ALL
        parts.append(
            f"bucket {b} ({nbytes[b] / 1e6:.1f} MB): {auto.candidates[c].spec}, predicted "
            f"{milliseconds(predicted)}{of_what}"
        )
    until_when = f", until step {auto.warmup_steps}" if warms_up else ""
    say(f"auto begins with {'; '.join(parts)}{until_when}")


def log_end_of_warmup(auto: Auto, choice: np.ndarray) -> None:
    """Prints that the warm-up is over, and the choice that follows it, int [B]."""
    specs = ", ".join(dict.fromkeys(auto.candidates[c].spec for c in choice))
    say(f"auto: the warm-up with {auto.warmup[0].spec} is over; now {specs}")


def log_trace(names: Sequence[str]) -> None:
    """Prints that the next step is traced again, with what is new: candidates, compressed rows, a measurement."""
    say(f"auto traces the step again, with {', '.join(names)}")


def log_switches(
    auto: Auto, nbytes: Sequence[int], costs: policy.Costs, state: policy.State, chosen: tf.Tensor, show: bool
) -> None:
    """Prints a line for each bucket whose choice changes from `state.choice` to `chosen`, int32 [B].

    It prints only if `show` is True, but all ranks trace it: their graphs should be equal.
    """

    def lines() -> tf.Tensor:
        specs = tf.constant([candidate.spec for candidate in auto.candidates])
        names = [f"bucket {b} ({size / 1e6:.1f} MB): " for b, size in enumerate(nbytes)]
        old, new = tf.gather(specs, state.choice), tf.gather(specs, chosen)
        table, measured = policy.predicted(costs, state.link) * state.bias, state.measured
        unit: list[Any] = [" ms"] * len(names)
        if any(auto.model_wide_candidates):
            is_model_wide = tf.constant(auto.model_wide_candidates)
            table = tf.where(is_model_wide, tf.reduce_sum(table, 0), table)
            measured = tf.where(tf.gather(is_model_wide, state.choice), tf.reduce_sum(measured), measured)
            unit = tf.gather(tf.where(is_model_wide, " ms" + OF_ALL, " ms"), chosen)
        seconds = tf.gather(table, chosen, axis=1, batch_dims=1)
        known = tf.where(measured > 0.0, tf.strings.join([_text(measured), " ms"]), "not yet")
        text = tf.strings.join(
            ["hvd_compress: ", tf.constant(names), old, " -> ", new, "; predicted ", _text(seconds), unit, ", ", old,
             " measured ", known]
        )  # fmt: skip
        text = tf.boolean_mask(text, chosen != state.choice)
        tf.print(tf.strings.reduce_join(text, separator="\n"), output_stream=sys.stderr)
        return tf.constant(True)

    tf.cond(tf.reduce_any(chosen != state.choice) & (show and shows("info")), lines, lambda: tf.constant(False))


def _text(seconds: tf.Tensor) -> tf.Tensor:
    return tf.strings.as_string(1e3 * seconds, precision=1)
