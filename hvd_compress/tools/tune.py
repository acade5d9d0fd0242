"""`hvd-compress tune`: the setting with which a script trains the fastest, found by short runs of it."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import signal
import statistics
import sys
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from ..monitor.tune_protocol import EACH_STEP
from . import console, launch, plots, search, units
from .search import BASELINE, Outcome
from .tuner import Tuner

# With at least so many runs, the last ones repeat the best setting and its rival.
_FEWEST_RUNS, _LAST_RUNS = 10, 4


def _pattern(text: str) -> re.Pattern[str]:
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise ValueError(f"{text!r} is no regular expression: {error}") from None
    if not pattern.groups:
        raise ValueError(f"{text!r} has no group: put the number into (parentheses)")
    return pattern


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    epilog="""\b
Examples:
  hvd-compress tune -np 2 --max-loss-increase 0.02 train.py --epochs 2
  hvd-compress tune -np 4 -H one:2,two:2 --metric val_accuracy --trials 40 train.py""",
)
@click.option("-np", "ranks", type=click.IntRange(2), required=True, help="Workers, as horovodrun's.")
@launch.hosts
@launch.launcher
@click.option(
    "--trials", type=click.IntRange(2), default=20, show_default=True, help="Runs, those in the study included."
)
@click.option("--metric", help="What must not suffer.  [default: val_loss, else loss]")
@click.option(
    "--mode", type=click.Choice(["auto", "min", "max"]), default="auto",
    help="Whether less or more of it is better.  [default: by its name]",
)  # fmt: skip
@click.option(
    "--max-loss-increase", "allowed", type=click.FloatRange(0), default=0.02, show_default=True,
    help="By how much it may be worse.",
)  # fmt: skip
@click.option(
    "--metric-regex", "pattern", type=units.Parsed("text", _pattern),
    help="Find the metric in the output: the last match's first group.",
)  # fmt: skip
@click.option("--time-limit", type=units.DURATION, help="Of a run.  [default: 1.5 times the first one, and 1 min]")
@click.option(
    "--compressor", "-c", "kinds", multiple=True, type=click.Choice(search.KINDS),
    help="Try these only; may be repeated.",
)  # fmt: skip
@click.option(
    "--local-steps", type=units.LOCAL_STEPS, default=(), metavar="N,N",
    help="Also try exchanges once in so many steps, such as 8,30.",
)  # fmt: skip
@click.option("--delay", is_flag=True, help="Also try delay=1: exchanges beside the next step.")
@click.option(
    "--study", "path", type=console.OUTPUT_FILE, help="What is found is kept there.  [default: tune-SCRIPT.log]"
)
@click.option("--plot", type=plots.PLOT_FILE, help="Draw what was tried: its time and the metric.")
@console.json_option
@click.argument("script", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def tune(script: Path, arguments: tuple[str, ...], ranks: int, hosts: str | None, launcher: list[str], trials: int,
         allowed: float, kinds: tuple[str, ...], local_steps: tuple[int, ...], delay: bool, path: Path | None,
         plot: Path | None, as_json: bool, **options: Any,
) -> None:  # fmt: skip
    """Find the compressor, its settings and the bucket size with which SCRIPT trains the fastest, by short runs of it.

    The script stays as it is, as long as it leaves `compression`, `bucket_bytes`, `delay` and `local_steps` of
    hvdc.DistributedOptimizer (or DistributedGradientTape) to the environment. Step times come from the optimizer;
    the metric from the last epoch that BroadcastGlobalVariablesCallback or MetricAverageCallback of hvdc.callbacks
    has seen, or from the output (--metric-regex). Make the script short: an epoch or two. Call it again with the same
    study to go on.
    """
    # The run ends when this process is ended: the exception passes through `trial.run`.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    exchanges = [
        EACH_STEP,
        *(["delay=1"] if delay else []),
        *(f"local_steps={count}" for count in sorted(set(local_steps))),
    ]
    command = [*launch.command(launcher, ranks, hosts), sys.executable, str(script), *arguments]
    with console.usage("--study"):
        path = path or console.output_file(f"tune-{script.stem}.log")
        study = search.open_study(path, allowed)
        tuner = Tuner(study, command, kinds or search.KINDS, tuple(exchanges), allowed=allowed, **options)
        tuner.check_study()
    done = len(search.runs(study))
    with console.Steps("tuning", trials) as steps:
        for number in range(trials):
            steps.step()
            outlook = _outlook(study, allowed, trials - number)
            is_last = trials >= _FEWEST_RUNS and number >= trials - _LAST_RUNS
            if number >= done and not tuner.run_next(is_last, functools.partial(_say, steps, outlook)):
                break
    tried = search.outcomes(study, allowed)
    best = search.good_outcomes(tried)[0]
    baseline = next(outcome for outcome in tried if outcome.setting == BASELINE)
    if plot is not None:
        plots.tune(plot, tried, best, tuner.metric_name)
    if as_json:
        console.print_json({
            "baseline": _json_outcome(baseline),
            "best": _json_outcome(best),
            "line": best.setting.line(),
            "study": str(path),
            "trials": [search.row(trial) for trial in search.runs(study)],
        })  # fmt: skip
        return
    out = console.output()
    out.print(_table(tried, baseline, best, tuner))
    if best is baseline:
        out.print("Nothing that was tried is faster within the loss that is allowed: do not compress.")
    else:
        gain = baseline.cost / best.cost
        out.print(
            f"A step takes {units.show_seconds(best.step)} in place of {units.show_seconds(baseline.step)}, and is "
            f"expected to make {best.setting.progress:.0%} of the progress. So training is about {gain:.2f} times as "
            "fast as without compression.",
            soft_wrap=True,
        )
        out.print("Write into the script:")
    out.print(f"    {best.setting.line()}", soft_wrap=True)
    out.print(f"The study is {path}: call again with more --trials to go on.")
    if plot is not None:
        out.print(f"plot: {plot}")


def _say(steps: console.Steps, outlook: str, text: str) -> None:
    steps.say(f"{text}{outlook}")


def _outlook(study: Any, allowed: float, left: int) -> str:
    """How long the remaining runs take if they are like those so far, and the best setting so far; "" before these."""
    runs = search.runs(study)
    if not runs:
        return ""
    seconds = left * statistics.mean(run.user_attrs["seconds"] for run in runs)
    about = f"{seconds / 60:.0f} min" if seconds > 90 else f"{seconds:.0f} s"
    tried = search.outcomes(study, allowed)
    best, baseline = search.good_outcomes(tried)[0], next(one for one in tried if one.setting == BASELINE)
    return f"; about {about} left; best so far {best.setting.title}, {baseline.cost / best.cost:.2f}x"


def _json_outcome(outcome: Outcome) -> dict[str, Any]:
    keys = ("status", "step", "metric", "loss_increase", "runs")
    return {
        **dataclasses.asdict(outcome.setting),
        "progress": outcome.setting.progress,
        "per_progress": outcome.cost,
        **{key: getattr(outcome, key) for key in keys},
    }


def _table(tried: list[Outcome], baseline: Outcome, best: Outcome, tuner: Tuner) -> Table:
    rows = []
    for outcome in tried:
        is_timed = outcome.step < math.inf
        rows.append({
            "compression": outcome.setting.compression,
            **({"exchange": outcome.setting.exchange} if len(tuner.exchanges) > 1 else {}),
            "bucket": units.show_bytes(outcome.setting.bucket_bytes),
            "step": units.show_seconds(outcome.step) if is_timed else "",
            "speedup": f"{baseline.step / outcome.step:.2f}x" if is_timed else "",
            "progress": f"{outcome.setting.progress:.0%}",
            "training": f"{baseline.cost / outcome.cost:.2f}x" if is_timed else "",
            "metric": f"{outcome.metric:.4g}" if outcome.metric is not None else "",
            "verdict": "best" if outcome is best else outcome.verdict,
        })  # fmt: skip
    table = console.table("runs", rows)
    table.columns[-2].header = tuner.metric_name  # which may be the name of another column
    return table
