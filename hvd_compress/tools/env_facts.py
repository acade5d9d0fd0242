"""What `hvd-compress doctor --env` knows of a rank and its host."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class Interface:
    """A network interface that is up and has an address."""

    name: str
    address: str
    mtu: int  # bytes
    speed: int = 0  # Mbit/s; 0 if the driver does not say
    virtual: bool = False  # of this host only, such as loopback, or the bridge of its containers

    def __str__(self) -> str:
        speed = f", {self.speed / 1000:g} Gbit/s" if self.speed else ""
        return f"{self.name} ({self.address}, MTU {self.mtu}{speed})"


@dataclasses.dataclass(frozen=True)
class Facts:
    """One rank and its host. Numbers of ranks are those of a single process if horovodrun has not started it."""

    host: str
    rank: int = 0
    size: int = 1
    local_size: int = 1
    hosts: int = 1  # on which the job runs
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)  # by package; without those not installed
    horovod_error: str = ""  # why Horovod does not load
    horovod_for: str = ""  # the version of TensorFlow that Horovod was built for; empty if unknown
    built: tuple[str, ...] = ()  # of gloo, mpi, nccl: what Horovod was built with
    controller: str = ""  # gloo or mpi: by which of them the ranks of this job were started; empty if alone
    interfaces: tuple[Interface, ...] = ()
    taken: str = ""  # the interface that horovodrun has taken; empty if alone
    default_route: str = ""  # the interface to other networks
    name_resolves: bool = True  # whether the host finds an address for its own name
    has_ssh: bool = True
    reached: Mapping[str, str] = dataclasses.field(default_factory=dict)  # each host tried: "" if ssh works, or why not
    clocks: Mapping[str, float] = dataclasses.field(default_factory=dict)  # of hosts tried: seconds ahead of this one
    clock: float = 0.0  # seconds ahead of rank 0
    cores: int = 1  # that the processes of this host may use
    threads: int = 0  # of TensorFlow inside of an operation, as set for this rank; 0: one for each core
    gpus: int = 0
    kernels: str = "native"  # those of the compressors, or "xla"
    native_missing: str = ""  # why there are no native kernels; empty if there are
    tensorflow_cuda: bool = False
    open_files: int = 2**20  # the limit of this process
    locked_memory: int = -1  # its limit, bytes; -1: none
    rdma: tuple[str, ...] = ()  # InfiniBand or RoCE devices
    settings: Mapping[str, str] = dataclasses.field(default_factory=dict)  # HVD_COMPRESS and the like
    settings_error: str = ""  # what is wrong with them

    def interface(self) -> Interface | None:
        """The interface that this job uses; if this process is alone, that of the default route."""
        names = {each.name: each for each in self.interfaces}
        return names.get(self.taken or self.default_route)

    def candidates(self) -> list[Interface]:
        """The interfaces among which horovodrun chooses for several hosts, if none is named."""
        return [each for each in self.interfaces if not each.address.startswith("127.")]


def per_host(ranks: Sequence[Facts]) -> list[Facts]:
    """The first rank of each host."""
    return list({facts.host: facts for facts in reversed(ranks)}.values())[::-1]


def whose(ranks: Sequence[Facts], facts: Sequence[Facts]) -> str:
    """These ranks in words: "this host", "ranks 0, 1 (host a)", ..., of all `ranks`."""
    if len(ranks) == 1:
        return "this host"
    numbers = [str(each.rank) for each in facts]
    shown = ", ".join(numbers[:6]) + (f" and {len(numbers) - 6} more" if len(numbers) > 6 else "")
    hosts = sorted({each.host for each in facts})
    places = f"host {hosts[0]}" if len(hosts) == 1 else f"hosts {', '.join(hosts[:4])}" + (", ..." if hosts[4:] else "")
    return f"rank{'s' if len(numbers) > 1 else ''} {shown} ({places})"
