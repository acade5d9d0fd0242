"""The runs of `hvd-compress tune`: starts a script with one setting after the other, and records how each run went."""

from __future__ import annotations

import dataclasses
import math
import re
import shlex
from collections.abc import Callable
from typing import Any

import click

from ..monitor.tune_protocol import EACH_STEP
from . import search, trial, units
from .search import BASELINE, Outcome, Setting
from .trial import Run

# A run is stopped if training with it takes so many times as long as with the best setting.
_SLOW = 1.5
_FEWEST_STEPS = 20  # steps before this is judged
_FEWEST_ROUNDS = 4  # of local steps, or the setting counts as failed
# A run is stopped if it takes so many times as long as the first one, plus seconds for starting and compiling.
_SLOW_RUN, _STARTUP = 1.5, 60.0
_HUGE = 1e30  # stands for a metric that is not finite
_MAX_KNOWN = 50  # After so many suggestions of known settings in a row, there is nothing new.


@dataclasses.dataclass
class Tuner:
    """Runs a script with one setting after the other."""

    study: Any  # the Optuna study that keeps the runs
    command: list[str]  # starts the script
    kinds: tuple[str, ...]  # the compressors that may be tried
    exchanges: tuple[str, ...]  # when to exchange: EACH_STEP, then others that may be tried
    metric: str | None  # its name; None for `val_loss` or `loss`
    mode: str  # "min", "max" or "auto"
    allowed: float  # by how much the metric may be worse
    pattern: re.Pattern[str] | None  # finds the metric in the output, if given
    time_limit: float | None  # seconds of a run; None for a multiple of the first one

    def check_study(self) -> None:
        """Checks that earlier runs in the study can be compared with the next ones.

        Raises:
            ValueError: They cannot.
        """
        identity = {
            "command": shlex.join(self.command), "metric": self.metric, "mode": self.mode,
            "pattern": self.pattern and self.pattern.pattern, "choice of compressors": list(self.kinds),
            "choice of exchanges": list(self.exchanges), "objective": "progress per second",
        }  # fmt: skip
        earlier = self.study.user_attrs.get("of", identity)
        for key, value in identity.items():
            if earlier.get(key) != value:
                raise ValueError(f"it is of another {key}, {earlier.get(key)!r}: name another file")
        self.study.set_user_attr("of", identity)

    @property
    def metric_name(self) -> str:
        """The name of the metric that counts."""
        return str(self.metric or self.study.user_attrs.get("metric", "metric"))

    def run_next(self, may_repeat: bool, say: Callable[[str], None]) -> bool:
        """Runs the script once and records the run in the study; False if there is no setting left to try.

        With `may_repeat`, the best settings may be run again. `say` shows progress.
        """
        import optuna

        tried = search.outcomes(self.study, self.allowed)
        parameters = search.next_parameters(tried, self.kinds, self.exchanges, may_repeat)
        if parameters is not None:
            self.study.enqueue_trial(parameters)
        for _ in range(_MAX_KNOWN):
            asked = self.study.ask()
            setting = search.suggest(asked, self.kinds, self.exchanges)
            if parameters is not None or all(outcome.setting != setting for outcome in tried):
                # If this is interrupted, the trial does not count, and its setting is tried again.
                self._record(asked, setting, self._run(setting, tried, say))
                return True
            self.study.tell(asked, state=optuna.trial.TrialState.FAIL)
        return False

    def _run(self, setting: Setting, tried: list[Outcome], say: Callable[[str], None]) -> Run:
        limit, first = self.time_limit, self._first_run()
        if limit is None and first is not None:
            limit = _SLOW_RUN * first["seconds"] + _STARTUP
        slow = _SLOW * search.good_outcomes(tried)[0].cost if tried else math.inf
        size = units.show_bytes(setting.bucket_bytes)

        def watch(run: Run) -> str | None:
            say(f"{setting.title}, buckets of {size}: {run.seconds:.0f} s, {len(run.steps)} steps")
            if len(run.steps) < _FEWEST_STEPS:
                return None
            if not math.isfinite(run.metrics.get(self.metric_name, 0.0)):
                return "diverged"
            return "slow" if setting.cost(run.step) > slow else None

        environment = {
            "HVD_COMPRESS": setting.compression,
            "HVD_COMPRESS_BUCKET_BYTES": str(setting.bucket_bytes),
            "HVD_COMPRESS_EXCHANGE": "" if setting.exchange == EACH_STEP else setting.exchange,
        }
        try:
            return trial.run(self.command, environment, limit, self.pattern, watch)
        except OSError as error:
            raise click.ClickException(f"{self.command[0]} cannot be started: {error.strerror}") from None

    def _record(self, asked: Any, setting: Setting, run: Run) -> None:
        from optuna.trial import TrialState

        facts: dict[str, Any] = {**dataclasses.asdict(setting), "seconds": run.seconds}
        # The last round of a `fit` may be shorter than the others.
        has_no_rounds = run.status == "done" and setting.exchange != EACH_STEP and len(run.steps) < _FEWEST_ROUNDS
        if run.status == "failed" or has_no_rounds:
            state = TrialState.FAIL
            if setting == BASELINE:
                raise click.ClickException("\n".join(["the script fails without compression:", *run.last_lines]))
        elif run.status == "late":
            state = TrialState.PRUNED
            if self._first_run() is None:
                raise click.ClickException("the run without compression took longer than --time-limit")
        elif run.status == "slow":
            state = TrialState.PRUNED
            facts["step"] = run.step
            asked.report(setting.cost(run.step), len(run.steps))  # for Optuna's sampler
        else:  # "done" or "diverged"
            state = TrialState.COMPLETE
            self._check_use(run, setting)
            facts.update(step=run.step, **self._compare(self._metric_of(run)))
        for key, value in facts.items():
            asked.set_user_attr(key, value)
        self.study.tell(asked, setting.cost(run.step) if state == TrialState.COMPLETE else None, state)

    def _first_run(self) -> dict[str, Any] | None:
        """What is recorded of the first run, which is without compression."""
        return next((recorded.user_attrs for recorded in search.runs(self.study)), None)

    def _compare(self, metric: float) -> dict[str, Any]:
        """The metric and by how much it is worse than without compression, in numbers that JSON has."""
        first = self._first_run()
        if first is None and not abs(metric) < _HUGE:
            problem = f"without compression {self.metric_name} is {metric}"
            raise click.ClickException(f"{problem}: there is nothing to compare with")
        increase = metric - (metric if first is None else first["metric"])
        if search.is_maximized(self.metric_name) if self.mode == "auto" else self.mode == "max":
            increase = -increase
        increase = increase if abs(increase) < _HUGE else _HUGE
        return {"metric": metric if abs(metric) < _HUGE else None, "loss_increase": increase}

    def _metric_of(self, run: Run) -> float:
        if self.pattern is not None:
            if run.printed is None:
                raise click.ClickException(f"--metric-regex {self.pattern.pattern!r} matches no number in the output")
            return run.printed
        name = self.metric or self.study.user_attrs.get("metric")
        if name is None:
            name = "val_loss" if "val_loss" in run.metrics else "loss"
        if name not in run.metrics:
            seen = f"the script has {', '.join(run.metrics)}" if run.metrics else "the script told none"
            raise click.ClickException(
                f"no metric {name!r}: {seen}; use hvdc.callbacks.MetricAverageCallback, --metric or --metric-regex"
            )
        self.study.set_user_attr("metric", name)
        return run.metrics[name]

    def _check_use(self, run: Run, setting: Setting) -> None:
        """Checks that a run made steps, with the setting that it was given."""
        if not run.usual_steps():
            raise click.ClickException(
                "the script made too few steps with hvdc.DistributedOptimizer or hvdc.DistributedGradientTape "
                "to tell their time: let it make at least 10"
            )
        for name, wanted in dataclasses.asdict(setting).items():
            used = getattr(run, name)
            is_tuned = name != "exchange" or len(self.exchanges) > 1
            if is_tuned and used != wanted:
                raise click.ClickException(
                    f"the script sets {name} to {used} itself: leave it out, so that tuning can try {wanted}"
                )
