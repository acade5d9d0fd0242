"""Writes the tables of docs/results.md that compare `auto` with the fixed compressors that train.py ran beside it.

    python benchmarks/auto_results.py docs/results/auto_*.json --page docs/results.md

Quotients are those of medians over the seeds, beside `none` over those that were measured with both.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import page_tables
from train_results import Result, median, methods_of, training_of

from hvd_compress.common.units import parse_rate


def cell(value: float | None, form: str) -> str:
    """A number, or a dash for what was not reached."""
    return "-" if value is None else format(value, form)


def summary(results: list[Result]) -> str:
    """One line for each training: the medians over the seeds of `auto` and of the fastest fixed compressor."""
    rows = []
    for result in results:
        methods = methods_of(result)
        seconds = {name: median(runs, "seconds") for name, runs in methods.items()}
        of_auto = seconds.pop("auto")
        best, fastest = min(seconds.items(), key=lambda item: item[1])
        chosen = "; ".join(dict.fromkeys(run["chosen"] for run in methods["auto"]))
        plain = methods.get("none", [])
        both = [run for run in methods["auto"] if run["seed"] in {other["seed"] for other in plain}]
        beside_none = median(both, "seconds") / seconds["none"] if plain else None
        times = [f"{of_auto:.1f}", f"{fastest:.1f}", f"{of_auto / fastest:.2f}", cell(beside_none, ".2f")]
        rows.append([training_of(result), chosen, best, *times])
    columns = ["training", "`auto` took", "fastest fixed", "seconds of `auto`", "of the fastest fixed"]
    columns += ["`auto` / fastest fixed", "`auto` / `none`"]
    return page_tables.markdown(columns, rows, words=3)


def seeds(results: list[Result]) -> str:
    """One line for each training and method, with a number for each run."""
    digits = {"seconds": ".1f", "steps": "d", "step_ms": ".0f", "first_step": ".1f", "metric": ".2f"}
    rows = [
        [training_of(result), name, *(" ".join(cell(run[key], form) for run in runs) for key, form in digits.items())]
        for result in results
        for name, runs in methods_of(result).items()
    ]
    columns = ["training", "method", "seconds to the target", "steps to the target", "ms per step", "first step, s"]
    return page_tables.markdown([*columns, "metric after equal steps"], rows, words=2)


def tables(results: list[Result]) -> dict[str, str]:
    """Both tables by their names; slow links come first."""
    ordered = sorted(results, key=lambda result: (result["task"], parse_rate(result["rate"])))
    return {"auto": summary(ordered), "auto and fixed": seeds(ordered)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path, help="JSON files of train.py, with `auto` in each")
    parser.add_argument("--page", type=Path, help="the page whose tables are replaced")
    args = parser.parse_args()
    page_tables.show(tables([json.loads(path.read_text(encoding="utf-8")) for path in args.results]), args.page)


if __name__ == "__main__":
    main()
