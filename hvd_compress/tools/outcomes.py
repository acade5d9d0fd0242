"""What `tune` knows of the settings that it has tried: means over the runs of each."""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import Any

from .search import BASELINE, Setting

ALIKE = 1.1  # steps that differ by less may be equally fast
Row = dict[str, Any]  # a run: what was tried, and what came of it
_STATUS = {"COMPLETE": "done", "PRUNED": "too slow", "FAIL": "failed"}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A setting that was tried.

    Attributes:
        setting: What was tried.
        numbers: Optuna's parameters, if it was Optuna that proposed it.
        status: "done", "too slow" or "failed", of the first run.
        step: Seconds; None if it made too few steps.
        metric: Of the last epoch; None if no run was finished.
        loss_increase: By how much the metric is worse than without compression.
        runs: How many.
    """

    setting: Setting
    numbers: dict[str, Any]
    status: str
    step: float | None
    metric: float | None
    loss_increase: float | None
    runs: int

    def is_good(self, allowed: float) -> bool:
        """Whether it loses no more than is allowed; no compression is good, however noisy the metric is."""
        worse = self.loss_increase
        return self.setting == BASELINE or (worse is not None and worse <= allowed)


def rows(study: Any) -> list[Row]:
    """The runs that came to an end."""
    return [_row(trial) for trial in _ended(study)]


def outcomes(study: Any) -> list[Outcome]:
    """The settings, the fastest first."""
    runs: dict[Setting, list[Any]] = {}
    for trial in _ended(study):
        told = trial.user_attrs
        runs.setdefault(Setting(told["compression"], told["bucket_bytes"]), []).append(trial)
    found = []
    for setting, trials in runs.items():
        step, metric, worse = (_mean(trials, key) for key in ("step", "metric", "loss_increase"))
        status = _STATUS[trials[0].state.name]
        found.append(Outcome(setting, trials[0].params, status, step, metric, worse, len(trials)))
    return sorted(found, key=lambda outcome: math.inf if outcome.step is None else outcome.step)


def unsure(found: list[Outcome], allowed: float) -> Setting | None:
    """The fastest good setting, or its closest rival, if noise may decide between them and it was run only once."""
    good = [outcome for outcome in found if outcome.is_good(allowed)][:2]
    fastest = good[0].step or 0.0
    once = [each.setting for each in good if each.runs == 1 and (each.step or 0.0) <= ALIKE * fastest]
    return once[0] if once else None


def _ended(study: Any) -> list[Any]:
    found = study.get_trials(deepcopy=False)
    return [trial for trial in found if trial.state.is_finished() and "void" not in trial.user_attrs]


def _row(trial: Any) -> Row:
    keys = ("compression", "bucket_bytes", "step", "metric", "loss_increase", "seconds")
    return {**{key: trial.user_attrs.get(key) for key in keys}, "status": _STATUS[trial.state.name]}


def _mean(trials: list[Any], key: str) -> float | None:
    known = [trial.user_attrs[key] for trial in trials if trial.user_attrs.get(key) is not None]
    return statistics.mean(known) if known else None
