"""What users are told about the choice."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from . import model_wide as all_at_once
from . import policy

if TYPE_CHECKING:
    from .selector import AutoSelector

# Behind times of a candidate that is for all buckets at once.
_OF_ALL = " for all buckets at once"


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One compressor for one bucket.

    Attributes:
        compressor: Its spec string.
        predicted: Seconds of the bucket's exchange; of one that is for all buckets at once (`powersgd`), of that.
        through: The share of the bucket's energy that it lets through.
        why: Why it was not chosen; empty for the one that was.
    """

    compressor: str
    predicted: float
    through: float
    why: str


@dataclasses.dataclass(frozen=True)
class BucketReport:
    """One bucket.

    Attributes:
        nbytes: Of its gradients, as float32.
        chosen: The spec string of the compressor in use.
        predicted: Seconds of its exchange; None where nothing is chosen automatically.
        measured: Seconds, a running average; None where none was measured yet.
        switches: How often the choice changed.
        candidates: All of them.
        rows_of: The variable's path, where single rows of it cross (an embedding); else empty.
        together: Whether it crosses with all other buckets of `auto` at once: times are those of all of them.
    """

    nbytes: int
    chosen: str
    predicted: float | None = None
    measured: float | None = None
    switches: int = 0
    candidates: tuple[Candidate, ...] = ()
    rows_of: str = ""
    together: bool = False


@dataclasses.dataclass(frozen=True)
class CompressionReport:
    """What is compressed how, bucket by bucket; printable.

    Attributes:
        buckets: In the order in which they cross; rows of embeddings last.
    """

    buckets: tuple[BucketReport, ...]

    def __str__(self) -> str:
        lines = []
        for i, bucket in enumerate(self.buckets):
            times = f"; predicted {_ms(bucket.predicted)}, measured {_ms(bucket.measured)}"
            times += _OF_ALL if bucket.together else ""
            switches = f"; {bucket.switches} switches" if bucket.candidates else ""
            if bucket.rows_of:
                lines.append(f"rows of {bucket.rows_of} ({bucket.nbytes / 1e6:.1f} MB): {bucket.chosen}")
                continue
            lines.append(
                f"bucket {i} ({bucket.nbytes / 1e6:.1f} MB): {bucket.chosen}"
                f"{times if bucket.candidates else ''}{switches}"
            )
            for candidate in bucket.candidates:
                if candidate.why:
                    lines.append(f"    not {candidate.compressor}: {candidate.why}")
        return "\n".join(lines)


def _ms(seconds: float | None) -> str:
    return "not yet" if seconds is None else f"{1e3 * seconds:.3g} ms"


def of_selector(selector: AutoSelector, step: int) -> list[BucketReport]:
    """The buckets of a selector after so many steps."""
    state = policy.State(*(tf.convert_to_tensor(variable) for variable in selector.state))
    seconds = (policy.predicted(selector.costs, state.link) * state.bias).numpy()
    lost = policy.shares(state, selector.prior).numpy()
    target = selector.auto.target_at(step)
    specs, whole = (
        [candidate.spec for candidate in selector.auto.candidates],
        selector.auto.model_wide_candidates,
    )
    if any(whole):
        lost = all_at_once.of_model(lost, tf.constant(selector.nbytes, tf.float32), whole).numpy()
    # Of all buckets, with each candidate alone and with those that are chosen.
    totals, total = seconds.sum(0), sum(float(seconds[b, c]) for b, c in enumerate(state.choice))
    found = []
    for b, nbytes in enumerate(selector.nbytes):
        chosen = int(state.choice[b])
        rows = []
        for c, spec in enumerate(specs):
            through = 1.0 - float(lost[b, c])
            mine, now, at_once = float(seconds[b, c]), float(seconds[b, chosen]), ""
            if whole[c] or whole[chosen]:
                mine, now, at_once = float(totals[c]), total, _OF_ALL if whole[c] else " for all buckets"
            why = ""
            if c != chosen and through < target:
                why = f"lets {100 * through:.2g}% of the energy through, the target is {100 * target:.3g}%"
            elif c != chosen and mine > now:
                why = f"slower: predicted {_ms(mine)}{at_once}"
            elif c != chosen:
                why = f"predicted {_ms(mine)}{at_once}: nothing gained for the step, or too little so far"
            rows.append(Candidate(spec, mine if whole[c] else float(seconds[b, c]), through, why))
        measured = float(sum(state.measured) if whole[chosen] else state.measured[b])
        found.append(
            BucketReport(
                nbytes,
                specs[chosen],
                rows[chosen].predicted,
                measured or None,
                int(state.switches[b]),
                tuple(rows),
                together=whole[chosen],
            )
        )
    return found


def log_start(selector: AutoSelector) -> None:
    """Prints one line about the first choice."""
    parts = [
        f"bucket {b} ({bucket.nbytes / 1e6:.1f} MB): {bucket.chosen}, predicted {_ms(bucket.predicted)}"
        f"{_OF_ALL if bucket.together else ''}"
        for b, bucket in enumerate(of_selector(selector, 0))
    ]
    print(f"hvd_compress: auto begins with {'; '.join(parts)}", file=sys.stderr, flush=True)


def log_switches(selector: AutoSelector, state: policy.State, chosen: tf.Tensor, show: bool) -> None:
    """Prints a line for each bucket whose choice changes from `state.choice` to `chosen`, int32 [B], if to `show`."""

    def lines() -> tf.Tensor:
        specs = tf.constant([candidate.spec for candidate in selector.auto.candidates])
        names = [f"bucket {b} ({nbytes / 1e6:.1f} MB): " for b, nbytes in enumerate(selector.nbytes)]
        old, new = tf.gather(specs, state.choice), tf.gather(specs, chosen)
        table, measured = policy.predicted(selector.costs, state.link) * state.bias, state.measured
        unit: list[Any] = [" ms"] * len(names)
        if any(selector.auto.model_wide_candidates):
            whole = tf.constant(selector.auto.model_wide_candidates)
            table = tf.where(whole, tf.reduce_sum(table, 0), table)
            measured = tf.where(tf.gather(whole, state.choice), tf.reduce_sum(measured), measured)
            units = tf.where(whole, " ms" + _OF_ALL, " ms")
            unit = tf.gather(units, chosen)
        seconds = tf.gather(table, chosen, axis=1, batch_dims=1)
        known = tf.where(measured > 0.0, tf.strings.join([_text(measured), " ms"]), "not yet")
        found = tf.strings.join(
            ["hvd_compress: ", tf.constant(names), old, " -> ", new, "; predicted ", _text(seconds), unit, ", ", old,
             " measured ", known]
        )  # fmt: skip
        found = tf.boolean_mask(found, chosen != state.choice)
        tf.print(tf.strings.reduce_join(found, separator="\n"), output_stream=sys.stderr)
        return tf.constant(True)

    # Traced by all ranks, though only one prints: their graphs should be the same.
    tf.cond(tf.reduce_any(chosen != state.choice) & show, lines, lambda: tf.constant(False))


def _text(seconds: tf.Tensor) -> tf.Tensor:
    return tf.strings.as_string(1e3 * seconds, precision=1)
