"""Looks at this host and this process for `hvd-compress doctor --env`. Linux; the standard library only."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import platform
import re
import resource
import shutil
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

from ..install.environment import TENSORFLOWS, installed
from ..install.prerequisites import has_address
from ..version import __version__
from .env_facts import Facts, Interface

_PACKAGES = ("keras", "tf_keras", "horovod", "numpy")
_SETTINGS = (
    "HVD_COMPRESS", "HVD_COMPRESS_BUCKET_BYTES", "HVD_COMPRESS_EXCHANGE", "HVD_COMPRESS_CALIBRATION",
    "HVD_COMPRESS_KERNELS",
)  # fmt: skip
_ADDRESS_OF = 0x8915  # SIOCGIFADDR
_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=no", "-o", "ConnectTimeout=10")
_ROUNDS = 3  # of comparing clocks


def read(path: str) -> str:
    """A file's text without its last line break; empty if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""


def interfaces() -> tuple[Interface, ...]:
    """The interfaces of this host that are up and have an IPv4 address."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            folder = f"/sys/class/net/{name}"
            try:
                packed = fcntl.ioctl(probe.fileno(), _ADDRESS_OF, struct.pack("256s", name[:15].encode()))
            except OSError:  # no address
                continue
            if read(f"{folder}/operstate") == "down":
                continue
            speed = read(f"{folder}/speed")
            found.append(Interface(
                name, socket.inet_ntoa(packed[20:24]), int(read(f"{folder}/mtu") or 0),
                max(int(speed), 0) if re.fullmatch(r"-?\d+", speed) else 0,
                name == "lo" or os.path.isdir(f"{folder}/bridge") or name.startswith(("docker", "virbr", "cni", "tun")),
            ))  # fmt: skip
    return tuple(found)


def default_route(table: str) -> str:
    """The interface to other networks, from the text of /proc/net/route; empty if there is none."""
    rows = [line.split() for line in table.splitlines()[1:]]
    routes = [(int(row[6]), row[0]) for row in rows if len(row) > 7 and row[1] == row[7] == "00000000"]
    return min(routes)[1] if routes else ""


def cores() -> int:
    """How many cores this process may use: by its affinity, and by the limit of its container."""
    allowed = len(os.sched_getaffinity(0))
    quota = read("/sys/fs/cgroup/cpu.max").split()
    if len(quota) == 2 and quota[0].isdigit():
        allowed = min(allowed, max(1, round(int(quota[0]) / int(quota[1]))))
    return allowed


def threads() -> int:
    """The threads of an operation, if this process's environment sets them; 0 if it does not."""
    value = os.environ.get("TF_NUM_INTRAOP_THREADS", "")
    return int(value) if value.isdigit() else 0


def gpus() -> int:
    """How many NVIDIA GPUs the host has."""
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))


def versions() -> dict[str, str]:
    """The versions of what ranks must agree on."""
    python = ".".join(platform.python_version_tuple()[:2])
    packages = {name: installed(name) for name in _PACKAGES}
    found = {"hvd_compress": __version__, "python": python, "tensorflow": installed(*TENSORFLOWS), **packages}
    return {name: version for name, version in found.items() if version}


def horovod_for() -> str:
    """The version of TensorFlow that the installed Horovod was built for; empty if it does not say."""
    try:
        # Not valid JSON in all versions.
        text = metadata.distribution("horovod").read_text("../horovod/metadata.json") or ""
    except (metadata.PackageNotFoundError, OSError):
        return ""
    found = re.search(r'"tensorflow":\s*"([^"]+)"', text)
    return found.group(1) if found else ""


def settings() -> tuple[dict[str, str], str]:
    """The settings of this package in the environment, and what is wrong with them."""
    given = {name: os.environ[name] for name in _SETTINGS if os.environ.get(name)}
    calibration = given.get("HVD_COMPRESS_CALIBRATION", "")
    if calibration and not os.access(calibration, os.R_OK):
        return given, f"HVD_COMPRESS_CALIBRATION={calibration} cannot be read here"
    if "HVD_COMPRESS" in given:
        from .. import formats

        try:
            formats.parse(given["HVD_COMPRESS"])
        except ValueError as error:
            return given, f"HVD_COMPRESS: {error}"
    return given, ""


def reach(host: str) -> tuple[str, float]:
    """Tries ssh to a host: why it failed (empty if it did not), and by how many seconds that host's clock is ahead."""
    start = time.time()
    try:
        done = subprocess.run([*_SSH, "--", host, "date +%s.%N"], capture_output=True, text=True, timeout=30,
                              stdin=subprocess.DEVNULL)  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(getattr(error, "strerror", None) or "ssh did not answer within 30 s"), 0.0
    end = time.time()
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"ssh ended with status {done.returncode}"])[-1], 0.0
    numbers = re.findall(r"\d+(?:\.\d+)?", done.stdout)
    if not numbers:
        return "ssh works, but `date +%s.%N` printed no time", 0.0
    there = float(numbers[-1])
    # It was read between the two.
    return "", max(there - end, 0.0) or min(there - start, 0.0)


def limit(kind: int) -> int:
    """A limit of this process; -1 if there is none."""
    soft, _ = resource.getrlimit(kind)
    return -1 if soft == resource.RLIM_INFINITY else soft


def host_facts(hosts: Sequence[str] = ()) -> Facts:
    """What can be known without TensorFlow; `hosts` are tried with ssh."""
    tried = {host: reach(host) for host in hosts}
    given, wrong = settings()
    name = socket.gethostname()
    files = limit(resource.RLIMIT_NOFILE)
    return Facts(
        host=os.environ.get("HOROVOD_HOSTNAME") or name,
        rank=int(os.environ.get("HOROVOD_RANK", "0")),
        versions=versions(),
        horovod_for=horovod_for(),
        interfaces=interfaces(),
        taken=os.environ.get("HOROVOD_GLOO_IFACE", ""),
        default_route=default_route(read("/proc/net/route")),
        name_resolves=has_address(name),
        has_ssh=shutil.which("ssh") is not None,
        reached={host: why for host, (why, _) in tried.items()},
        clocks={host: ahead for host, (why, ahead) in tried.items() if not why},
        cores=cores(),
        threads=threads(),
        gpus=gpus(),
        open_files=2**20 if files < 0 else files,
        locked_memory=limit(resource.RLIMIT_MEMLOCK),
        rdma=tuple(sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))),
        settings=given,
        settings_error=wrong,
    )


def all_ranks(facts: Facts) -> list[Facts]:
    """Adds what Horovod says, and gathers the facts of all ranks: on rank 0, on others the result is empty.

    If Horovod does not load, the result is this rank alone.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        import horovod.tensorflow as hvd
        import tensorflow as tf

        hvd.init()
    except Exception as error:  # of the loader, of TensorFlow, of Horovod
        text = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        return [dataclasses.replace(facts, horovod_error=text)]
    from ..kernels import native

    try:
        kernels, wrong = native.kind(), facts.settings_error
    except ValueError as error:
        kernels, wrong = "none", str(error)
    built = tuple(name for name in ("gloo", "mpi", "nccl") if getattr(hvd, f"{name}_built")())
    here = dataclasses.replace(
        facts,
        rank=hvd.rank(),
        size=hvd.size(),
        local_size=hvd.local_size(),
        built=built,
        controller=("mpi" if "mpi" in built and hvd.mpi_enabled() else "gloo") if hvd.size() > 1 else "",
        tensorflow_cuda=tf.test.is_built_with_cuda(),
        kernels=kernels,
        native_missing=native.missing(),
        settings_error=wrong,
    )
    if hvd.size() == 1:
        return [here]
    times = _times(lambda: hvd.allreduce(tf.zeros([]), name="hvdc_env", op=hvd.Sum))
    gathered: list[tuple[Facts, list[float]]] = hvd.allgather_object((here, times), name="hvdc_env_facts")
    return together(gathered) if hvd.rank() == 0 else []


def _times(meet: Callable[[], object]) -> list[float]:
    """The clock, each time that all ranks have met."""
    times = []
    for _ in range(_ROUNDS):
        meet()
        times.append(time.time())
    return times


def together(gathered: Sequence[tuple[Facts, Sequence[float]]]) -> list[Facts]:
    """The facts of all ranks, each with the number of hosts, and with its clock compared to that of rank 0.

    Args:
        gathered: The facts of each rank, and its clock at some moments, which are about the same for all ranks.
    """
    hosts = len({facts.host for facts, _ in gathered})
    _, first = gathered[0]
    result = []
    for facts, times in gathered:
        # A busy rank reads its clock late, but not in each round.
        ahead = min((there - here for here, there in zip(first, times)), key=abs)
        result.append(dataclasses.replace(facts, hosts=hosts, clock=ahead))
    return result
