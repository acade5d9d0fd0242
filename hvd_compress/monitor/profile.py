"""`hvdc.profile`: measures the steps of a custom training loop."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd

from ..common import checks
from ..common.verbosity import say
from ..engine import agreement
from ..engine.reducer import alive, watch_all
from . import chrome_trace, clocks, summary
from .gradients import checked_every, make_recorder, stop_recording
from .session import Session
from .steps import Steps


class profile:
    """Context manager that measures the steps of a custom training loop on this rank.

    Example:
        with hvdc.profile() as prof:
            for x, y in batches:
                loss = train_step(x, y)
                prof.step(loss)
        print(prof.summary())

    It measures `hvdc.DistributedGradientTape` and `hvdc.DistributedOptimizer`; if several take steps, the one with the
    most gradients. A `tf.function` must be traced, that is called for the first time, inside the `with` block.
    The profile does not communicate: it may be used on some ranks only, and does not change the training.

    With `trace`, the profile compares the clocks of all ranks when it begins and when it ends, and rank 0 writes the
    steps of all ranks on one time line. Then all ranks must enter and leave it together.

    Args:
        log_dir: Directory for the files that `hvd-compress doctor` and `hvd-compress report` read (see
            docs/monitor.md). None writes no files.
        gradients: As in `hvdc.callbacks.CompressionMonitor`: of every so many steps, rank 0 writes its gradients to
            `gradients.npz` in `log_dir`.
        trace: File for Perfetto or chrome://tracing, in Chrome's JSON format: when each bucket was encoded, sent and
            decoded on each rank. Rank 0 says by how much two ranks' clocks may be apart in it. It holds the last steps
            if there are too many to look at. Call `step` after each step, or it holds the last 512 at most.

    Raises:
        TypeError: `log_dir` or `trace` is not a path.
        ValueError: `gradients` is not valid, or `log_dir` is missing for it.
        OSError: `log_dir` or `trace` cannot be written to.
    """

    def __init__(
        self,
        log_dir: str | os.PathLike | None = None,
        gradients: int | None = None,
        trace: str | os.PathLike | None = None,
    ) -> None:
        self._trace = None if trace is None else Path(checks.path("trace", trace, "file"))
        self._log_dir = None if log_dir is None else checks.path("log_dir", log_dir)
        self._gradients = checked_every("gradients", gradients)
        if gradients is not None and log_dir is None:
            raise ValueError("profile: gradients are written to a file in log_dir: pass it, too")
        self._steps: list[Steps] = []
        self._session: Session | None = None
        self._start = 0.0

    @property
    def first_step_seconds(self) -> float | None:
        """Seconds of the first step, including tracing and compiling. None before it."""
        return None if self._session is None else self._session.first_step_seconds

    def __enter__(self) -> profile:
        self._session = Session(alive, self._log_dir, "profile")
        self._make_recorder = make_recorder(self._log_dir, self._gradients)
        if self._trace is not None:
            agreement.on_all(hvd.global_process_set, "hvdc_trace_file", "profile: trace", self._touch, OSError)
            self._clocks = clocks.compare()
        if self._gradients is not None:
            for reducer in alive():
                reducer.forget_recorders()
        watch_all.append(self._make_recorder)
        self._start = time.perf_counter()
        return self

    def _touch(self) -> None:
        """Makes the file of the trace: an error now is better than one at the end."""
        if self._trace is not None and hvd.rank() == 0:
            self._trace.touch()

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        watch_all.remove(self._make_recorder)
        if self._gradients is not None:
            stop_recording([plan for reducer in alive() for plan in reducer.plans.values()])
        assert self._session is not None
        while (steps := self._session.read()) is not None:  # of this plan, and of the next one
            self._keep(steps)
        self._session.finish()
        if self._trace is not None and error is None:  # after an error, other ranks may be elsewhere
            self._write_trace(self._trace, self._session)

    def _write_trace(self, path: Path, session: Session) -> None:
        last = clocks.compare()
        steps = summary.of_buckets(self._steps, len(session.buckets))
        own = chrome_trace.rank_steps(socket.gethostname(), session.buckets, steps, hvd.size())
        ranks = hvd.allgather_object(own, name="hvdc_trace")
        if hvd.rank() == 0:
            error = chrome_trace.write(path, ranks, self._clocks, last)
            last_of = f"the last {len(own.step)} of " if len(own.step) < sum(map(len, self._steps)) else ""
            text = f"{last_of}{sum(map(len, self._steps))} steps, clocks aligned within {1e3 * error:.2g} ms"
            say(f"{path} is written: {text}")

    def step(self, loss: Any = None) -> None:
        """Call it after each training step.

        Args:
            loss: The loss of the step, a scalar or None. It is read later, so that the loop does not wait for it.

        Raises:
            RuntimeError: Called outside of the `with` block.
        """
        if self._session is None:
            raise RuntimeError("profile.step: call it inside of `with hvdc.profile() as prof:`")
        first = self._session.first_step_seconds is None
        self._session.losses.append(loss)
        self._keep(self._session.stepped(time.perf_counter() - self._start if first else None))
        if first:
            self._session.log_first_step()

    def _keep(self, steps: Steps | None) -> None:
        if steps is not None:
            self._steps.append(steps)

    def summary(self) -> str:
        """The numbers of `stats` as a table, and the seconds of the first step."""
        if not self._steps:
            return (
                "no step was recorded: a single rank exchanges nothing, and a tf.function that was traced before the "
                "profile began does not record"
            )
        return summary.table(self._steps, self.first_step_seconds)

    def stats(self) -> dict[str, dict[str, float]]:
        """The mean, standard deviation, percentiles and maximum of each quantity.

        Without the first step, which compiles, and without trials of `auto`.

        Returns:
            By quantity (`step_ms`, `bytes`, ...), a dictionary with the keys "mean", "std", "p50", "p90", "p99" and
            "max". Times are in milliseconds. Empty if no step was recorded.
        """
        return summary.stats(self._steps) if self._steps else {}
