"""`hvd-compress tune`: the fastest setting for a script, found by short runs of it."""

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
_STARTUP = 60.0  # seconds more, for starting and compiling kernels


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    epilog="""\b
Examples:
  hvd-compress tune -np 2 --max-loss-increase 0.02 train.py --epochs 2
  hvd-compress tune -np 4 -H one:2,two:2 --metric val_accuracy --trials 40 train.py""",
)
@click.option("-np", "ranks", type=click.IntRange(2), required=True, help="Workers, as horovodrun's.")
@click.option("-H", "hosts", help="Hosts and their slots, as horovodrun's.")
@click.option(
    "--launcher", default="horovodrun", show_default=True, help="With other options of its, such as --gloo."
)
@click.option(
    "--trials",
    type=click.IntRange(2),
    default=20,
    show_default=True,
    help="Runs, those in the study included.",
)
@click.option("--metric", help="What must not suffer.  [default: val_loss, else loss]")
@click.option(
    "--mode",
    type=click.Choice(["auto", "min", "max"]),
    default="auto",
    help="Whether less or more of it is better.  [default: by its name]",
)
@click.option(
    "--max-loss-increase",
    "allowed",
    type=click.FloatRange(0),
    default=0.02,
    show_default=True,
    help="By how much it may be worse.",
)
@click.option("--metric-regex", help="Find the metric in the output: the last match's first group.")
@click.option(
    "--time-limit", type=units.SECONDS, help="Of a run.  [default: 1.5 times the first one, and 1 min]"
)
@click.option(
    "--compressor",
    "-c",
    "kinds",
    multiple=True,
    type=click.Choice(search.KINDS),
    help="Try these only; may be repeated.",
)
@click.option(
    "--study",
    type=click.Path(path_type=Path, dir_okay=False),
    help="What is found is kept there.  [default: tune-SCRIPT.log]",
)
@console.json_option
@click.argument("script", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def tune(script: Path, arguments: tuple[str, ...], study: Path | None, kinds: tuple[str, ...], as_json: bool,
         trials: int, **options: Any) -> None:  # fmt: skip
    """Find the fastest compressor, its settings and the bucket size for SCRIPT, by short runs of it.

    The script stays as it is, as long as it leaves `compression` and `bucket_bytes` of
    hvdc.DistributedOptimizer (or DistributedGradientTape) to the environment. Step times come from the optimizer;
    the metric from the last epoch that BroadcastGlobalVariablesCallback or MetricAverageCallback of hvdc.callbacks
    has seen, or from the output (--metric-regex). Make the script short: an epoch or two. Call it again with the same
    study to go on.
    """
    path = study or Path(f"tune-{script.stem}.log")
    chosen = kinds or search.KINDS
    tuner = Tuner(script, arguments, **options)
    with console.usage("--study"):
        found = search.open_study(path, chosen)
        tuner.check(found)
    done = sum(trial.state.is_finished() for trial in found.get_trials(deepcopy=False))
    with console.Steps("tuning", trials) as steps:
        for number in range(trials):
            steps.step()
            if number >= done:
                tuner.next(found, chosen, steps.say)
    rows = [_row(trial) for trial in found.get_trials(deepcopy=False) if trial.state.is_finished()]
    good = [row for row in rows if row["step"] is not None and row["excess"] <= 0.0]
    best = min(good, key=lambda row: row["step"])
    setting = Setting(best["compression"], best["bucket_bytes"])
    baseline = next(
        row for row in good if (row["compression"], row["bucket_bytes"]) == dataclasses.astuple(BASELINE)
    )
    if as_json:
        console.print_json(
            {"baseline": baseline, "best": best, "line": setting.line(), "study": str(path), "trials": rows}
        )
        return
    out = console.output()
    out.print(_table(rows, baseline, best, tuner.metric_name(found)))
    if best is baseline:
        out.print("Nothing that was tried is faster within the loss that is allowed: do not compress.")
    else:
        gain = baseline["step"] / best["step"]
        out.print(f"{gain:.2f} times as fast as without compression. Write into the script:")
    out.print(f"    {setting.line()}", soft_wrap=True)
    out.print(f"The study is {path}: call again with more --trials to go on.")


class Tuner:
    """Runs a script with one setting after the other."""

    def __init__(
        self, script: Path, arguments: tuple[str, ...], ranks: int, hosts: str | None, launcher: str,
        metric: str | None, mode: str, allowed: float, metric_regex: str | None, time_limit: float | None,
    ) -> None:  # fmt: skip
        self._metric, self._mode, self._allowed, self._limit = metric, mode, allowed, time_limit
        start = shlex.split(launcher)
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
        setting = search.propose(trial, kinds)
        try:
            for key, value in dataclasses.asdict(setting).items():
                trial.set_user_attr(key, value)
            known = _same(study, trial.number, setting)
            if known is not None:  # not again
                trial.set_user_attr("excess", known.user_attrs["excess"])
                trial.set_user_attr("metric", known.user_attrs["metric"])
                study.tell(trial, known.value)
                return
            is_baseline = trial.number == 0 or "baseline" not in study.user_attrs
            found = self._run(study, setting, say)
            trial.set_user_attr("seconds", found.seconds)
            if found.status == "late":
                study.tell(trial, state=state.PRUNED)
                if is_baseline:
                    raise click.ClickException("the run without compression took longer than --time-limit")
                return
            self._complain(found, setting)
            if found.status == "failed" and not is_baseline:
                study.tell(trial, state=state.FAIL)
                return
            metric = self._metric_of(found, study)
            if is_baseline:
                study.set_user_attr("baseline", metric)
                study.set_user_attr("limit", _HOPELESS * found.seconds + _STARTUP)
            base = study.user_attrs["baseline"]
            worse = base - metric if self._more_is_better(study) else metric - base
            # What is not finite is not admissible, and no JSON.
            excess = worse - self._allowed if abs(worse) < 1e30 else 1e30
            trial.set_user_attr("excess", 0.0 if is_baseline else max(0.0, excess))
            trial.set_user_attr("metric", metric if abs(metric) < 1e30 else None)
            study.tell(trial, statistics.median(found.usual_steps()))
        except BaseException:  # an interruption, too: the study goes on from here
            if not study.get_trials(deepcopy=False)[trial.number].state.is_finished():
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
            raise click.ClickException("the script fails without compression:\n" + "\n".join(found.tail))
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
                    f"--metric-regex {self._pattern.pattern!r} matches nothing in the output"
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


def _row(trial: Any) -> dict[str, Any]:
    told = trial.user_attrs
    words = {"COMPLETE": "done", "PRUNED": "too slow", "FAIL": "failed"}
    return {
        "compression": told.get("compression"),
        "bucket_bytes": told.get("bucket_bytes"),
        "status": words.get(trial.state.name, trial.state.name),
        "step": trial.value,
        "metric": told.get("metric"),
        "excess": told.get("excess"),
        "seconds": told.get("seconds"),
    }


def _table(rows: list[dict[str, Any]], baseline: dict[str, Any], best: dict[str, Any], metric: str) -> Any:
    shown = []
    unique = {(row["compression"], row["bucket_bytes"]): row for row in reversed(rows)}
    for row in sorted(unique.values(), key=lambda row: row["step"] or 1e30):
        verdict = row["status"]
        if row["step"] is not None:
            verdict = "best" if row == best else "ok" if row["excess"] <= 0 else "loses too much"
        shown.append(
            [
                str(row["compression"]),
                units.show_bytes(row["bucket_bytes"] or 0),
                units.show_seconds(row["step"]) if row["step"] else "",
                f"{baseline['step'] / row['step']:.2f}x" if row["step"] else "",
                f"{row['metric']:.4g}" if row["metric"] is not None else "",
                verdict,
            ]
        )
    return console.table("runs", ["compression", "bucket", "step", "speedup", metric, "verdict"], shown)
