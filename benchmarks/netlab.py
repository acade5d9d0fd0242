"""Emulated hosts with shaped links on one Linux machine, and horovodrun across them.

    sudo .venv/bin/python benchmarks/netlab.py --hosts 4 --rate 1gbit -- .venv/bin/python benchmarks/exchange.py
    sudo .venv/bin/python benchmarks/netlab.py --rate 100mbit --delay 50ms --loss 1% -- .venv/bin/python train.py

sudo has a PATH of its own, without the environment: name its programs, as here, or keep yours (`sudo env PATH=$PATH`).

Each host is a network namespace with a link to a common switch, shaped in both directions with tc. With --delay or
--loss, the switch is a process (relay.py). The command runs on every host under horovodrun. Needs root and iproute2
(apt-get install iproute2). Everything is removed at the end, even if this program is killed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

NETWORK = "10.77.0"
UNSHAPED = "unshaped"
BURST = "256kb"
NOBODY = "02:00:00:00:00:01"  # no network card has this address
# Replaces ssh: ignores the options, and runs the command in the namespace that has the address.
SSH = """#!/bin/sh
host=
while [ $# -gt 0 ]; do  # horovodrun writes options before and after the host
  case "$1" in
    -o | -p | -i | -l) shift 2 ;;
    -*) shift ;;
    *) [ -z "$host" ] || break; host=${{1##*.}}; shift ;;
  esac
done
exec ip netns exec {prefix}h$((host - 1)) taskset -c $(echo {cores} | cut -d " " -f $host) bash -c "$*"
"""


class NetlabError(Exception):
    """The reason why the lab cannot be set up, in one line."""


class Netlab:
    """Context manager that creates emulated hosts and removes them at its end.

    Attributes:
        addresses: The hosts' IP addresses.
    """

    def __init__(
        self,
        hosts: int,
        rate: str = UNSHAPED,
        workers_per_host: int = 1,
        delay: float = 0.0,
        loss: float = 0.0,
        cores: int = 1,
        burst: str = BURST,
    ) -> None:
        """Stores the settings; the hosts are created on entering the context.

        Args:
            hosts: Number of hosts, from 1 to 250.
            rate: Rate of each link in each direction, in the notation of tc, such as 100mbit or 10gbit; or "unshaped".
            workers_per_host: Worker processes on each host. They share its link and cores.
            delay: Seconds that a packet takes from one host to another, in addition to the time on the links.
            loss: The probability with which a packet is lost.
            cores: Cores of each host. Hosts share them if the machine has fewer.
            burst: Bytes that a link transmits at once after a pause, in the notation of tc. They take no time.
        """
        self.hosts, self.rate, self.workers, self._burst = hosts, rate, workers_per_host, burst
        self._delay, self._loss, self._cores_per_host = delay, loss, cores
        self.addresses = [f"{NETWORK}.{i + 1}" for i in range(hosts)]
        self._prefix = f"hvdc{os.getpid()}"
        self._stack = contextlib.ExitStack()
        self._bin = ""

    def __enter__(self) -> Netlab:
        check_machine()
        with contextlib.ExitStack() as stack:
            stack.enter_context(_cleaner(self._prefix))
            self._bin = stack.enter_context(tempfile.TemporaryDirectory(prefix="netlab-"))
            ssh = Path(self._bin) / "ssh"
            cores = " ".join(self._cores(i) for i in range(self.hosts))
            ssh.write_text(SSH.format(prefix=self._prefix, cores=cores))
            ssh.chmod(0o755)
            self._make_switch()
            for i in range(self.hosts):
                self._make_host(i)
            if self._is_relayed:
                stack.enter_context(self._relay())
            self.set_rate(self.rate)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stack.close()

    def set_rate(self, rate: str, hosts: Sequence[int] | None = None) -> None:
        """Changes the rate of the links of some hosts (None: of all), also while a command runs."""
        for i in range(self.hosts) if hosts is None else hosts:
            for namespace, device in ((self._host(i), "eth0"), (self._switch, f"port{i}")):
                where = ("tc", "-n", namespace, "qdisc")
                if rate == UNSHAPED:
                    _run(*where, "del", "dev", device, "root", check=False)
                else:
                    limits = ("burst", self._burst, "latency", "100ms")
                    _run(*where, "replace", "dev", device, "root", "tbf", "rate", rate, *limits)
        if hosts is None:
            self.rate = rate

    def set_link(self, host: int, up: bool) -> None:
        """Takes the link of a host down, or up again."""
        _run("ip", "-n", self._switch, "link", "set", f"port{host}", "up" if up else "down")

    def set_reachable(self, host: int, others: Sequence[int], reachable: bool) -> None:
        """Cuts a host off from others, or connects them again: what it sends to them reaches nobody."""
        where = ("ip", "-n", self._host(host), "neighbor")
        for address in (self.addresses[other] for other in others if other != host):
            if reachable:
                _run(*where, "delete", address, "dev", "eth0", check=False)
            else:
                _run(*where, "replace", address, "lladdr", NOBODY, "dev", "eth0", "nud", "permanent")

    def pids(self, host: int) -> list[int]:
        """The processes of a host."""
        return [int(pid) for pid in _run("ip", "netns", "pids", self._host(host), check=False).stdout.split()]

    def run(self, command: Sequence[str], **keywords: Any) -> subprocess.CompletedProcess[Any]:
        """Runs `command` on every host under horovodrun; keywords are those of `subprocess.run`."""
        hosts = ",".join(f"{address}:{self.workers}" for address in self.addresses)
        options = ["-np", str(self.hosts * self.workers), "-H", hosts]
        environment = self._environment(keywords.pop("env", {}))
        return subprocess.run([*self._horovodrun(), *options, *command], env=environment, **keywords)

    def start(self, options: Sequence[str], **keywords: Any) -> subprocess.Popen[Any]:
        """Starts horovodrun on the first host, with these options and command; keywords are those of `Popen`."""
        environment = self._environment(keywords.pop("env", {}))
        return subprocess.Popen([*self._horovodrun(), *options], env=environment, **keywords)

    def _horovodrun(self) -> list[str]:
        horovodrun = shutil.which("horovodrun", path=str(Path(sys.executable).parent)) or "horovodrun"
        # horovodrun itself starts the workers of the first host.
        inside = ["ip", "netns", "exec", self._host(0), "taskset", "-c", self._cores(0), horovodrun, "--gloo"]
        return [*inside, "--network-interfaces", "eth0"]

    def _environment(self, more: Mapping[str, str]) -> dict[str, str]:
        path = os.pathsep.join([self._bin, str(Path(sys.executable).parent), os.environ["PATH"]])
        return {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", **more, "PATH": path}

    @property
    def _switch(self) -> str:
        return f"{self._prefix}sw"

    def _host(self, i: int) -> str:
        return f"{self._prefix}h{i}"

    def _cores(self, i: int) -> str:
        """The cores of a host, as taskset writes them."""
        count = os.cpu_count() or 1
        first = i * self._cores_per_host
        return ",".join(str(core % count) for core in range(first, first + min(self._cores_per_host, count)))

    @property
    def _is_relayed(self) -> bool:
        return self._delay > 0 or self._loss > 0

    @contextlib.contextmanager
    def _relay(self) -> Iterator[None]:
        """Runs the switch that delays and loses packets, beside the hosts' cores if there are more."""
        relay = [sys.executable, str(Path(__file__).resolve().parent / "relay.py")]
        settings = ["--delay", repr(self._delay), "--loss", repr(self._loss)]
        cores = os.cpu_count() or 1
        used = self.hosts * self._cores_per_host
        pinned = ["taskset", "-c", f"{used}-{cores - 1}"] if used < cores else []
        command = ["ip", "netns", "exec", self._switch, *pinned, *relay, *settings]
        command += [f"port{i}" for i in range(self.hosts)]
        # In its own session, so that Ctrl-C ends the command first.
        with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
            try:
                assert process.stdout is not None
                if not process.stdout.readline():
                    raise NetlabError(f"`{shlex.join(command)}` failed")
                yield
            finally:
                process.kill()

    def _make_switch(self) -> None:
        _run("ip", "netns", "add", self._switch)
        if not self._is_relayed:
            _run("ip", "-n", self._switch, "link", "add", "br0", "type", "bridge")
            _run("ip", "-n", self._switch, "link", "set", "br0", "up")

    def _make_host(self, i: int) -> None:
        host, port = self._host(i), f"port{i}"
        # Gloo resolves the machine's hostname, which must lead to this host's address.
        names = Path("/etc/netns") / host
        names.mkdir(parents=True)
        (names / "hosts").write_text(f"127.0.0.1 localhost\n{self.addresses[i]} {socket.gethostname()}\n")
        _run("ip", "netns", "add", host)
        _run("ip", "link", "add", "eth0", "netns", host, "type", "veth", "peer", port, "netns", self._switch)
        _run("ip", "-n", self._switch, "link", "set", port, *([] if self._is_relayed else ["master", "br0"]), "up")
        if self._loss:  # single packets are lost, so TCP must not hand over larger segments
            _run("ip", "-n", host, "link", "set", "eth0", "gso_max_segs", "1")
        _run("ip", "-n", host, "address", "add", f"{self.addresses[i]}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _run("ip", "-n", host, "link", "set", device, "up")


def check_machine() -> None:
    """Checks that this machine can create network namespaces.

    Raises:
        NetlabError: A requirement is missing.
    """
    if sys.platform != "linux":
        raise NetlabError("needs Linux network namespaces")
    if os.geteuid() != 0:
        raise NetlabError(f"making network namespaces needs root: sudo {sys.executable} {' '.join(sys.argv)}")
    missing = [tool for tool in ("ip", "tc", "taskset", "bash") if shutil.which(tool) is None]
    if missing:
        raise NetlabError(f"{', '.join(missing)} not found: apt-get install iproute2 util-linux bash")


@contextlib.contextmanager
def _cleaner(prefix: str) -> Iterator[None]:
    """Starts a process that removes the lab when this process has ended, in whatever way."""
    code = "import sys; sys.stdin.read(); sys.path.insert(0, sys.argv[1]); import netlab; netlab.remove(sys.argv[2])"
    command = [sys.executable, "-c", code, str(Path(__file__).resolve().parent), prefix]
    # In its own session, so that a signal that ends this process does not end it, too.
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield
    finally:
        process.communicate()


def remove(prefix: str) -> None:
    """Kills all processes in the namespaces with this prefix, and deletes the namespaces."""
    listed = _run("ip", "netns", "list", check=False).stdout
    for name in re.findall(rf"^({re.escape(prefix)}(?:sw|h\d+))\b", listed, re.MULTILINE):
        for pid in _run("ip", "netns", "pids", name, check=False).stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        _run("ip", "netns", "delete", name, check=False)
    for names in Path("/etc/netns").glob(f"{prefix}h*"):
        shutil.rmtree(names, ignore_errors=True)


def _run(*command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(command, capture_output=True, text=True)
    if check and result.returncode:
        reason = (result.stderr or result.stdout).strip().splitlines()[:1]
        raise NetlabError(f"`{shlex.join(command)}` failed: {''.join(reason)}")
    return result


def seconds(text: str) -> float:
    """Seconds from 50ms or 1.5s."""
    from hvd_compress.common.units import parse_seconds

    try:
        return parse_seconds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def probability(text: str) -> float:
    """A probability from 1% or 0.01."""
    number, percent = text.removesuffix("%"), text.endswith("%")
    try:
        value = float(number) / (100 if percent else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a probability below 1, such as 1% or 0.01")
    return value


def main() -> int:
    """Runs the command of the command line in a lab."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2, help="how many hosts (default: %(default)s)")
    parser.add_argument(
        "--rate",
        default=UNSHAPED,
        help="of each link, as tc writes it: 100mbit, 10gbit (default: %(default)s)",
    )
    parser.add_argument("--burst", default=BURST, help="bytes that a link transmits at once (default: %(default)s)")
    parser.add_argument(
        "--workers-per-host",
        "--workers",
        type=int,
        default=1,
        help="they share the host's link and cores (default: %(default)s)",
    )
    parser.add_argument("--cores", type=int, default=1, help="of each host (default: %(default)s)")
    parser.add_argument(
        "--delay",
        type=seconds,
        default=0.0,
        help="that a packet takes from one host to another, such as 50ms; a round trip takes twice this (default: 0)",
    )
    parser.add_argument("--loss", type=probability, default=0.0, help="of packets, such as 1%% (default: 0)")
    parser.add_argument("command", nargs="+", help="after --, what horovodrun starts on every host")
    args = parser.parse_args()
    if not 1 <= args.hosts <= 250 or min(args.workers_per_host, args.cores) < 1:
        parser.error("--hosts must be from 1 to 250, --workers-per-host and --cores at least 1")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with Netlab(args.hosts, args.rate, args.workers_per_host, args.delay, args.loss, args.cores, args.burst) as lab:
            return lab.run(args.command).returncode
    except NetlabError as error:
        print(f"netlab: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
