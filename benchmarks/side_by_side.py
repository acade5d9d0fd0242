"""Compares the speed of two versions of this package with one benchmark.

    sudo -E python benchmarks/side_by_side.py --against ../before -- \
        python benchmarks/netlab.py --hosts 2 --rate 1gbit -- python benchmarks/exchange.py --rounds 5

Runs the command alternately in this clone and in that of the other version, each with its own copy of the benchmark, so
that changes of the machine's speed affect both. The command must end with a benchmark that takes `--json`: exchange.py
or kernels.py. For each method, the table shows the median over all runs of each version, and their ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import common

CLONE = Path(__file__).resolve().parents[1]


def medians(clone: Path, command: Sequence[str]) -> dict[str, float]:
    """Runs the benchmark in a clone. Returns the median seconds of each method."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        environment = {**os.environ, "PYTHONPATH": str(clone)}
        subprocess.run([*command, "--json", str(file)], cwd=clone, env=environment, stdout=sys.stderr, check=True)
        result = json.loads(file.read_text(encoding="utf-8"))
    methods = result["kernels" if result["benchmark"] == "kernels" else "methods"]
    return {name: summary["median"] for name, summary in methods.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, required=True, metavar="DIR", help="the other version's clone")
    parser.add_argument("--runs", type=int, default=3, help="of each version (default: %(default)s)")
    parser.add_argument("command", nargs="+", help="after --, the benchmark")
    args = parser.parse_args()
    runs = [(medians(CLONE, args.command), medians(args.against.resolve(), args.command)) for _ in range(args.runs)]
    rows = []
    for name in [name for name in runs[0][0] if name in runs[0][1]]:
        new, old = (statistics.median(run[version][name] for run in runs) for version in (0, 1))
        ratios = sorted(run[0][name] / run[1][name] for run in runs)
        spread = f"{ratios[0]:.3f} to {ratios[-1]:.3f}"
        rows.append([name, f"{new * 1e3:.1f}", f"{old * 1e3:.1f}", f"{new / old:.3f}", spread])
    common.print_table(
        f"this version against {args.against}, {args.runs} runs of each",
        ["method", "this, ms", "other, ms", "this / other", "ratio in a run, lowest to highest"],
        rows,
    )


if __name__ == "__main__":
    main()
