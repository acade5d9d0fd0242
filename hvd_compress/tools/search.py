"""The search of `tune`: the settings, the Optuna study that keeps their runs, and what to try next."""

from __future__ import annotations

import dataclasses
import math
import statistics
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..auto.usual_progress import OF_DELAY, of_round
from ..engine.layout import BUCKET_BYTES
from ..formats.registry import FORMATS
from ..monitor.tune_protocol import EACH_STEP
from .prediction import expected_progress, noise_lost, per_progress

KINDS = tuple(name for name in FORMATS.classes if name != "dgc")
BUCKETS = tuple(2**20 * mebibytes for mebibytes in (1, 4, 10, 25, 50))
# The values of each argument of a compressor. The first one sends the least.
VALUES: dict[str, tuple[float, ...]] = {
    # 0.001 to 0.3, in steps of 20%
    "ratio": tuple(float(f"{0.001 * 300 ** (i / 32):.2g}") for i in range(33)),
    "bits": (2, 3, 4, 5, 6, 8),
    "block": (4, 8, 16, 32),
    "rank": (1, 2, 4, 8),
}
ARGUMENTS = {kind: [f.name for f in dataclasses.fields(FORMATS.classes[kind]) if f.name in VALUES] for kind in KINDS}
# The opening: what is tried first, strong and mild settings of each idea.
_OPENING = (
    "none", "int8", "hybrid:ratio=0.01,bits=4", "int4", "int2", "quantize:bits=3", "hybrid:ratio=0.05,bits=4", "onebit",
    "powersgd:rank=4", "block_topk:ratio=0.01", "fp16",
)  # fmt: skip
# Tried with each way of exchanging less often, or later, if these are asked for.
_OPENING_OF_OTHERS = ("int8", "int4")
# While a gap in the first argument of a compressor is halved, a second argument has this value.
_SECOND_ARGUMENT = {"bits": 4, "block": 16}
_SIMILAR = 1.1  # Settings whose costs differ by less may be equally fast.
_WORTHWHILE = 0.85  # A gap is worth a run if its cost may be at most this share of the best one.
_STATUS = {"COMPLETE": "done", "PRUNED": "too slow", "FAIL": "failed"}
_SEED = 0


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a run tries: a spec string, the bucket size as in `hvdc.DistributedOptimizer`, and when to exchange."""

    compression: str
    bucket_bytes: int
    exchange: str = EACH_STEP

    @property
    def title(self) -> str:
        """The compressor, and when it exchanges if not in each step."""
        return self.compression if self.exchange == EACH_STEP else f"{self.compression}, {self.exchange}"

    @property
    def progress(self) -> float:
        """The progress that a step is expected to make, relative to an uncompressed one with an exchange."""
        name, _, count = self.exchange.partition("=")
        share = {EACH_STEP: 1.0, "delay": OF_DELAY}.get(name) or of_round(int(count))
        return share * expected_progress(FORMATS.parse(self.compression))

    def cost(self, step: float) -> float:
        """Seconds for the progress of an uncompressed step, as in `plan`, of steps that take `step` seconds."""
        return per_progress(step, self.progress, noise_lost(FORMATS.parse(self.compression)))

    def line(self) -> str:
        """The line that gives a script this setting for good."""
        size = "" if self.bucket_bytes == BUCKET_BYTES else f", bucket_bytes={self.bucket_bytes}"
        exchange = "" if self.exchange == EACH_STEP else f", {self.exchange}"
        return f'hvdc.DistributedOptimizer(optimizer, compression="{self.compression}"{size}{exchange})'


BASELINE = Setting("none", BUCKET_BYTES)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The runs of one setting."""

    setting: Setting
    parameters: dict[str, Any]  # of the setting in the study
    status: str  # "done", "too slow" or "failed": how the first run ended
    step: float  # mean seconds of a step; infinity if no run made enough steps
    metric: float | None  # its mean in the last epoch; None if no run was completed
    loss_increase: float | None  # by how much the metric is worse than without compression, as a mean; None likewise
    allowed: float  # by how much it may be worse
    runs: int  # their number

    @property
    def cost(self) -> float:
        """Seconds for the progress of an uncompressed step; infinity if no run made enough steps."""
        return self.setting.cost(self.step) if self.step < math.inf else math.inf

    @property
    def verdict(self) -> str:
        """Says "ok", "loses too much", or the status without a metric. The baseline is ok, however noisy it is."""
        if self.loss_increase is None:
            return self.status
        return "ok" if self.setting == BASELINE or self.loss_increase <= self.allowed else "loses too much"


def open_study(path: Path, allowed: float) -> Any:
    """Opens the Optuna study in a file, or creates it; the metric may be worse by `allowed`.

    Raises:
        ValueError: The file is something else.
    """
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            # The last options are experimental in Optuna 4, and `constraints_func` is deprecated in 5.
            warnings.simplefilter("ignore")
            sampler = optuna.samplers.TPESampler(
                seed=_SEED, multivariate=True, group=True,
                n_startup_trials=0,  # The opening takes the place of random trials.
                constraints_func=lambda trial: (trial.user_attrs.get("loss_increase", 0.0) - allowed,),
            )  # fmt: skip
        storage = JournalStorage(JournalFileBackend(str(path)))
        return optuna.create_study(storage=storage, sampler=sampler, study_name="hvd_compress", load_if_exists=True)
    except (KeyError, UnicodeDecodeError, ValueError):
        raise ValueError(f"{path} is no study of `hvd-compress tune`: name another file") from None


def runs(study: Any) -> list[Any]:
    """The trials that count. The others were interrupted, or repeated a known setting and were not run."""
    trials = study.get_trials(deepcopy=False)
    return [trial for trial in trials if trial.state.is_finished() and "seconds" in trial.user_attrs]


def row(trial: Any) -> dict[str, Any]:
    """What users see of a run."""
    facts, keys = trial.user_attrs, ("metric", "loss_increase", "seconds")
    setting, step = _setting_of(trial), facts.get("step")
    return {
        **dataclasses.asdict(setting),
        "step": step,
        "progress": setting.progress,
        "per_progress": None if step is None else setting.cost(step),
        **{key: facts.get(key) for key in keys},
        "status": _STATUS[trial.state.name],
    }


def _setting_of(trial: Any) -> Setting:
    return Setting(*(trial.user_attrs[field.name] for field in dataclasses.fields(Setting)))


def outcomes(study: Any, allowed: float) -> list[Outcome]:
    """The outcomes of all settings, those with the lowest cost first.

    `study.best_trial` would not do: it knows neither means of runs nor another `allowed` than that of earlier calls.
    """
    trials_of: dict[Setting, list[Any]] = {}
    for trial in runs(study):
        trials_of.setdefault(_setting_of(trial), []).append(trial)
    tried = []
    for setting, trials in trials_of.items():
        step, metric, loss_increase = (_mean(trials, key) for key in ("step", "metric", "loss_increase"))
        step, status = math.inf if step is None else step, _STATUS[trials[0].state.name]
        tried.append(Outcome(setting, trials[0].params, status, step, metric, loss_increase, allowed, len(trials)))
    return sorted(tried, key=lambda outcome: outcome.cost)


def _mean(trials: list[Any], key: str) -> float | None:
    values = [trial.user_attrs[key] for trial in trials if trial.user_attrs.get(key) is not None]
    return statistics.mean(values) if values else None


def good_outcomes(tried: Sequence[Outcome]) -> list[Outcome]:
    """The outcomes that do not lose too much, the best first. The baseline is one of them."""
    return [outcome for outcome in tried if outcome.verdict == "ok"]


def suggest(trial: Any, kinds: Sequence[str], exchanges: Sequence[str]) -> Setting:
    """The setting of an Optuna trial: its queued parameters, or what the sampler suggests."""
    kind = trial.suggest_categorical("compressor", list(dict.fromkeys(["none", *kinds])))
    arguments = {}
    for name in ARGUMENTS[kind]:
        values = VALUES[name]
        if name == "ratio":
            arguments[name] = float(f"{trial.suggest_float(name, values[0], values[-1], log=True):.2g}")
        else:
            arguments[name] = trial.suggest_categorical(name, values)
    bucket_bytes = trial.suggest_categorical("bucket_bytes", BUCKETS)
    exchange = trial.suggest_categorical("exchange", list(exchanges))
    if exchange.startswith("delay") and FORMATS.classes[kind].model_wide:  # `engine.settings` refuses it
        exchange = EACH_STEP
    return Setting(FORMATS.classes[kind](**arguments).spec, bucket_bytes, exchange)


def next_parameters(
    tried: Sequence[Outcome], kinds: Sequence[str], exchanges: Sequence[str], may_repeat: bool
) -> dict[str, Any] | None:
    """The parameters to try next; None if Optuna's sampler should suggest them.

    `tried` are the outcomes so far, those with the lowest cost first. With `may_repeat`, a setting may be run again.
    """
    known = [outcome.parameters for outcome in tried]
    opening = [(spec, exchange) for exchange in exchanges[1:] for spec in _OPENING_OF_OTHERS]
    for spec, exchange in [*((spec, EACH_STEP) for spec in _OPENING), *opening]:
        format = FORMATS.parse(spec)
        arguments = {name: getattr(format, name) for name in ARGUMENTS[format.name]}
        parameters = {"compressor": format.name, **arguments, "bucket_bytes": BUCKET_BYTES, "exchange": exchange}
        if format.name in ("none", *kinds) and parameters not in known:
            return parameters
    return (uncertain(tried) if may_repeat else None) or halve_gap(tried, kinds)


def uncertain(tried: Sequence[Outcome]) -> dict[str, Any] | None:
    """The parameters of the best setting or its closest rival, if it has one run and noise may decide between them."""
    good = good_outcomes(tried)[:2]
    for outcome in good:
        if outcome.runs == 1 and outcome.cost <= _SIMILAR * good[0].cost:
            return outcome.parameters
    return None


def halve_gap(tried: Sequence[Outcome], kinds: Sequence[str]) -> dict[str, Any] | None:
    """Parameters in the most promising gap between settings of a family; None if no gap is worth a run.

    A family is a compressor with one argument left open. What sends less takes less time and loses more. So the best
    setting of a family is beside its best one so far, and above all that lose too much. Optuna's samplers do not know
    this: with one of the four loss limits of the tests, the best of TPE's 17 runs took twice as long as possible.
    """
    least = good_outcomes(tried)[0].cost
    gaps = []
    for kind in kinds:
        if not ARGUMENTS[kind]:
            continue
        argument, *others = ARGUMENTS[kind]
        second = {name: _SECOND_ARGUMENT[name] for name in others}
        family = {"compressor": kind, **second, "bucket_bytes": BUCKET_BYTES, "exchange": EACH_STEP}
        of_family = [outcome for outcome in tried if family.items() <= outcome.parameters.items()]
        known = {outcome.parameters[argument]: outcome for outcome in of_family}
        timed = {value: outcome for value, outcome in known.items() if outcome.step < math.inf}
        for low, high in _gaps_beside_best(timed):
            inside = [value for value in VALUES[argument] if low < value < high]
            if not inside:
                continue
            middle = inside[0 if low == -math.inf else -1 if high == math.inf else len(inside) // 2]
            if low in timed:  # The step takes at least as long as with `low`.
                at_least = timed[low].step / expected_progress(FORMATS.classes[kind](**{**second, argument: middle}))
                is_promising = at_least < _WORTHWHILE * least
            else:  # A stronger one may be better if the family is among the best.
                at_least, is_promising = 0.0, timed[high].cost <= _SIMILAR * least
            if is_promising and middle not in known:
                gaps.append((at_least, {**family, argument: middle}))
    return min(gaps, key=lambda gap: gap[0])[1] if gaps else None


def _gaps_beside_best(known: Mapping[float, Outcome]) -> list[tuple[float, float]]:
    """The gaps of a family beside the best value of those above all that lose too much. Ends may be infinite."""
    low = max((value for value in known if known[value].verdict == "loses too much"), default=-math.inf)
    usable = sorted(value for value in known if value > low)
    if not usable:
        return [(low, math.inf)] if known else []
    best = usable.index(min(usable, key=lambda value: known[value].cost))
    ends = [low, *usable, math.inf]
    return list(zip(ends[best : best + 2], ends[best + 1 : best + 3]))


def is_maximized(metric: str) -> bool:
    """Whether more of a metric is better: Keras' callbacks guess the same from its name."""
    return "acc" in metric or metric.endswith("auc") or "fmeasure" in metric
