"""`hvdc.profile`: measures the steps of a custom training loop."""

from __future__ import annotations

import os
import time
from typing import Any

from ..common import checks
from ..engine.reducer import alive, watch_all
from . import summary
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

    Args:
        log_dir: Directory for the files that `hvd-compress doctor` and `hvd-compress report` read (see
            docs/monitor.md). None writes no files.
        gradients: As in `hvdc.callbacks.CompressionMonitor`: of every so many steps, rank 0 writes its gradients to
            `gradients.npz` in `log_dir`.

    Raises:
        TypeError: `log_dir` is not a path.
        ValueError: `gradients` is not valid, or `log_dir` is missing for it.
        OSError: `log_dir` cannot be written to.
    """

    def __init__(self, log_dir: str | os.PathLike | None = None, gradients: int | None = None) -> None:
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
        watch_all.append(self._make_recorder)
        self._start = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        watch_all.remove(self._make_recorder)
        if self._gradients is not None:
            stop_recording([plan for reducer in alive() for plan in reducer.plans.values()])
        assert self._session is not None
        self._keep(self._session.read())
        self._session.finish()

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
