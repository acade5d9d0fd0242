"""The job of chaos.py: one horovodrun after the other on emulated hosts, and what its workers write."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from netlab import Netlab

WORKER = Path(__file__).resolve().parent / "chaos_worker.py"
ROOT = WORKER.parent.parent
_ERROR = re.compile(
    r"\w(Error|Exception|Interrupt)\b|ERROR|exit with status|terminate called|timed? ?out", re.IGNORECASE
)


class Worker(NamedTuple):
    """A worker that is alive."""

    host: int
    pid: int


class Job:
    """Elastic training under horovodrun. Host 0 of the lab runs horovodrun only; the others run one worker each.

    Attributes:
        hosts: The hosts that horovodrun finds.
        attempt: How often horovodrun was started.
        events: All events of all workers so far.
    """

    def __init__(self, lab: Netlab, folder: Path, hosts: Sequence[int], gloo_timeout: int, options: list[str]) -> None:
        self.lab, self.folder, self.attempt = lab, folder, 0
        self.events: list[dict[str, Any]] = []
        self._gloo_timeout, self._options = gloo_timeout, options
        self._offsets: dict[Path, int] = {}
        self._process: subprocess.Popen[Any] | None = None
        self._script = folder / "discover.sh"
        self._script.write_text(f"#!/bin/sh\ncat {folder}/hosts\n")
        self._script.chmod(0o755)
        self.set_hosts(hosts)

    @property
    def output(self) -> Path:
        """What horovodrun and the workers of this attempt print."""
        return self.folder / f"output-{self.attempt}.txt"

    def set_hosts(self, hosts: Sequence[int]) -> None:
        """Changes the hosts that horovodrun finds."""
        self.hosts = sorted(hosts)
        part = self.folder / "hosts.part"
        part.write_text("".join(f"{self.lab.addresses[host]}:1\n" for host in self.hosts))
        part.rename(self.folder / "hosts")

    def start(self) -> None:
        """Starts horovodrun."""
        self.attempt += 1
        for order in self.folder.glob("order-*"):  # of a worker that did not live to obey it
            order.unlink()
        # With a larger --min-np, Horovod does not start a worker again on a host that comes back from its blacklist.
        options = ["-np", str(len(self.hosts)), "--min-np", "1", "--max-np", str(self.lab.hosts)]
        options += ["--host-discovery-script", str(self._script), "--blacklist-cooldown-range", "2", "5"]
        options += ["--gloo-timeout-seconds", str(self._gloo_timeout), "--elastic-timeout", "60"]
        command = [sys.executable, str(WORKER), "--attempt", str(self.attempt), "--folder", str(self.folder)]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        with open(self.output, "w") as output:
            self._process = self.lab.start(
                [*options, *command, *self._options],
                stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
                env={"PYTHONPATH": path},
            )  # fmt: skip

    def ended(self) -> bool:
        """Whether horovodrun has ended."""
        return self._process is None or self._process.poll() is not None

    def status(self) -> int | None:
        """The status with which horovodrun has ended."""
        return None if self._process is None else self._process.returncode

    def read(self) -> list[dict[str, Any]]:
        """The events since the last call."""
        new = []
        for path in self.folder.glob(f"events-{self.attempt}-*.jsonl"):
            with open(path, "rb") as file:
                file.seek(self._offsets.get(path, 0))
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._offsets[path] = self._offsets.get(path, 0) + len(whole)
            new += [json.loads(line) for line in whole.splitlines()]
        self.events += new
        return new

    def workers(self) -> list[Worker]:
        """The living workers, in the order of their hosts."""
        heard = {(event["host"], event["pid"]) for event in self.events if event["attempt"] == self.attempt}
        return sorted(Worker(self.lab.addresses.index(host), pid) for host, pid in heard if is_alive(pid))

    def dump(self) -> list[dict[str, Any]]:
        """What each worker does now: its state, its last events, and the Python stacks of its threads."""
        workers = self.workers()
        for worker in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGUSR1)
        time.sleep(1)
        dumps = []
        for host, pid in workers:
            stacks = next(self.folder.glob(f"stacks-{self.attempt}-*-{pid}.txt")).read_text(errors="replace")
            last = [event for event in self.events if event["pid"] == pid][-3:]
            dumps.append({"host": host, "pid": pid, "state": state(pid), "last": last, "stacks": stacks[-4000:]})
        return dumps

    def messages(self, most: int = 12) -> list[str]:
        """The last different lines of the output that tell of an error."""
        text = self.output.read_text(errors="replace").splitlines()
        lines = [re.sub(r"^\[\d+\]<std\w+>:", "", line)[:400] for line in text if _ERROR.search(line)]
        return list(dict.fromkeys(lines))[-most:]

    def end(self) -> None:
        """Ends all processes of the job, on all hosts."""
        for _ in range(50):
            pids = [pid for host in range(self.lab.hosts) for pid in self.lab.pids(host)]
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if not pids:
                break
            time.sleep(0.1)
        if self._process is not None:
            self._process.wait()
        self.read()


def state(pid: int) -> str:
    """The state of a process as Linux tells it, such as "S (sleeping)"; "gone" if there is none."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return "gone"
    return next(line.partition(":")[2].strip() for line in lines if line.startswith("State:"))


def is_alive(pid: int) -> bool:
    """Whether a process runs or is stopped, and is no zombie."""
    return state(pid)[0] not in "gZX"
