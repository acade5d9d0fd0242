"""What users are told about the choice."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING

import tensorflow as tf

from . import policy

if TYPE_CHECKING:
    from .chooser import Chooser


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One compressor for one bucket.

    Attributes:
        compressor: Its spec string.
        predicted: Seconds of the bucket's exchange.
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
    """

    nbytes: int
    chosen: str
    predicted: float | None = None
    measured: float | None = None
    switches: int = 0
    candidates: tuple[Candidate, ...] = ()
    rows_of: str = ""


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


def of_chooser(chooser: Chooser, step: int) -> list[BucketReport]:
    """The buckets of a chooser after so many steps."""
    state = policy.State(*(tf.convert_to_tensor(variable) for variable in chooser.state))
    seconds = (policy.predicted(chooser.costs, state.link) * state.bias).numpy()
    lost = policy.shares(state, chooser.prior).numpy()
    target = chooser.auto.target_at(step)
    specs = [candidate.spec for candidate in chooser.auto.candidates]
    found = []
    for b, nbytes in enumerate(chooser.nbytes):
        chosen = int(state.choice[b])
        rows = []
        for c, spec in enumerate(specs):
            through = 1.0 - float(lost[b, c])
            why = ""
            if c != chosen and through < target:
                why = f"lets {100 * through:.2g}% of the energy through, the target is {100 * target:.3g}%"
            elif c != chosen and seconds[b, c] > seconds[b, chosen]:
                why = f"slower: predicted {_ms(float(seconds[b, c]))}"
            elif c != chosen:
                why = f"predicted {_ms(float(seconds[b, c]))}: nothing gained for the step, or too little so far"
            rows.append(Candidate(spec, float(seconds[b, c]), through, why))
        measured = float(state.measured[b])
        found.append(
            BucketReport(
                nbytes,
                specs[chosen],
                float(seconds[b, chosen]),
                measured or None,
                int(state.switches[b]),
                tuple(rows),
            )
        )
    return found


def log_start(chooser: Chooser) -> None:
    """Prints one line about the first choice."""
    parts = [
        f"bucket {b} ({bucket.nbytes / 1e6:.1f} MB): {bucket.chosen}, predicted {_ms(bucket.predicted)}"
        for b, bucket in enumerate(of_chooser(chooser, 0))
    ]
    print(f"hvd_compress: auto begins with {'; '.join(parts)}", file=sys.stderr, flush=True)


def log_switches(chooser: Chooser, state: policy.State, chosen: tf.Tensor, show: bool) -> None:
    """Prints a line for each bucket whose choice changes from `state.choice` to `chosen`, int32 [B], if to `show`."""

    def lines() -> tf.Tensor:
        specs = tf.constant([candidate.spec for candidate in chooser.auto.candidates])
        names = [f"bucket {b} ({nbytes / 1e6:.1f} MB): " for b, nbytes in enumerate(chooser.nbytes)]
        old, new = tf.gather(specs, state.choice), tf.gather(specs, chosen)
        seconds = tf.gather(
            policy.predicted(chooser.costs, state.link) * state.bias, chosen, axis=1, batch_dims=1
        )
        measured = tf.where(state.measured > 0.0, tf.strings.join([_text(state.measured), " ms"]), "not yet")
        found = tf.strings.join(
            ["hvd_compress: ", tf.constant(names), old, " -> ", new, "; predicted ", _text(seconds), " ms, ", old,
             " measured ", measured]
        )  # fmt: skip
        found = tf.boolean_mask(found, chosen != state.choice)
        tf.print(tf.strings.reduce_join(found, separator="\n"), output_stream=sys.stderr)
        return tf.constant(True)

    # Traced by all ranks, though only one prints: their graphs should be the same.
    tf.cond(tf.reduce_any(chosen != state.choice) & show, lines, lambda: tf.constant(False))


def _text(seconds: tf.Tensor) -> tf.Tensor:
    return tf.strings.as_string(1e3 * seconds, precision=1)
