"""`hvd-compress tune`: the fastest setting for a script, found by short runs of it."""

from __future__ import annotations

import dataclasses
import math
import re
import shlex
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from . import console, search, units
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


def _launcher(text: str) -> list[str]:
    words = shlex.split(text)
    if not words:
        raise ValueError("it is empty: leave it out, or name the program, such as horovodrun")
    # The program of this environment comes first, also where the environment is not activated.
    program = shutil.which(words[0], path=str(Path(sys.executable).parent)) or shutil.which(words[0])
    if program is None:
        raise click.ClickException(f"{words[0]} was not found: install Horovod, or name it with --launcher")
    return [program, *words[1:]]


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
    "--launcher", type=units.Parsed("text", _launcher), default="horovodrun", show_default=True,
    help="With other options of its, such as --gloo.",
)  # fmt: skip
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
    "--study", "path", type=console.OUTPUT_FILE, help="What is found is kept there.  [default: tune-SCRIPT.log]"
)
@console.json_option
@click.argument("script", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def tune(script: Path, arguments: tuple[str, ...], ranks: int, hosts: str | None, launcher: list[str], trials: int,
         allowed: float, kinds: tuple[str, ...], path: Path | None, as_json: bool, **options: Any) -> None:  # fmt: skip
    """Find the fastest compressor, its settings and the bucket size for SCRIPT, by short runs of it.

    The script stays as it is, as long as it leaves `compression` and `bucket_bytes` of
    hvdc.DistributedOptimizer (or DistributedGradientTape) to the environment. Step times come from the optimizer;
    the metric from the last epoch that BroadcastGlobalVariablesCallback or MetricAverageCallback of hvdc.callbacks
    has seen, or from the output (--metric-regex). Make the script short: an epoch or two. Call it again with the same
    study to go on.
    """
    # The run ends when this process is ended: the exception passes through `trial.run`.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    on_hosts = ["-H", hosts] if hosts else []
    command = [*launcher, "-np", str(ranks), *on_hosts, sys.executable, str(script), *arguments]
    with console.usage("--study"):
        path = path or console.output_file(f"tune-{script.stem}.log")
        study = search.open_study(path, allowed)
        tuner = Tuner(study, command, kinds or search.KINDS, allowed=allowed, **options)
        tuner.check_study()
    done = len(search.runs(study))
    with console.Steps("tuning", trials) as steps:
        for number in range(trials):
            steps.step()
            is_last = trials >= _FEWEST_RUNS and number >= trials - _LAST_RUNS
            if number >= done and not tuner.run_next(is_last, steps.say):
                break
    tried = search.outcomes(study, allowed)
    best = search.good_outcomes(tried)[0]
    baseline = next(outcome for outcome in tried if outcome.setting == BASELINE)
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
    out.print(_table(tried, baseline, best, tuner.metric_name))
    if best is baseline:
        out.print("Nothing that was tried is faster within the loss that is allowed: do not compress.")
    else:
        gain = baseline.step / best.step
        out.print(f"{gain:.2f} times as fast as without compression. Write into the script:")
    out.print(f"    {best.setting.line()}", soft_wrap=True)
    out.print(f"The study is {path}: call again with more --trials to go on.")


def _json_outcome(outcome: Outcome) -> dict[str, Any]:
    keys = ("status", "step", "metric", "loss_increase", "runs")
    return {**dataclasses.asdict(outcome.setting), **{key: getattr(outcome, key) for key in keys}}


def _table(tried: list[Outcome], baseline: Outcome, best: Outcome, metric: str) -> Table:
    rows = []
    for outcome in tried:
        is_timed = outcome.step < math.inf
        rows.append({
            "compression": outcome.setting.compression,
            "bucket": units.show_bytes(outcome.setting.bucket_bytes),
            "step": units.show_seconds(outcome.step) if is_timed else "",
            "speedup": f"{baseline.step / outcome.step:.2f}x" if is_timed else "",
            "metric": f"{outcome.metric:.4g}" if outcome.metric is not None else "",
            "verdict": "best" if outcome is best else outcome.verdict,
        })  # fmt: skip
    table = console.table("runs", rows)
    table.columns[4].header = metric  # which may be the name of another column
    return table
