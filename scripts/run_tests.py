#!/usr/bin/env python3
"""Run the test suite: the plain parts, and the parallel ones under horovodrun.

Every part runs under a time limit, and all parts run even if one fails. A part that reaches its limit counts as
one failure, and says which tests were not run. The last line printed is `N passed, N failed` over all parts. In a
parallel part a test fails if it fails on any rank; only rank 0 prints, and the others' output is shown if they
failed where rank 0 did not. Tests with the marker `slow` are left out, unless asked for or named (file::test).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent


class Part(NamedTuple):
    """One pytest run: folder, ranks (0: without horovodrun), marker, limit in seconds, workers of pytest-xdist.

    The limits let machines pass that are three times slower than two cores on which all parts take half an hour. A
    test that hangs ends earlier, at pytest's own time limit.
    """

    folder: str
    processes: int
    marker: str
    limit: int
    workers: int = 0


PARTS = {
    "unit": Part("tests/unit", 0, "", 1800, workers=min(4, os.cpu_count() or 1)),
    "parallel2": Part("tests/parallel", 2, "not np4", 2700),
    "parallel4": Part("tests/parallel", 4, "np4", 1500),
    "launch": Part("tests/launch", 0, "", 2400),
}

TIMED_OUT = (124, 137)  # statuses of the command `timeout`
NOT_RUN, UNFINISHED = "not run", "unfinished"
_SHOWN = 20  # tests that were not run


class Recorder:
    """A pytest plugin that writes each outcome to a file at once, so that a killed run still has its results.

    (pytest writes its junit file at the very end, which a run killed by a time-out never reaches.)
    """

    def __init__(self, path: Path) -> None:
        self.file = open(path, "w", buffering=1, encoding="utf-8")  # noqa: SIM115
        self.why = open(path.with_suffix(".failures"), "w", buffering=1, encoding="utf-8")  # noqa: SIM115
        self.collected = False

    def write(self, test: str, outcome: str) -> None:
        """Writes one line: the test and how it came out so far."""
        self.file.write(json.dumps([test, outcome]) + "\n")

    def pytest_collection_finish(self, session: Any) -> None:
        """What is going to run, so that a run that is ended early can say what is missing."""
        for item in session.items:
            self.write(item.nodeid, NOT_RUN)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """The same where pytest-xdist's workers collect; a later worker repeats what the first has said."""
        if not self.collected:
            for test in ids:
                self.write(test, NOT_RUN)
        self.collected = True

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test that starts and does not finish has failed, unless the part reached its limit in it."""
        self.write(nodeid, UNFINISHED)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """One report each for set-up, call and tear-down; a later line replaces an earlier one."""
        if report.failed:
            self.write(report.nodeid, "failed")
            # pytest shows it at the end, which a rank that is ended in a later test does not reach.
            self.why.write(f"{report.nodeid} ({report.when})\n{report.longreprtext}\n")
        elif report.skipped or report.when == "call":
            self.write(report.nodeid, report.outcome)

    def pytest_collectreport(self, report: Any) -> None:
        """A file that cannot be imported counts as one failed test."""
        if report.failed:
            self.write(report.nodeid, "failed")


def worker(results: Path, arguments: list[str]) -> int:
    """Runs pytest in this process, one of those that horovodrun started or the only one."""
    rank = int(os.environ.get("HOROVOD_RANK", "0"))
    if rank > 0:
        log = os.open(results / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
    sys.path.insert(0, str(ROOT))  # as `python -m pytest` does
    status = int(pytest.main(arguments, plugins=[Recorder(results / f"rank{rank}.jsonl")]))
    # horovodrun ends all ranks as soon as one exits with an error. Failed tests (1) and no tests (5) are
    # none: the driver sees them in what was recorded.
    return 0 if status in (0, 1, 5) else status


def outcomes(results: Path) -> dict[int, dict[str, str]]:
    """Reads what the recorders wrote: for each rank, the outcome of each test."""
    ranks: dict[int, dict[str, str]] = {}
    for path in sorted(results.glob("rank*.jsonl")):
        tests: dict[str, str] = {}
        for line in path.read_text(encoding="utf-8").splitlines():
            test, outcome = json.loads(line)
            if tests.get(test) != "failed":
                tests[test] = outcome
        ranks[int(path.stem[4:])] = tests
    return ranks


def run(part: Part, tests: list[str], results: Path, slow: bool) -> int:
    """Runs one part under its time limit and prints its output; returns the exit status."""
    command = [sys.executable, os.path.abspath(__file__), "--worker", str(results), *(tests or [part.folder])]
    command += ["--continue-on-collection-errors"]
    markers = [part.marker] if part.marker else []
    markers += [] if slow or any("::" in test for test in tests) else ["not slow"]
    command += ["-m", " and ".join(markers)]
    environment = {"TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONUNBUFFERED": "1", **os.environ}
    if part.processes:
        # A rank that waits for 30 s for a slow one would end both.
        environment.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", "120")
        # Thread time-outs end a rank that waits inside Horovod, where a signal handler would not run.
        command += ["-p", "no:cacheprovider", "-o", "timeout_method=thread"]
        command += ["-p", "no:hypothesispytest"]  # no test here uses it, and each rank would import it
        horovodrun = str(Path(sys.executable).parent / "horovodrun")
        command = [horovodrun, "--gloo", "-np", str(part.processes), *command]
    elif part.workers and not tests:
        command += ["-n", str(part.workers), "--dist", "loadfile"]  # tests of one file share what they trace
    command = ["timeout", "-k", "20", str(part.limit), *command]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace"
    )
    line = ""
    try:
        for line in process.stdout or ():
            print(re.sub(r"^\[\d+\]<std(out|err)>:", "", line), end="", flush=True)
        if line and not line.endswith("\n"):  # it was ended in the middle of a line
            print()
        return process.wait()
    except KeyboardInterrupt:
        process.terminate()  # timeout passes it on
        process.wait()
        raise


def run_part(name: str, part: Part, tests: list[str], slow: bool = False) -> tuple[int, int]:
    """Runs one part and prints its summary; returns how many tests passed and failed."""
    start = time.monotonic()
    print(f"== {name} ==", flush=True)
    results = Path(tempfile.mkdtemp(prefix=f"hvd_compress-{name}-"))
    status = run(part, tests, results, slow)
    ranks = outcomes(results)
    at_limit = status in TIMED_OUT
    # At the limit, a test that was under way has not failed: it is one of those that were not run.
    bad = ("failed",) if at_limit else ("failed", UNFINISHED)
    failed = {rank: {t for t, o in ranks[rank].items() if o in bad} for rank in ranks}
    failures = set().union(*failed.values())
    # By some rank at least; in the order in which they run.
    not_run = dict.fromkeys(t for rank in ranks for t, o in ranks[rank].items() if o in (NOT_RUN, UNFINISHED))
    not_run = [test for test in not_run if test not in failures]
    passed = {t for rank in ranks for t, o in ranks[rank].items() if o == "passed"} - failures - {*not_run}
    skipped = {t for rank in ranks for t, o in ranks[rank].items() if o == "skipped"} - failures - passed
    if status != 0:
        for path in sorted(results.glob("rank*.failures")):
            text = path.read_text(encoding="utf-8")
            print(f"-- failures of {path.stem} --\n{text}" if text else "", end="")
    for rank in ranks:
        if rank and failed[rank] - failed.get(0, set()):
            log = results / f"rank{rank}.log"
            print(f"-- the output of rank {rank}, which failed where rank 0 did not ({log}) --")
            print("\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-100:]))
    for test in sorted(failures):
        states = ", ".join(f"rank {r}: {ranks[r][test]}" for r in ranks if test in ranks[r])
        print(f"FAILED {test} ({states})" if part.processes else f"FAILED {test}")
    count = len(failures)
    if status != 0:
        why = f"reached its limit of {part.limit} s" if at_limit else f"ended with status {status}"
        print(f"{name} {why}: {len(not_run)} tests were not run to their end")
        for test in not_run[:_SHOWN]:
            print(f"NOT RUN {test}")
        if len(not_run) > _SHOWN:
            print(f"NOT RUN ... and {len(not_run) - _SHOWN} more")
        count = count + 1 if at_limit else max(count, 1)
    elif not ranks.get(0) and not tests:
        print(f"{name} has no tests")
        count = 1
    if count == 0:
        shutil.rmtree(results)
    seconds = time.monotonic() - start
    counts = f"{len(passed)} passed, {count} failed, {len(skipped)} skipped"
    print(f"{name}: {counts} ({seconds:.0f} s)", flush=True)
    return len(passed), count


def main() -> int:
    """Reads the command line, runs the parts, prints the totals."""
    parser = argparse.ArgumentParser(description="Run the test suite.")
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated, of: %(default)s")
    parser.add_argument("--slow", action="store_true", help="with the tests that take long")
    parser.add_argument("tests", nargs="*", help="files or test ids below tests/ (default: all)")
    args = parser.parse_args()
    unknown = set(args.parts.split(",")) - set(PARTS)
    if unknown:
        parser.error(f"unknown part {sorted(unknown)[0]!r}: choose from {', '.join(PARTS)}")
    passed = failed = 0
    for name in args.parts.split(","):
        tests = [t for t in args.tests if t.startswith(PARTS[name].folder)]
        if bool(tests) == bool(args.tests):
            results = run_part(name, PARTS[name], tests, args.slow)
            passed, failed = passed + results[0], failed + results[1]
    print(f"{passed} passed, {failed} failed")
    return 0 if passed and not failed else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        sys.exit(worker(Path(sys.argv[2]), sys.argv[3:]))
    sys.exit(main())
