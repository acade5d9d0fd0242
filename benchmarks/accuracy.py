"""Does compression reduce accuracy? Trains an example several times with each compressor and compares.

    python benchmarks/accuracy.py --specs none int8 int4 hybrid:ratio=0.01,bits=4 --seeds 0 1 2 3 4

Each training is a run of examples/keras_mnist.py under horovodrun, on scikit-learn's handwritten digits. All trainings
have the same number of steps. Times are not compared, because the workers share one machine.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
SPECS = ["none", "hybrid:ratio=0.01,bits=4", "int8", "int4"]
FIELDS = {
    "accuracy": r"test accuracy: +([\d.]+)%",
    "steps": r"steps: +(\d+) in",
    "seconds": r"steps: +\d+ in ([\d.]+) s",
    "sent": r"sent per step: +([\d,]+) bytes",
    "uncompressed": r"stock Horovod: +([\d,]+) bytes",
}


def train(spec: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """Runs one training and returns what it reported, with the accuracy in percent."""
    command = [str(BIN / "horovodrun"), "--gloo", "-np", str(args.workers), sys.executable]
    command += ["examples/keras_mnist.py", "--data", "digits", "--compression", spec, "--seed", str(seed)]
    command += ["--epochs", str(args.epochs), "--batch-size", str(args.batch_size), "--lr", str(args.lr)]
    command += ["--optimizer", args.optimizer]
    command += ["--freeze-step", str(args.freeze_step)] if args.freeze_step else []
    environment = {
        "TF_CPP_MIN_LOG_LEVEL": "2",
        **os.environ,
        "PATH": os.pathsep.join([str(BIN), os.environ.get("PATH", "")]),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
    }
    result = subprocess.run(
        ["timeout", "-k", "20", str(args.timeout), *command],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        errors="replace",
    )
    matches = {name: re.search(pattern, result.stdout) for name, pattern in FIELDS.items()}
    if result.returncode or None in matches.values():
        raise SystemExit(f"{spec}, seed {seed}: ended with status {result.returncode}\n{result.stderr[-5000:]}")
    numbers = {name: float(match.group(1).replace(",", "")) for name, match in matches.items() if match}
    return {"spec": spec, "seed": seed, **numbers}


def table(runs: list[dict[str, Any]], specs: list[str]) -> str:
    """A table of mean, spread and difference from the first compressor, for the trainings that have run."""
    head = f"{'compressor':<28}{'runs':>5}{'mean %':>9}{'sd':>7}{'min':>8}{'max':>8}{'diff':>8}{'ratio':>8}"
    lines = [head, "-" * len(head)]
    base = None
    for spec in specs:
        runs_of_spec = [run for run in runs if run["spec"] == spec]
        if not runs_of_spec:
            continue
        accuracies = [run["accuracy"] for run in runs_of_spec]
        mean = statistics.mean(accuracies)
        base = mean if base is None else base
        spread = statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0
        ratio = runs_of_spec[0]["uncompressed"] / runs_of_spec[0]["sent"]
        lines.append(
            f"{spec:<28}{len(runs_of_spec):>5}{mean:>9.2f}{spread:>7.2f}{min(accuracies):>8.2f}{max(accuracies):>8.2f}"
            f"{mean - base:>+8.2f}{ratio:>8.1f}"
        )
    return "\n".join(lines)


def main() -> None:
    """Runs all trainings one after the other, and writes the results after each of them."""
    parser = argparse.ArgumentParser(
        description="Compare the accuracy that compressors reach in the same number of steps.",
        epilog="example: python benchmarks/accuracy.py --specs none int8 --seeds 0 1 2 --json accuracy.json",
    )
    parser.add_argument("--specs", nargs="+", default=SPECS, help="the first is what the others are compared with")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--workers", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--epochs", type=int, default=30, help="default: %(default)s")
    parser.add_argument("--batch-size", type=int, default=32, help="images per worker (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=0.001, help="per worker (default: %(default)s)")
    parser.add_argument(
        "--optimizer", choices=["adam", "sgd", "onebit-adam"], default="adam", help="default: %(default)s"
    )
    parser.add_argument("--freeze-step", type=int, help="of onebit-adam")
    parser.add_argument("--timeout", type=int, default=1800, help="seconds for one training (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the results to this file, after each training")
    parser.add_argument("--resume", action="store_true", help="keep the results that are in the file already")
    args = parser.parse_args()

    runs: list[dict[str, Any]] = []
    settings = {
        name: getattr(args, name) for name in ("workers", "epochs", "batch_size", "lr", "optimizer", "freeze_step")
    }
    if args.resume and args.json and args.json.exists():
        before = json.loads(args.json.read_text(encoding="utf-8"))
        runs = before.pop("runs")
        if before != settings:
            parser.error(f"{args.json} was made with other settings: {before}")
    for seed in args.seeds:
        for spec in args.specs:
            if any((run["spec"], run["seed"]) == (spec, seed) for run in runs):
                continue
            start = time.monotonic()
            runs.append(train(spec, seed, args))
            print(
                f"seed {seed}, {spec}: {runs[-1]['accuracy']:.2f} % ({time.monotonic() - start:.0f} s)",
                flush=True,
            )
            if args.json:
                args.json.write_text(json.dumps({**settings, "runs": runs}, indent=1) + "\n", encoding="utf-8")
    print(f"\nsettings: {settings}, {runs[0]['steps']:.0f} steps\n{table(runs, args.specs)}")


if __name__ == "__main__":
    main()
