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
from .search import BASELINE, Setting
from .tuner import Tuner

Row = dict[str, Any]  # a run: what was tried, and what came of it


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
    done = len(_rows(found))
    with console.Steps("tuning", trials) as steps:
        for number in range(trials):
            steps.step()
            if number >= done:
                tuner.next(found, chosen, steps.say)
    rows = _rows(found)
    good = [row for row in rows if row["step"] is not None and row["loss_increase"] <= tuner.allowed]
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
    out.print(_table(rows, baseline, best, good, tuner.metric_name(found)))
    if best is baseline:
        out.print("Nothing that was tried is faster within the loss that is allowed: do not compress.")
    else:
        gain = baseline["step"] / best["step"]
        out.print(f"{gain:.2f} times as fast as without compression. Write into the script:")
    out.print(f"    {setting.line()}", soft_wrap=True)
    out.print(f"The study is {path}: call again with more --trials to go on.")


def _rows(study: Any) -> list[Row]:
    """The trials that came to an end."""
    found = study.get_trials(deepcopy=False)
    return [_row(trial) for trial in found if trial.state.is_finished() and "void" not in trial.user_attrs]


def _row(trial: Any) -> Row:
    told = trial.user_attrs
    words = {"COMPLETE": "done", "PRUNED": "too slow", "FAIL": "failed"}
    return {
        "compression": told.get("compression"),
        "bucket_bytes": told.get("bucket_bytes"),
        "status": words.get(trial.state.name, trial.state.name),
        "step": told.get("step"),
        "metric": told.get("metric"),
        "loss_increase": told.get("loss_increase"),
        "seconds": told.get("seconds"),
    }


def _table(rows: list[Row], baseline: Row, best: Row, good: list[Row], metric: str) -> Any:
    shown = []
    unique = {(row["compression"], row["bucket_bytes"]): row for row in reversed(rows)}
    for row in sorted(unique.values(), key=lambda row: row["step"] or 1e30):
        verdict = row["status"]
        if row["step"] is not None:
            verdict = "best" if row == best else "ok" if row in good else "loses too much"
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
