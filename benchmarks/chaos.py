"""Trains under random faults, and checks that nothing is lost, wrong or stuck.

    sudo python benchmarks/chaos.py --hosts 4 --faults 12 --mtbf 30 --seed 1 --json chaos.json

An elastic training of the language model runs on emulated hosts (benchmarks/netlab.py). Faults come at random times:
workers are killed or stopped, links fail, the disk of the checkpoints is full, files are cut short, hosts join. The
same seed gives the same plan. If horovodrun itself ends, it is started again, and training resumes from the last
checkpoint. Checked all the time:

* a new commit comes within --hang-seconds;
* after each commit, all ranks have the same weights, to the bit;
* the sum of residuals stays the same across a reset, or a warning names what is lost, and why it could not be kept;
* what is loaded from a checkpoint is what was saved, and a damaged file is refused;
* the loss stays in the spread of undisturbed trainings with other seeds.

Ends with status 1 if one of these does not hold. Each step takes at least --step-ms, as if an accelerator computed it:
so the result depends little on how many cores the hosts share.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import chaos_disk
import chaos_invariants as invariants
import chaos_plan
import chaos_report as report
import common
from chaos_faults import Faults
from chaos_job import ROOT, Job
from netlab import Netlab, NetlabError

CHECK = Path(__file__).resolve().parent / "chaos_check.py"
BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
SETTINGS = ("hosts", "rate", "spec", "layers", "width", "context", "step_ms", "commit_every", "save_every")
CALM = 3  # commits after the last fault
MOST_STARTS = 5  # without a commit


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--hosts", type=int, default=4, help="at the beginning, of one worker each (default: %(default)s)")
    add("--rate", default="1gbit", help="of each link: kbit, mbit or gbit (default: %(default)s)")
    add("--faults", type=int, metavar="N", help="how many (default: 12, if there is no --seconds)")
    add("--seconds", type=float, help="no fault comes later than this")
    add("--mtbf", type=float, default=30.0, help="mean seconds between two faults (default: %(default)s)")
    add("--seed", type=int, default=0, help="of the plan (default: %(default)s)")
    add("--kinds", nargs="+", choices=chaos_plan.KINDS, default=list(chaos_plan.KINDS), help="default: all")
    add("--spec", default="hybrid:ratio=0.05,bits=4", help="compression (default: %(default)s)")
    add("--layers", type=int, default=2, help="of the model (default: %(default)s)")
    add("--width", type=int, default=192, help="of the model, a multiple of 4 (default: %(default)s)")
    add("--context", type=int, default=64, help="of the model, in bytes (default: %(default)s)")
    add("--step-ms", type=float, default=200.0, help="a step takes at least that (default: %(default)s)")
    add("--commit-every", type=int, default=5, metavar="STEPS", help="default: %(default)s")
    add("--save-every", type=int, default=20, metavar="STEPS", help="a checkpoint (default: %(default)s)")
    add("--steps", type=int, default=0, help="train at most so many; for --faults 0")
    add("--training-seed", type=int, default=0, help="of weights and batches (default: %(default)s)")
    add("--gloo-timeout", type=int, default=30, metavar="SECONDS", help="of horovodrun (default: %(default)s)")
    add("--hang-seconds", type=float, default=150.0, help="without a commit (default: %(default)s)")
    add("--disk-mb", type=int, default=256, help="size of the disk of the checkpoints (default: %(default)s)")
    add("--undisturbed", nargs="+", type=Path, metavar="FILE",
        help="results of --faults 0 with other --training-seed (default: such trainings run now)")  # fmt: skip
    add("--references", type=int, default=3, help="how many of them run now (default: %(default)s)")
    add("--reference-steps", type=int, metavar="N", help="at most; their loss is compared (default: all)")
    add("--logs", type=Path, metavar="DIR", help="keep the workers' events and output there")
    add("--json", type=Path, metavar="FILE", help="write the result there")
    args = parser.parse_args()
    args.faults = 12 if args.faults is None and args.seconds is None else args.faults
    if args.hosts < 1 or args.width % 4 or not args.mtbf > 0:
        parser.error("--hosts must be at least 1, --width a multiple of 4, --mtbf positive")
    if args.rate[-4:] not in BITS or not args.rate[:-4].replace(".", "", 1).isdigit():
        parser.error(f"--rate {args.rate}: write it as 100mbit or 1gbit")
    if args.faults == 0 and not args.steps:
        parser.error("--faults 0 needs --steps")
    return args


class Soak:
    """One training with the faults of a plan; without any, the training ends after `steps`."""

    def __init__(
        self, lab: Netlab, folder: Path, disk: Path, args: argparse.Namespace, plan: Sequence[chaos_plan.Fault],
        steps: int, training_seed: int,
    ) -> None:  # fmt: skip
        rate = float(args.rate[:-4]) * BITS[args.rate[-4:]]
        names = ("spec", "layers", "width", "context", "commit_every", "save_every")
        options = [f"--{name.replace('_', '-')}={getattr(args, name)}" for name in names]
        options += [f"--checkpoints={disk / 'checkpoints'}", f"--training-seed={training_seed}"]
        options += [f"--steps={steps}", f"--step-seconds={args.step_ms / 1e3}"]
        (disk / "checkpoints").mkdir()
        self.job = Job(lab, folder, range(1, args.hosts + 1), args.gloo_timeout, options)
        self.faults = Faults(self.job, disk / "checkpoints", rate, spare=args.hosts + 1)
        self.limit, self.steps = args.hang_seconds, steps
        self.left = list(plan)
        self.done: list[dict[str, Any]] = []
        self.restarts: list[dict[str, Any]] = []
        self.hangs: list[dict[str, Any]] = []
        self.copies: list[tuple[Path, str | None]] = []
        self._undo: list[tuple[float, Any]] = []
        self._copies_of: list[list[tuple[Path, str | None]]] = []
        self._calm = 0  # commits since the last fault was over
        self._progress = time.time()

    def run(self) -> None:
        """Trains until all faults are done and over; starts horovodrun again where it ends."""
        starts = 0
        while starts < MOST_STARTS:
            self.job.start()
            self._progress, commits = time.time(), len(invariants.of_kind(self.job.events, "commit"))
            why = self._watch()
            self.job.end()
            if not why:
                return
            progressed = len(invariants.of_kind(self.job.events, "commit")) > commits
            starts = 1 if progressed else starts + 1
            after = self.done[-1]["kind"] if self.done else "none"
            self.restarts.append({"t": time.time(), "after": after, "why": why, "messages": self.job.messages()})
            print(f"  restart after {after}: {why}", flush=True)
        self.hangs.append({"why": f"no commit after {MOST_STARTS} starts of horovodrun", "workers": []})

    def _watch(self) -> str:
        """Waits, and does the faults; returns why the job must be started again, or "" at its end."""
        while True:
            new = self.job.read()
            now = time.time()
            commits = [event["t"] for event in new if event["event"] == "commit"]
            self._progress = max([self._progress, *commits])
            if any(event["event"] == "ended" for event in new):
                return ""
            self._do_due(now)
            over = not self.left and not self._undo
            self._calm += len(commits) if over else 0
            if over and not self.steps and self._calm >= CALM * len(self.job.hosts):
                (self.job.folder / "stop").touch()
            if self.job.ended():
                return f"horovodrun ended with status {self.job.status()}"
            hang = invariants.late(self._progress, now, self.limit)
            if hang:
                self.hangs.append({"t": now, "why": hang, "workers": self.job.dump(), "messages": self.job.messages()})
                return hang
            time.sleep(0.05)

    def _do_due(self, now: float) -> None:
        for when, undo in [item for item in self._undo if item[0] <= now]:
            undo()
            self._undo.remove((when, undo))
        start = report.start_of(self.job.events) if self.left else None
        if start is None or now < start + self.left[0].at or not self.faults.possible(self.left[0]):
            return
        fault = self.left.pop(0)
        done = self.faults.do(fault)
        self._undo += [(now + seconds, undo) for seconds, undo in done.undo]
        self._copies_of.append(done.copies)
        plan = chaos_plan.to_json(fault)
        self.done.append({**plan, "t": now, "done_at": round(now - start, 3), "what": done.what})
        print(f"  {now - start:6.1f} s  {fault.kind}: {done.what}", flush=True)

    def violations(self) -> list[str]:
        """All that did not hold, but for the loss."""
        events = self.job.events
        found = [hang["why"] for hang in self.hangs]
        for check in (
            invariants.weights_differ, invariants.residuals_changed, invariants.lost_without_reason,
            invariants.loaded_wrongly,
        ):  # fmt: skip
            found += check(events)
        return found + invariants.copies_wrong(self._read_copies(), events)

    def _read_copies(self) -> list[dict[str, Any]]:
        """What a child process reads from the copies of saves."""
        copies = {str(path): damaged for of_one in self._copies_of for path, damaged in of_one}
        if not copies:
            return []
        child = subprocess.run(
            [sys.executable, str(CHECK), *copies], cwd=ROOT, capture_output=True, text=True, timeout=300, check=True
        )
        read = json.loads(child.stdout.splitlines()[-1])
        return [{"name": Path(p).name, "damaged": damaged, "files": read[p]} for p, damaged in copies.items()]

    def result(self) -> dict[str, Any]:
        """What the JSON file has of this training."""
        events, now = self.job.events, time.time()
        commits, start = invariants.of_kind(events, "commit"), report.start_of(events) or now
        counted = ("commit", "synced", "warning", "saved", "save_failed", "loaded", "refused", "obeyed", "restore")
        return {
            "progress": report.progress(events),
            "curve": sorted(invariants.curve(events).items()),
            "faults": report.costs(events, self.done, now),
            "restarts": [{**restart, "t": round(restart["t"] - start, 1)} for restart in self.restarts],
            "hangs": self.hangs,
            "counts": {kind: len(invariants.of_kind(events, kind)) for kind in counted},
            "workers": [min(e["size"] for e in commits), max(e["size"] for e in commits)] if commits else [],
            "warnings": [event["text"] for event in invariants.of_kind(events, "warning")],
            "refused": [event["text"] for event in invariants.of_kind(events, "refused")],
            "save_failed": [event["text"] for event in invariants.of_kind(events, "save_failed")],
        }


def soak(args: argparse.Namespace, plan: Sequence[chaos_plan.Fault], steps: int, seed: int) -> dict[str, Any]:
    """Runs one training and returns its result, with its violations."""
    with contextlib.ExitStack() as stack:
        disk = stack.enter_context(chaos_disk.disk(args.disk_mb))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-")))
        if args.logs:
            folder = args.logs / f"training-{seed}{'' if plan else '-undisturbed'}"
            folder.mkdir(parents=True)
        # One for horovodrun, and one that joins.
        lab = stack.enter_context(Netlab(args.hosts + 2, args.rate))
        run = Soak(lab, folder, disk, args, plan, steps, seed)
        run.run()
        return {**run.result(), "violations": run.violations(), "training_seed": seed}


def undisturbed(args: argparse.Namespace, steps: int) -> list[dict[str, Any]]:
    """Results of trainings without faults: from files, or of trainings that run now."""
    if args.undisturbed:
        results = [json.loads(path.read_text(encoding="utf-8")) for path in args.undisturbed]
        if any(result["settings"] != settings(args) for result in results):
            raise SystemExit("chaos: the undisturbed trainings had other settings")
        return [result["training"] for result in results]
    found = []
    for seed in range(args.references):
        print(f"undisturbed, seed {seed}, {steps} steps", flush=True)
        found.append(soak(args, [], steps, seed))
    return found


def settings(args: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(args, name) for name in SETTINGS}


def show(args: argparse.Namespace, training: dict[str, Any], goodputs: dict[str, float | None]) -> None:
    """Prints the table of faults and the totals."""
    columns = ["fault", "number", "pause s, median", "longest", "steps lost", "restarts"]
    print(f"{args.hosts} hosts {args.rate}, {args.spec}, mean time between faults {args.mtbf:g} s, seed {args.seed}")
    common.print_table("", columns, report.table(training["faults"], training["restarts"]))
    for restart in training["restarts"]:
        print(f"restart {restart['t']:.0f} s after the start, after {restart['after']}: {restart['why']}")
    done = training["progress"]
    print(f"{done['steps']} steps committed in {done['seconds']:.0f} s, {len(training['faults'])} faults")
    for unit, value in goodputs.items():
        print(f"goodput in {unit.replace('_', ' ')}: " + ("not measured" if value is None else f"{value:.2f}"))
    for violation in training["violations"]:
        print(f"VIOLATION: {violation}")
    print(f"{len(training['violations'])} violations")


def main() -> int:
    args = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    plan = chaos_plan.plan(args.seed, args.mtbf, args.kinds, args.faults, args.seconds)
    try:
        training = soak(args, plan, args.steps if not plan else 0, args.training_seed)
        others = (
            undisturbed(args, min(training["progress"]["steps"], args.reference_steps or sys.maxsize))
            if plan and (args.undisturbed or args.references)
            else []
        )
    except NetlabError as error:
        print(f"chaos: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    goodputs = {}
    if others:
        training["violations"] += invariants.curve_astray(dict(training["curve"]), [dict(o["curve"]) for o in others])
        progress = [other["progress"] for other in others]
        goodputs = {unit: report.goodput(training["progress"], progress, unit) for unit in ("steps", "worker_steps")}
    show(args, training, goodputs)
    common.save(args.json, {
        "benchmark": "chaos", "settings": settings(args), "seed": args.seed, "mtbf": args.mtbf, "kinds": args.kinds,
        "reference_steps": args.reference_steps,
        "plan": [chaos_plan.to_json(fault) for fault in plan], "training": training, "goodput": goodputs,
        "undisturbed": [{key: o[key] for key in ("training_seed", "progress", "curve", "violations")} for o in others],
    })  # fmt: skip
    return int(bool(training["violations"]))


if __name__ == "__main__":
    sys.exit(main())
