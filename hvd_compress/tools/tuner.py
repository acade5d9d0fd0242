"""Running a script with one setting after the other, for `hvd-compress tune`."""

from __future__ import annotations

import dataclasses
import re
import shlex
import shutil
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from . import console, search, units
from .search import BASELINE, Setting
from .trial import Run, run

# A run that takes so many times as long as the one without compression is ended.
_HOPELESS = 1.5
_HUGE = 1e30
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

    def next(self, study: Any, kinds: tuple[str, ...], say: Callable[[str], None]) -> None:
        """Runs the script once, and keeps in the study what came of it.

        Raises:
            click.ClickException: The run without compression tells nothing, or the script has settings of its own.
        """
        import optuna

        trial = study.ask()
        state = optuna.trial.TrialState
        is_baseline = "baseline" not in study.user_attrs  # first of all, and never again
        setting = BASELINE if is_baseline else search.propose(trial, kinds)
        try:
            for key, value in dataclasses.asdict(setting).items():
                trial.set_user_attr(key, value)
            known = _same(study, trial.number, setting)
            if known is not None:  # not again
                for key in ("step", "loss_increase", "metric"):
                    trial.set_user_attr(key, known.user_attrs[key])
                study.tell(trial, known.value)
                return
            found = self._run(study, setting, say)
            trial.set_user_attr("seconds", found.seconds)
            if found.status == "late" and is_baseline:
                raise click.ClickException("the run without compression took longer than --time-limit")
            if found.status == "late":
                study.tell(trial, state=state.PRUNED)
                return
            self._complain(found, setting)
            if found.status == "failed" and not is_baseline:
                study.tell(trial, state=state.FAIL)
                return
            metric, step = self._metric_of(found, study), statistics.median(found.usual_steps())
            if is_baseline:
                study.set_user_attr("baseline", {"metric": metric, "step": step})
                study.set_user_attr("limit", _HOPELESS * found.seconds + _STARTUP)
                search.begin(study, kinds)
            base = study.user_attrs["baseline"]
            worse = base["metric"] - metric if self._more_is_better(study) else metric - base["metric"]
            # What is not finite is not admissible, and no JSON.
            worse = worse if abs(worse) < _HUGE else _HUGE
            trial.set_user_attr("step", step)
            trial.set_user_attr("loss_increase", worse)
            trial.set_user_attr("metric", metric if abs(metric) < _HUGE else None)
            study.tell(trial, search.price(step, worse <= self.allowed, base["step"]))
        except BaseException:  # an interruption, too: it does not count, and the study goes on from here
            if not study.get_trials(deepcopy=False)[trial.number].state.is_finished():
                trial.set_user_attr("void", True)
                study.tell(trial, state=state.FAIL)
            raise

    def _run(self, study: Any, setting: Setting, say: Callable[[str], None]) -> Run:
        limit = self._limit or study.user_attrs.get("limit")
        size = units.show_bytes(setting.bucket_bytes)

        def watch(found: Run) -> None:
            say(f"{setting.compression}, buckets of {size}: {found.seconds:.0f} s, {len(found.steps)} steps")

        try:
            return run(self._command, setting.environment(), limit, self._pattern, watch)
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


def _same(study: Any, number: int, setting: Setting) -> Any:
    """An earlier complete trial of this setting."""
    for trial in study.get_trials(deepcopy=False):
        told = (trial.user_attrs.get("compression"), trial.user_attrs.get("bucket_bytes"))
        if trial.number != number and trial.value is not None and told == dataclasses.astuple(setting):
            return trial
    return None
