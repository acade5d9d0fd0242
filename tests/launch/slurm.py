"""A Slurm cluster of emulated hosts on this machine: one slurmd in the network namespace of each."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
from netlab import Netlab  # noqa: E402

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "mungekey")
CONFIGURATION = """
ClusterName=emulated
SlurmctldHost={host}({first})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
ReturnToService=2
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmctldPort=16817
SlurmdSpoolDir={folder}/%n
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def missing() -> list[str]:
    """The programs that are not there; Debian has them in slurmctld, slurmd, slurm-client and munge."""
    return [program for program in PROGRAMS if not shutil.which(program, path=_path())]


def _path() -> str:
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


class Slurm:
    """Context manager that starts Slurm with two nodes, node1 and node2, and ends it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lab = Netlab(2)
        self._processes: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> Slurm:
        self.lab.__enter__()
        try:
            self._start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *exception: Any) -> None:
        for process in reversed(self._processes):
            process.send_signal(signal.SIGTERM)
        for process in self._processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
        self.lab.__exit__(None, None, None)

    def run(self, command: list[str], **keywords: Any) -> subprocess.CompletedProcess[str]:
        """Runs a command on the first node, where slurmctld is."""
        inside = ["ip", "netns", "exec", self.lab._host(0), *command]
        environment = {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf"), **keywords.pop("env", {})}
        return subprocess.run(inside, env=environment, capture_output=True, text=True, **keywords)

    def logs(self) -> str:
        """The ends of the logs of all daemons."""
        return "\n".join(f"-- {log.name}\n{log.read_text()[-1500:]}" for log in sorted(self.folder.glob("*.log")))

    def _start(self) -> None:
        names = [f"node{i + 1}" for i in range(self.lab.hosts)]
        known = "".join(f"{address} {name}\n" for address, name in zip(self.lab.addresses, names))
        for i in range(self.lab.hosts):
            with (Path("/etc/netns") / self.lab._host(i) / "hosts").open("a") as hosts:
                hosts.write(known)
        nodes = "\n".join(
            f"NodeName={name} NodeAddr={address} NodeHostname={socket.gethostname()} Port=16818 CPUs={os.cpu_count()}"
            for address, name in zip(self.lab.addresses, names)
        )
        (self.folder / "state").mkdir()
        for name in names:
            (self.folder / name).mkdir()
        (self.folder / "slurm.conf").write_text(CONFIGURATION.format(
            host=socket.gethostname(), first=self.lab.addresses[0], folder=self.folder, nodes=nodes
        ))  # fmt: skip
        key = self.folder / "munge.key"
        subprocess.run(["mungekey", "--create", f"--keyfile={key}"], check=True)
        files = [f"--{name}={self.folder}/munge.{name.split('-')[0]}" for name in ("socket", "pid-file", "log-file")]
        files += [f"--seed-file={self.folder}/munge.seed", f"--key-file={key}"]
        self._spawn(["munged", "--foreground", "--force", *files], 0)
        self._spawn(["slurmctld", "-D", "-f", str(self.folder / "slurm.conf")], 0)
        for i, name in enumerate(names):
            self._spawn(["slurmd", "-D", "-N", name, "-f", str(self.folder / "slurm.conf")], i)
        until = time.monotonic() + 60
        while self.run(["sinfo", "-h", "-t", "idle", "-o", "%D"]).stdout.strip() != str(len(names)):
            if time.monotonic() > until:
                raise RuntimeError(f"Slurm did not start\n{self.logs()}")
            time.sleep(0.5)

    def _spawn(self, command: list[str], host: int) -> None:
        # Not `ip netns exec`: its /sys has no control groups, which slurmd looks for.
        namespace = self.lab._host(host)
        start = f'mount --bind /etc/netns/{namespace}/hosts /etc/hosts; exec nsenter --net=/run/netns/{namespace} "$@"'
        log = (self.folder / f"out{len(self._processes)}.log").open("w")
        self._processes.append(subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", start, "sh", *command],
            env={**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": _path()}, stdout=log, stderr=log,
        ))  # fmt: skip
