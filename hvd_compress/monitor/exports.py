"""Passes on what was measured: to TensorBoard, and to a function of the user's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from ..common.error_text import error_text
from ..common.verbosity import say
from . import events
from .session import Session
from .steps import Steps
from .summary import bucket_means, means, of_buckets

# Arguments: the step, and numbers by name.
Log = Callable[[int, Mapping[str, float]], Any]


class Exports:
    """Passes means of steps on, on the first rank; the other ranks do nothing.

    Args:
        tensorboard: The directory of TensorBoard's files; None to write none.
        who: Who measures, for messages.
        is_first: Whether this rank is the first one of its process set.
        log: Called with the step and numbers by name, each time when means are written.
    """

    def __init__(self, tensorboard: str | None, who: str, is_first: bool, log: Log | None = None) -> None:
        self._is_first = is_first
        self._who, self._log = who, log
        self._writer = None
        if tensorboard is not None and self._is_first:
            self._writer = tf.summary.create_file_writer(tensorboard)
        self._unwritten: list[Steps] = []
        self._compressors: dict[str, str] = {}  # by bucket name, as last written

    def add(self, steps: Steps) -> None:
        """Takes the next steps."""
        if self._is_first:
            self._unwritten.append(steps)

    def write(self, session: Session) -> None:
        """Passes on the means over the steps since the last call."""
        steps, self._unwritten = of_buckets(self._unwritten, len(session.buckets)), []
        if not steps:
            return
        number = int(steps[-1].step[-1])
        values = {f"hvd_compress/{name}": value for name, value in _values(session, steps).items()}
        if self._writer is not None:
            events.write(self._writer, number, {**values, **self._new_compressors(session, steps)})
            self._writer.flush()
        if self._log is not None:
            try:
                self._log(number, values)
            except Exception as error:  # of the user's function, or of a service: training is worth more
                say(
                    f"{self._who}: log failed at step {number} ({error_text(error)}); it is not called again", "warning"
                )
                self._log = None

    def _new_compressors(self, session: Session, steps: list[Steps]) -> dict[str, str]:
        """The compressors of buckets, where they are not the ones that were written last."""
        last = steps[-1].buckets.compressor[-1]
        now = {bucket.name: bucket.compressors[last[b]] for b, bucket in enumerate(session.buckets)}
        new = {name: spec for name, spec in now.items() if self._compressors.get(name) != spec}
        self._compressors = now
        return {f"hvd_compress/bucket_{name}/compressor": spec for name, spec in new.items()}

    def close(self) -> None:
        """Closes the files, and the user's function if it has a method `close`."""
        if self._writer is not None:
            self._writer.close()
        if self._is_first and callable(getattr(self._log, "close", None)):
            self._log.close()  # type: ignore[union-attr]


def _values(session: Session, steps: list[Steps]) -> dict[str, float]:
    """The means of all quantities, of the steps and of each bucket; the last round; and what `auto` chooses from."""
    values = means(steps)
    for bucket, row in zip(session.buckets, bucket_means(steps)):
        values |= {f"bucket_{bucket.name}/{name}": value for name, value in row.items()}
    values |= {f"rounds/{name}": value for name, value in session.last_exchange.items()}
    auto = session.auto
    if auto is not None:
        values["auto/trial_steps"] = float(sum(part.trial.sum() for part in steps))
        for one in (auto.choice, *auto.fixed):
            tag = f"auto/{'choice' if one is auto.choice else one.compressor}"
            values[f"{tag}/step_ms"], values[f"{tag}/progress"] = 1e3 * one.step, one.progress
            values[f"{tag}/ms_per_progress"] = 1e3 * one.per_progress
            if one is not auto.choice:
                values[f"{tag}/gained_seconds"] = auto.gained(one)
    return {name: value for name, value in values.items() if not math.isnan(value)}
