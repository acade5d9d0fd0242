"""`hvdc.profile`: watches a custom training loop."""

from __future__ import annotations

import os
import time
from types import TracebackType
from typing import Any

from ..common import checks
from ..engine.reducer import alive, watch_all
from . import summary
from .recorder import Recorder
from .session import Session
from .steps import Steps


class profile:
    """Measures the steps of a custom loop, on this rank.

        with hvdc.profile() as prof:
            for x, y in batches:
                loss = train_step(x, y)
                prof.step(loss)
        print(prof.summary())

    Of `hvdc.DistributedGradientTape` and `hvdc.DistributedOptimizer` alike; where there are several, of the one with
    the most gradients. A `tf.function` must be traced (called for the first time) inside of the `with`. Communicates
    with nobody: it may be used on some ranks only, and does not change what is trained.

    Args:
        log_dir: Where to write the files that `hvd-compress doctor` and `report` read (see docs/monitor.md); None to
            write none.

    Attributes:
        first_step_seconds: What the first step took, tracing and compiling included; None before it.

    Raises:
        TypeError: `log_dir` is no path.
        OSError: `log_dir` cannot be written to.
    """

    def __init__(self, log_dir: str | os.PathLike | None = None) -> None:
        self._log_dir = None if log_dir is None else checks.path("log_dir", log_dir)
        self._some: list[Steps] = []
        self._session: Session | None = None
        self._begun = 0.0

    @property
    def first_step_seconds(self) -> float | None:
        """What the first step took."""
        return None if self._session is None else self._session.first_step_seconds

    def __enter__(self) -> profile:
        self._session = Session(alive, self._log_dir, "profile")
        watch_all.append(Recorder)
        self._begun = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        watch_all.remove(Recorder)
        assert self._session is not None
        self._keep(self._session.read())
        self._session.finish()

    def step(self, loss: Any = None) -> None:
        """Says that a step was made.

        Args:
            loss: The step's loss, a scalar; it is looked at later, so that nothing waits for it.

        Raises:
            RuntimeError: Called before the `with`.
        """
        if self._session is None:
            raise RuntimeError("profile.step: call it inside of `with hvdc.profile() as prof:`")
        first = self._session.first_step_seconds is None
        self._session.losses.append(loss)
        self._keep(self._session.stepped(time.perf_counter() - self._begun if first else None))
        if first:
            self._session.log_first_step()

    def _keep(self, steps: Steps | None) -> None:
        if steps is not None:
            self._some.append(steps)

    def summary(self) -> str:
        """A table: mean, standard deviation, percentiles and maximum of each quantity; the first step apart."""
        if not self._some:
            return (
                "no step was recorded: a single rank exchanges nothing, and a tf.function that was traced before the "
                "profile began does not record"
            )
        return summary.table(self._some, self.first_step_seconds)

    def stats(self) -> dict[str, dict[str, float]]:
        """The numbers of `summary`: by quantity, then "mean", "std", "p50", "p90", "p99" and "max"."""
        return summary.stats(self._some) if self._some else {}
