"""`hvd-compress doctor`: what is wrong with a run, and what to change."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import click
import numpy as np

from ..common.text_table import aligned
from . import console, env_doctor, rules, run_log, savings
from .figures import ENOUGH
from .run_log import Run


class Finding(NamedTuple):
    """A rule that holds for a run: its name, what shows it, and what to change."""

    problem: str
    figures: str
    advice: str


def examine(run: Run) -> list[Finding]:
    """What is wrong with a run, in the order of the rules."""
    checked = ((rule, rule.check(run)) for rule in rules.RULES)
    return [Finding(rule.name, figures, rule.advice) for rule, figures in checked if figures]


def is_short(run: Run) -> bool:
    """Whether there are too few steps for most rules."""
    return run.num_steps < ENOUGH


def summary(run: Run) -> str:
    """One line about a run."""
    compression = run.settings.get("compression", "unknown compression")
    first = run.meta.get("first_step_seconds")
    compiled = "" if first is None else f", the first in {first:.1f} s"
    ranks = f"{run.meta['ranks']} ranks ({len(run.ranks)} wrote)"
    return f"{run.path}: {compression}, {ranks}, {run.num_steps} steps{compiled}"


def _without_unknown(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields for JSON: None in place of a number that is not finite, as of an empty cell of a damaged file."""
    return {name: None if isinstance(x, float) and not math.isfinite(x) else x for name, x in fields.items()}


@click.command(epilog="Examples: hvd-compress doctor logs/run-1; horovodrun -np 2 hvd-compress doctor --env")
@click.argument("run_dir", required=False)
@click.option("--env", is_flag=True, help="Look at hosts, network and versions before the first job, at no run.")
@click.option("--hosts", metavar="HOST,HOST", default="", help="With --env: try ssh to these, and compare clocks.")
@console.json_option
@np.errstate(all="ignore")  # numbers near the largest that there are
def doctor(run_dir: str | None, env: bool, hosts: str, as_json: bool) -> None:
    """Say what compression has saved in a run, what is wrong with it, and what to change.

    RUN_DIR is the log_dir of hvdc.callbacks.CompressionMonitor or hvdc.profile. The exit status is 0 if nothing
    was found, 1 if something was, and 2 if there is no run to read.
    """
    if env:
        raise SystemExit(env_doctor.main([f"--hosts={hosts}", *(["--json"] if as_json else [])]))
    if run_dir is None:
        raise click.UsageError("name the RUN_DIR of a run, or give --env")
    run = run_log.load(run_dir)
    findings = examine(run)
    if as_json:
        console.print_json({
            "run": run.path,
            "ranks": run.meta["ranks"],
            "steps": run.num_steps,
            "healthy": not findings,
            "too_short": is_short(run),
            "saved": savings.sentences(run),
            "auto": [_without_unknown(one._asdict()) for one in savings.of_auto(run)],
            "findings": [finding._asdict() for finding in findings],
        })  # fmt: skip
    else:
        out = console.output()
        out.print(summary(run), markup=False)
        for line in savings.sentences(run):
            out.print(line, markup=False, soft_wrap=True)
        for line in aligned(savings.table(run)):
            out.print(f"    {line}", markup=False)
        for finding in findings:
            out.print(f"\n[bold]{finding.problem}[/bold]")
            out.print(f"  what:   {finding.figures}", markup=False, soft_wrap=True)
            out.print(f"  advice: {finding.advice}", markup=False, soft_wrap=True)
        if is_short(run):
            out.print(f"\nonly {run.num_steps} steps: most rules need {ENOUGH} to judge by, let it run for longer")
        elif not findings:
            out.print(f"healthy: none of {len(rules.RULES)} rules found anything", markup=False)
    if findings:
        raise SystemExit(1)
