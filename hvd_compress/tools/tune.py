"""`hvd-compress tune`: the fastest setting for a script, found by short runs of it."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
from pathlib import Path
from typing import Any

import click

from . import console, search, units
from .outcomes import Outcome, outcomes, rows, unsure
from .search import BASELINE
from .tuner import Tuner

# In the last runs, if there are so many, the best and its rival are run again.
_LAST, _CHECKED = 4, 10
_SHOWN = ("status", "step", "metric", "loss_increase", "runs")


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
    "--time-limit", type=units.DURATION, help="Of a run.  [default: 1.5 times the first one, and 1 min]"
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
    type=click.Path(path_type=Path),
    callback=console.output_file,
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
    # So that what runs is ended, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    path = study or Path(f"tune-{script.stem}.log")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise click.UsageError(f"{path} cannot be written here: name another file with --study.")
    chosen = kinds or search.KINDS
    tuner = Tuner(script, arguments, **options)
    with console.usage("--study"):
        found = search.open_study(path)
        tuner.check(found)
    done = len(rows(found))
    with console.Steps("tuning", trials) as steps:
        for number in range(trials):
            steps.step()
            if number < done:
                continue
            last = trials >= _CHECKED and number >= trials - _LAST and not search.is_opening(found)
            again = unsure(outcomes(found), tuner.allowed) if last else None
            if again is not None:
                tuner.attempt(found, found.ask(), again, steps.say)
            elif not tuner.next(found, chosen, steps.say):
                break
    tried = outcomes(found)
    best = next(outcome for outcome in tried if outcome.is_good(tuner.allowed))
    baseline = next(outcome for outcome in tried if outcome.setting == BASELINE)
    if as_json:
        console.print_json(
            {
                "baseline": _shown(baseline),
                "best": _shown(best),
                "line": best.setting.line(),
                "study": str(path),
                "trials": rows(found),
            }
        )
        return
    out = console.output()
    out.print(_table(tried, baseline, best, tuner.allowed, tuner.metric_name(found)))
    if best is baseline:
        out.print("Nothing that was tried is faster within the loss that is allowed: do not compress.")
    else:
        gain = (baseline.step or 0.0) / (best.step or 1.0)
        out.print(f"{gain:.2f} times as fast as without compression. Write into the script:")
    out.print(f"    {best.setting.line()}", soft_wrap=True)
    out.print(f"The study is {path}: call again with more --trials to go on.")


def _shown(outcome: Outcome) -> dict[str, Any]:
    return {**dataclasses.asdict(outcome.setting), **{k: getattr(outcome, k) for k in _SHOWN}}


def _table(tried: list[Outcome], baseline: Outcome, best: Outcome, allowed: float, metric: str) -> Any:
    error_text = []
    for each in tried:
        verdict = each.status
        if each.loss_increase is not None:
            verdict = "best" if each is best else "ok" if each.is_good(allowed) else "loses too much"
        speedup = baseline.step / each.step if each.step and baseline.step else None
        error_text.append(
            [
                each.setting.compression,
                units.show_bytes(each.setting.bucket_bytes),
                units.show_seconds(each.step) if each.step else "",
                f"{speedup:.2f}x" if speedup else "",
                f"{each.metric:.4g}" if each.metric is not None else "",
                verdict,
            ]
        )
    return console.table("runs", ["compression", "bucket", "step", "speedup", metric, "verdict"], error_text)
