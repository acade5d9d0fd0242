"""How chaos.py does each fault of its plan to the hosts, the workers and the checkpoints."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import chaos_disk
from chaos_job import Job, Worker
from chaos_plan import Fault, pick

Undo = tuple[float, Callable[[], Any]]  # after so many seconds, and what to do then
HUNDREDTH = 100


class Done(NamedTuple):
    """A fault that was done.

    Attributes:
        what: What happened to whom, in words.
        undo: What ends it.
        copies: Copies of saves to check, with the name of the file that is damaged, or None.
    """

    what: str
    undo: list[Undo]
    copies: list[tuple[Path, str | None]]


class Faults:
    """Does faults to one job.

    Args:
        job: The job.
        disk: The file system of the checkpoints.
        rate: The rate of each link in bit/s.
        spare: The host that joins.
    """

    def __init__(self, job: Job, disk: Path, rate: float, spare: int) -> None:
        self.job, self.disk, self.rate, self.spare = job, disk, rate, spare
        self._copies = 0
        self._damaged: set[str] = set()  # saves of which a file was cut short

    def possible(self, fault: Fault) -> bool:
        """Whether there is someone to whom it can be done now."""
        if fault.kind == "truncate" and chaos_disk.newest_save(self.disk) is None:
            return False
        return len(self.job.workers()) >= (2 if fault.kind in ("double", "kill_in_reset") else 1)

    def do(self, fault: Fault) -> Done:
        """Does it."""
        workers = self.job.workers()
        return getattr(self, f"_{fault.kind}")(fault, pick(fault.victim, workers), workers)

    def _signal(self, worker: Worker, number: signal.Signals) -> str:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.pid, number)
        return f"{number.name} to the worker of host {worker.host}"

    def _kill(self, fault: Fault, worker: Worker, workers: list[Worker]) -> Done:
        return Done(self._signal(worker, signal.SIGKILL), [], [])

    def _segfault(self, fault: Fault, worker: Worker, workers: list[Worker]) -> Done:
        return Done(self._signal(worker, signal.SIGSEGV), [], [])

    def _stop(self, fault: Fault, worker: Worker, workers: list[Worker]) -> Done:
        what = self._signal(worker, signal.SIGSTOP)
        return Done(what, [(fault.seconds, lambda: self._signal(worker, signal.SIGCONT))], [])

    def _link_down(self, fault: Fault, worker: Worker, workers: list[Worker]) -> Done:
        lab = self.job.lab
        lab.set_link(worker.host, False)
        return Done(f"link of host {worker.host}", [(fault.seconds, lambda: lab.set_link(worker.host, True))], [])

    def _partition(self, fault: Fault, worker: Worker, workers: list[Worker]) -> Done:
        lab, host = self.job.lab, worker.host
        others = [other for other in range(1, lab.hosts) if other != host]  # host 0 runs horovodrun
        lab.set_reachable(host, others, False)
        return Done(f"host {host} is cut off", [(fault.seconds, lambda: lab.set_reachable(host, others, True))], [])

    def _slow_link(self, fault: Fault, worker: Worker, workers: list[Worker]) -> Done:
        lab, host = self.job.lab, worker.host
        lab.set_rate(f"{self.rate / HUNDREDTH:.0f}", [host])
        return Done(f"link of host {host}", [(fault.seconds, lambda: lab.set_rate(lab.rate, [host]))], [])

    def _disk_full(self, fault: Fault, worker: Worker, workers: list[Worker]) -> Done:
        copies: list[tuple[Path, str | None]] = []

        def clear() -> None:
            copies.extend(self._copy(None))  # the newest save that says that it is complete
            chaos_disk.clear(self.disk)

        chaos_disk.fill(self.disk)
        return Done("no room for checkpoints", [(fault.seconds, clear)], copies)

    def _truncate(self, fault: Fault, worker: Worker, workers: list[Worker]) -> Done:
        save = chaos_disk.newest_save(self.disk)
        assert save is not None
        weights = sorted(self.disk.glob("step-*.weights.h5"))[-1:]
        file = pick(fault.victim, [*sorted(save.iterdir()), *weights])
        size = file.stat().st_size
        os.truncate(file, int(fault.fraction * size))
        copies = self._copy(file.name)
        for other in workers:
            self._signal(other, signal.SIGKILL)
        return Done(f"{file.name} cut to {int(fault.fraction * size)} of {size} bytes", [], copies)

    def _join(self, fault: Fault, worker: Worker, workers: list[Worker]) -> Done:
        joins = self.spare not in self.job.hosts
        others = [host for host in self.job.hosts if host != self.spare]
        self.job.set_hosts([*others, self.spare] if joins else others)
        return Done(f"host {self.spare} {'joins' if joins else 'leaves'}", [], [])

    def _double(self, fault: Fault, worker: Worker, workers: list[Worker]) -> Done:
        done = []
        for part in fault.parts:
            victim = pick(part.victim, workers)
            workers = [other for other in workers if other != victim]
            done.append(getattr(self, f"_{part.kind}")(part, victim, workers))
        names = [f"{part.kind}: {one.what}" for part, one in zip(fault.parts, done)]
        return Done("; ".join(names), [undo for one in done for undo in one.undo], [])

    def _kill_in_reset(self, fault: Fault, worker: Worker, workers: list[Worker]) -> Done:
        second = pick(fault.fraction, [other for other in workers if other != worker])
        self._order(second, "reset", fault.fraction)
        what = self._signal(worker, signal.SIGKILL)
        return Done(f"{what}, then to that of host {second.host} in the reset", [], [])

    def _kill_in_commit(self, fault: Fault, worker: Worker, workers: list[Worker]) -> Done:
        self._order(worker, "commit", fault.fraction)
        return Done(f"SIGKILL to the worker of host {worker.host} in a commit", [], [])

    def _order(self, worker: Worker, moment: str, fraction: float) -> None:
        """Tells a worker to kill itself at a moment that only it knows; see `die_if_ordered`."""
        part = self.job.folder / "order.part"
        part.write_text(str(fraction))
        part.rename(self.job.folder / f"order-{self.job.lab.addresses[worker.host]}-{moment}")

    def _copy(self, damaged: str | None) -> list[tuple[Path, str | None]]:
        save = chaos_disk.newest_save(self.disk)
        if save is None or save.name in self._damaged:  # by an earlier fault: nothing is known of its other files
            return []
        self._copies += 1
        to = self.job.folder / f"copy-{self._copies}"
        chaos_disk.copy_save(save, to)
        if damaged is None or not (to / save.name / damaged).exists():
            return [(to, None)]
        self._damaged.add(save.name)
        return [(to, damaged)]
