"""Times whole trainings with every compressor.

    sudo python benchmarks/train.py --task gpt --rate 100mbit --json docs/results/train_gpt_100mbit.json
    python benchmarks/train_results.py docs/results/train_*.json --out docs/images --page docs/results.md

Each training runs in processes of its own, on emulated hosts of one core or `--cores` (benchmarks/netlab.py), until the
metric of the validation data reaches the target and `--steps` are done, or three times as many. The clock starts with
the first step. It includes tracing, compilation and calibration, but not the evaluations. With `--json`, trainings that
the file already has are not repeated, so an interrupted benchmark goes on where it was. If there is a GPU, hosts share
the first one: set TF_FORCE_GPU_ALLOW_GROWTH=true.

A method may name more arguments of the optimizer: "int4 + local_steps=30 outer=average", "OneBitAdam + freeze_step=60".
With local steps, the weights of the last exchange are evaluated.

With `--decay`, the learning rate falls to 0 along a cosine until `--steps`. A method may also name the kind of
optimizer: "adamw int4" (benchmarks/tasks.py has the kinds of each task).

With `--change 100mbit@140`, the links get another rate after 140 steps. Then, an oracle is shown, too: before and after
the change, it takes as long as the fastest of the fixed methods that reach the target in no more steps than `auto`.

Stock Horovod uses its DistributedGradientTape, because its optimizer does not reduce gradients on Keras 3.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import common
from netlab import BURST, UNSHAPED, Netlab, NetlabError, probability, seconds

WORKER = Path(__file__).resolve().parent / "train_worker.py"


class Defaults(NamedTuple):
    """Settings of one task.

    Attributes:
        target: The metric to reach. Training without compression reaches it in about `steps` steps.
        steps: After so many steps the metrics are compared.
        every: Steps between two evaluations.
        others: Methods with another optimizer than the task's usual one, and their baseline.
    """

    target: float
    steps: int
    every: int
    others: list[str]


DGC = "dgc:ratio=0.01,steps_per_epoch=20"
SGD = ["sgd none", f"sgd {DGC}"]
ONE_BIT = "OneBitAdam + freeze_step="  # a fifth of the steps; DeepSpeed suggests 15 to 25%
TASKS = {
    "digits": Defaults(96.0, 132, 22, [ONE_BIT + "26", *SGD]),
    "resnet20": Defaults(98.0, 220, 22, [DGC, "adam none", f"adam {ONE_BIT}44"]),
    # Without dgc: it is made for SGD with momentum, with which the transformer hardly learns.
    "gpt": Defaults(2.2, 300, 20, [ONE_BIT + "60"]),
    "gpt2": Defaults(3.0, 60, 10, [ONE_BIT + "12"]),
    "mlp": Defaults(1.95, 400, 20, [ONE_BIT + "80"]),
    "autoencoder": Defaults(0.6, 220, 20, []),
    "regression": Defaults(8.0, 300, 20, [DGC]),
    "recommender": Defaults(29.5, 300, 50, [ONE_BIT + "60", *SGD]),
}
METHODS = [
    "horovod none", "horovod fp16", "none", "fp16", "bf16", "int8", "int4", "quantize:bits=2", "int2", "hadamard",
    "onebit", "topk:ratio=0.05", "block_topk:ratio=0.05", "randomk:ratio=0.05", "block_sparse:ratio=0.1,block=32",
    "hybrid:ratio=0.05,bits=4", "hybrid:ratio=0.01,bits=4", "powersgd:rank=2", "powersgd:rank=4", "auto",
]  # fmt: skip


# Settings that older files do not name.
OLDER = {"delay": 0.0, "loss": 0.0, "change": [], "cores": 1, "decay": False, "burst": BURST}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, default="gpt", help="default: %(default)s")
    parser.add_argument("--hosts", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--cores", type=int, default=1, help="of each host (default: %(default)s)")
    parser.add_argument("--rate", default=UNSHAPED, help="of each link, as tc writes it (default: %(default)s)")
    parser.add_argument("--change", type=rate_and_step, metavar="RATE@STEP", help="another rate after so many steps")
    parser.add_argument("--burst", default=BURST, help="bytes that a link transmits at once (default: %(default)s)")
    parser.add_argument("--delay", type=seconds, default=0.0, help="one way, such as 50ms (default: none)")
    parser.add_argument("--loss", type=probability, default=0.0, help="of packets, such as 1%% (default: 0)")
    parser.add_argument("--methods", nargs="+", metavar="METHOD", help="default: all compressors")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="default: 0 1 2")
    parser.add_argument("--target", type=float, help="metric to reach (default: that of the task)")
    parser.add_argument("--steps", type=int, help="after which metrics are compared (default: that of the task)")
    parser.add_argument("--decay", action="store_true", help="lower the learning rate to 0 along a cosine")
    parser.add_argument("--timeout", type=int, default=1200, help="seconds for one training (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there, after each training")
    args = parser.parse_args()
    args.target = TASKS[args.task].target if args.target is None else args.target
    args.methods = args.methods or METHODS + TASKS[args.task].others
    args.steps = args.steps or TASKS[args.task].steps
    every = TASKS[args.task].every
    if args.change and (args.change[1] % every or not 0 < args.change[1] < args.steps):
        parser.error(f"--change: the step must be below {args.steps} and a multiple of {every}, when it is evaluated")
    return args


def rate_and_step(text: str) -> tuple[str, int]:
    """The two sides of text such as "100mbit@140"."""
    rate, _, step = text.partition("@")
    return rate, int(step)


@contextlib.contextmanager
def changed_rate(lab: Netlab, change: tuple[str, int] | None) -> Iterator[dict[str, str]]:
    """Changes the rate when the worker asks for it, and back at the end.

    Yields environment variables for the worker, which makes a file and waits until it is gone.
    """
    if change is None:
        yield {}
        return
    with tempfile.TemporaryDirectory() as folder:
        flag, before, ended = Path(folder, "change"), lab.rate, threading.Event()
        failed: list[NetlabError] = []

        def wait() -> None:
            while not ended.wait(0.05):
                if flag.exists():
                    try:
                        lab.set_rate(change[0])
                    except NetlabError as error:
                        failed.append(error)
                    flag.unlink()
                    return

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        try:
            yield {"CHANGE_AT": str(change[1]), "CHANGE_FLAG": str(flag)}
        finally:
            ended.set()
            thread.join()
            lab.set_rate(before)
        if failed:
            raise failed[0]


def train(lab: Netlab, method: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """Runs one training and returns what its first worker wrote."""
    every = TASKS[args.task].every
    command = [sys.executable, str(WORKER), args.task, method, str(seed), str(args.target), str(args.steps), str(every)]
    command += [str(args.decay)]
    root = str(WORKER.parent.parent)
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))}
    with changed_rate(lab, args.change) as more:
        result = lab.run(
            ["timeout", "-k", "20", str(args.timeout), *command],
            env={**environment, **more}, capture_output=True, text=True, errors="replace",
        )  # fmt: skip
    lines = [line.partition("RESULT ")[2] for line in result.stdout.splitlines() if "RESULT " in line]
    if result.returncode or len(lines) != 1:
        raise SystemExit(f"{method}, seed {seed}: ended with status {result.returncode}\n{result.stderr[-5000:]}")
    return {"method": method, "seed": seed, **json.loads(lines[0])}


def table(runs: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """Prints a line for each method: medians over the seeds."""
    rows = []
    for method in args.methods:
        some = [run for run in runs if run["method"] == method]
        if some:
            reached = [run["seconds"] or float("inf") for run in some]
            rows.append([
                method, f"{statistics.median(reached):.1f}", " ".join(str(run["steps"] or "-") for run in some),
                f"{statistics.median(run['step_ms'] for run in some):.0f}",
                f"{statistics.median(run['first_step'] for run in some):.1f}",
                f"{statistics.median(run['metric'] for run in some):.3f}", some[0]["chosen"],
            ])  # fmt: skip
    if args.change:
        rows += oracles(runs, args)
    rate = f"{args.rate}, {args.change[0]} after {args.change[1]} steps" if args.change else args.rate
    title = f"{args.task}, {args.hosts} hosts {rate}: to {args.target:g}, and the metric after {args.steps} steps"
    columns = ["method", "seconds, median", "steps of each seed", "ms per step", "first step s", "metric", "chosen"]
    common.print_table(title, columns, rows)


def oracles(runs: list[dict[str, Any]], args: argparse.Namespace) -> list[list[str]]:
    """A line for `auto` of each seed: the seconds of an oracle, and how many times as long `auto` takes."""
    rows, (_, step) = [], args.change
    fixed = [name for name in args.methods if not any(word in name for word in ("auto", "horovod", " "))]
    for auto in (run for run in runs if run["method"] == "auto" and run["steps"] and run["steps"] > step):
        some = [run for run in runs if run["seed"] == auto["seed"] and run["method"] in fixed and run["steps"]]
        some = [run for run in some if step < run["steps"] <= auto["steps"]]
        at_change = [next(point[1] for point in run["curve"] if point[0] == step) for run in some]
        if some:
            seconds = min(at_change) + min(run["seconds"] - at for run, at in zip(some, at_change))
            row = [f"oracle, seed {auto['seed']}", f"{seconds:.1f}", str(auto["steps"]), "", "", ""]
            rows.append([*row, f"auto: {auto['seconds'] / seconds:.2f} times"])
    return rows


def main() -> int:
    args = arguments()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    plain = ("task", "hosts", "cores", "rate", "burst", "delay", "loss", "target", "steps", "decay")
    settings = {**{key: vars(args)[key] for key in plain}, "change": list(args.change or [])}
    runs: list[dict[str, Any]] = []
    if args.json and args.json.exists():
        before = json.loads(args.json.read_text(encoding="utf-8"))
        runs = before["runs"]
        if any(before.get(key, OLDER.get(key)) != value for key, value in settings.items()):
            print(f"{args.json} was made with other settings: name another file", file=sys.stderr)
            return 2
    done = {(run["method"], run["seed"]) for run in runs}
    todo = [(seed, method) for seed in args.seeds for method in args.methods if (method, seed) not in done]
    try:
        with Netlab(args.hosts, args.rate, delay=args.delay, loss=args.loss, cores=args.cores, burst=args.burst) as lab:
            for seed, method in common.progress(todo, "trainings"):
                runs.append(train(lab, method, seed, args))
                common.save(args.json, {"benchmark": "train", **settings, "runs": runs}, show=False)
    except NetlabError as error:
        print(f"train: {error}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, subprocess.TimeoutExpired):
        print("interrupted", file=sys.stderr)
    table(runs, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
