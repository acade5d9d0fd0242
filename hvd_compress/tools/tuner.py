"""Running a script with one setting after the other, for `hvd-compress tune`."""

from __future__ import annotations

import dataclasses
import math
import re
import shlex
import shutil
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from . import console, families, search, units
from . import trial as trials
from .outcomes import outcomes
from .search import BASELINE, Setting
from .trial import Run

# A run is ended when it takes so many times as long as the one without compression, or its first steps so many times
# as long as those of the best so far.
_LATE = 1.5
_HOPELESS = 1.5
_ENOUGH = 20  # steps
_HUGE = 1e30
_ASKS = 50  # proposals in a row that are known: then there is nothing new
_STARTUP = 60.0  # seconds more, for starting and compiling kernels


class Tuner:
    """Runs a script with one setting after the other."""

    def __init__(
        self, script: Path, arguments: tuple[str, ...], ranks: int, hosts: str | None, launcher: str,
        metric: str | None, mode: str, allowed: float, metric_regex: str | None, time_limit: float | None,
    ) -> None:  # fmt: skip
        self.allowed = allowed
        self._metric, self._mode, self._limit = metric, mode, time_limit
        with console.usage("--launcher"):
            start = shlex.split(launcher)
            if not start:
                raise ValueError("it is empty: leave it out, or name the program, such as horovodrun")
        # That of this environment, also where it is not activated.
        program = shutil.which(start[0], path=str(Path(sys.executable).parent)) or shutil.which(start[0])
        if program is None:
            raise click.ClickException(
                f"{start[0]} was not found: install Horovod, or name it with --launcher"
            )
        on = ["-H", hosts] if hosts else []
        self._command = [program, *start[1:], "-np", str(ranks), *on, sys.executable, str(script), *arguments]
        self._pattern = None
        if metric_regex is not None:
            with console.usage("--metric-regex"):
                try:
                    self._pattern = re.compile(metric_regex)
                except re.error as error:
                    raise ValueError(f"{metric_regex!r} is no regular expression: {error}") from None
                if not self._pattern.groups:
                    raise ValueError(f"{metric_regex!r} has no group: put the number into (parentheses)")

    def check(self, study: Any) -> None:
        """Whether the study is of the same runs.

        Raises:
            ValueError: It is not.
        """
        mine = {
            "command": shlex.join(self._command), "metric": self._metric, "mode": self._mode,
            "pattern": self._pattern and self._pattern.pattern,
        }  # fmt: skip
        kept = study.user_attrs.get("of")
        if kept is None:
            study.set_user_attr("of", mine)
        elif kept != mine:
            what = next(key for key in mine if kept.get(key) != mine[key])
            raise ValueError(f"it is of another {what}, {kept.get(what)!r}: name another file")

    def metric_name(self, study: Any) -> str:
        """Which metric counts."""
        return str(self._metric or study.user_attrs.get("metric", "metric"))

    def next(self, study: Any, kinds: tuple[str, ...], say: Callable[[str], None]) -> bool:
        """Runs the script once with a setting that has not been tried, and keeps in the study what came of it.

        Returns:
            Whether there was such a setting.

        Raises:
            click.ClickException: The run without compression tells nothing, or the script has settings of its own.
        """
        if "baseline" not in study.user_attrs:
            self.attempt(study, study.ask(), BASELINE, say)
            search.begin(study, kinds)
            return True
        found = outcomes(study)
        if not search.is_opening(study):
            proposal = families.proposal(found, kinds, self.allowed)
            if proposal is not None:
                search.enqueue(study, proposal)
        for _ in range(_ASKS):
            trial = study.ask()
            setting = search.propose(trial, kinds)
            if setting not in (each.setting for each in found):
                self.attempt(study, trial, setting, say)
                return True
            _void(study, trial)
        return False

    def attempt(self, study: Any, trial: Any, setting: Setting, say: Callable[[str], None]) -> None:
        """Runs the script with a setting, and keeps in the trial what came of it.

        Raises:
            click.ClickException: As `next`.
        """
        try:
            for key, value in dataclasses.asdict(setting).items():
                trial.set_user_attr(key, value)
            self._tell(study, trial, setting, self._run(study, setting, say))
        except BaseException:  # an interruption, too: it does not count, and the study goes on from here
            if not study.get_trials(deepcopy=False)[trial.number].state.is_finished():
                _void(study, trial)
                search.put_back(study, trial)
            raise

    def _tell(self, study: Any, trial: Any, setting: Setting, found: Run) -> None:
        import optuna

        state = optuna.trial.TrialState
        is_baseline = "baseline" not in study.user_attrs
        trial.set_user_attr("seconds", found.seconds)
        if found.status == "late" and is_baseline:
            raise click.ClickException("the run without compression took longer than --time-limit")
        if found.status == "late":
            study.tell(trial, state=state.PRUNED)
            return
        if found.status == "slow":
            trial.set_user_attr("step", statistics.median(found.usual_steps()))
            study.tell(trial, state=state.PRUNED)
            return
        self._complain(found, setting)
        if found.status == "failed":
            study.tell(trial, state=state.FAIL)
            return
        metric, step = self._metric_of(found, study), statistics.median(found.usual_steps())
        if is_baseline:
            if not abs(metric) < _HUGE:
                raise click.ClickException(
                    f"without compression {self.metric_name(study)} is {metric}: there is nothing to compare with"
                )
            study.set_user_attr("baseline", {"metric": metric, "step": step})
            study.set_user_attr("limit", _LATE * found.seconds + _STARTUP)
        base = study.user_attrs["baseline"]
        worse = base["metric"] - metric if self._more_is_better(study) else metric - base["metric"]
        # What is not finite is not admissible, and no JSON.
        worse = worse if abs(worse) < _HUGE else _HUGE
        trial.set_user_attr("step", step)
        trial.set_user_attr("loss_increase", worse)
        trial.set_user_attr("metric", metric if abs(metric) < _HUGE else None)
        study.tell(trial, search.price(step, worse <= self.allowed, base["step"]))

    def _run(self, study: Any, setting: Setting, say: Callable[[str], None]) -> Run:
        limit = self._limit or study.user_attrs.get("limit")
        size = units.show_bytes(setting.bucket_bytes)
        good = [each.step for each in outcomes(study) if each.step and each.is_good(self.allowed)]
        best = min(good, default=math.inf)

        def watch(found: Run) -> str | None:
            say(f"{setting.compression}, buckets of {size}: {found.seconds:.0f} s, {len(found.steps)} steps")
            if len(found.steps) < _ENOUGH:
                return None
            if not math.isfinite(found.metrics.get(self.metric_name(study), 0.0)):
                return "diverged"
            return "slow" if statistics.median(found.usual_steps()) > _HOPELESS * best else None

        try:
            return trials.run(self._command, setting.environment(), limit, self._pattern, watch)
        except OSError as error:
            raise click.ClickException(f"{self._command[0]} cannot be started: {error.strerror}") from None

    def _complain(self, found: Run, setting: Setting) -> None:
        """Raises what makes tuning pointless."""
        if found.status == "failed" and setting == BASELINE:
            raise click.ClickException("the script fails without compression:\n" + "\n".join(found.said))
        if found.status == "failed":
            return
        if not found.usual_steps():
            raise click.ClickException(
                "the script made too few steps with hvdc.DistributedOptimizer or hvdc.DistributedGradientTape "
                "to tell their time: let it make at least 10"
            )
        for what in ("compression", "bucket_bytes"):
            used, wanted = getattr(found, what), getattr(setting, what)
            if used != wanted:
                raise click.ClickException(
                    f"the script sets {what} to {used} itself: leave it out, so that tuning can try {wanted}"
                )

    def _metric_of(self, found: Run, study: Any) -> float:
        if self._pattern is not None:
            if found.printed is None:
                raise click.ClickException(
                    f"--metric-regex {self._pattern.pattern!r} matches no number in the output"
                )
            return found.printed
        name = self._metric or study.user_attrs.get("metric")
        if name is None:
            name = next((key for key in ("val_loss", "loss") if key in found.metrics), "loss")
        if name not in found.metrics:
            seen = f"the script has {', '.join(found.metrics)}" if found.metrics else "the script told none"
            raise click.ClickException(
                f"no metric {name!r}: {seen}; use hvdc.callbacks.MetricAverageCallback, --metric or --metric-regex"
            )
        study.set_user_attr("metric", name)
        return found.metrics[name]

    def _more_is_better(self, study: Any) -> bool:
        if self._mode == "auto":
            return search.is_maximized(self.metric_name(study))
        return self._mode == "max"


def _void(study: Any, trial: Any) -> None:
    """Ends a trial that tells nothing."""
    import optuna

    trial.set_user_attr("void", True)
    study.tell(trial, state=optuna.trial.TrialState.FAIL)
