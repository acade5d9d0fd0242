"""Hosts with several workers: where the workers run, and the process sets for an exchange in two levels."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import horovod.tensorflow as hvd
from horovod.tensorflow.mpi_ops import _basics

if TYPE_CHECKING:
    from .settings import Settings

# In `hierarchical=`.
CHOICES = ("auto", True, False)


@dataclasses.dataclass(frozen=True)
class Hosts:
    """Several hosts with as many workers each, more than one; this rank's process sets there.

    Attributes:
        local: The workers of this rank's host.
        across: The workers of this rank's place on all hosts, one on each.
    """

    local: Any
    across: Any

    @property
    def count(self) -> int:
        """How many hosts."""
        return len(self.across.ranks)

    @property
    def workers(self) -> int:
        """On each of them."""
        return len(self.local.ranks)


_called = False
_found: Hosts | None = None
_why = "hvdc.init() was not called in place of hvd.init()"  # there are no Hosts


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Initializes Horovod as `hvd.init()` does, and prepares the exchange in two levels.

    In place of `hvd.init()`, on all ranks. Where several hosts have several workers each, it makes two process sets
    that each rank belongs to: the workers of its host, and those of its place on all hosts. With them
    `hierarchical="auto"` of `hvdc.DistributedOptimizer` and `hvdc.DistributedGradientTape` may sum gradients inside of
    hosts first. Horovod must know process sets when it begins, so it is initialized twice there, which takes half a
    second. Elsewhere (a single host, or one worker per host) nothing else happens than with `hvd.init()`.

    Where Horovod is initialized already, this does nothing, as `hvd.init()`. In an elastic job, and where hosts have
    different numbers of workers, the exchange stays flat; rank 0 says so in one line.

    Args:
        comm: As Horovod's.
        process_sets: As Horovod's: yours, besides.
    """
    global _called, _found, _why
    if hvd.is_initialized():
        if not _called:
            _why = "Horovod was initialized before hvdc.init()"
            _say(_why)
        return
    _called, _found = True, None
    hvd.init(comm, process_sets)
    places = [(0, 0)]
    if hvd.size() > 1:
        places = hvd.allgather_object((hvd.cross_rank(), hvd.local_rank()), name="hvdc_hosts")
    hosts = grouped(places)
    _why = _obstacle(hosts)
    if _why:
        if len(hosts) > 1 and max(map(len, hosts)) > 1:
            _say(_why)
        return
    mine = list(process_sets) if process_sets and not isinstance(process_sets, str) else []
    known = {tuple(each.ranks): each for each in mine if each.ranks is not None}
    wanted = [*hosts, *(list(ranks) for ranks in zip(*hosts))]
    made = [known.get(tuple(ranks)) or hvd.ProcessSet(ranks) for ranks in wanted]
    hvd.shutdown()
    hvd.init(comm, [*mine, *(each for each in made if each not in mine)])
    local, across = (each for each in made if each.included())
    _found = Hosts(local, across)


def grouped(places: Sequence[tuple[int, int]]) -> list[list[int]]:
    """The ranks of each host, in the order of their local ranks.

    Args:
        places: Cross rank and local rank of each rank, as Horovod counts them. Where hosts have different numbers of
            workers, a cross rank is no host's number; what is returned then has different lengths, too.
    """
    found: dict[int, list[tuple[int, int]]] = {}
    for rank, (cross, local) in enumerate(places):
        found.setdefault(cross, []).append((local, rank))
    return [[rank for _, rank in sorted(found[cross])] for cross in sorted(found)]


def _obstacle(hosts: Sequence[Sequence[int]]) -> str:
    """What stands in the way of two levels between these hosts; empty where nothing does."""
    workers = {len(host) for host in hosts}
    if len(hosts) == 1:
        return f"there is one host, with {len(hosts[0])} workers"
    if workers == {1}:
        return f"each of {len(hosts)} hosts has one worker"
    if len(workers) > 1:
        return "hosts have different numbers of workers"
    if os.environ.get("HOROVOD_ELASTIC") == "1":
        return "in an elastic job process sets do not outlive a reset"
    return ""


def _say(why: str) -> None:
    if hvd.rank() == 0:
        print(f"hvd_compress: the exchange stays flat: {why}", file=sys.stderr, flush=True)


def current() -> Hosts | None:
    """What `init` has found, as long as Horovod knows the process sets."""
    if _found is None:
        return None
    registered = _basics._get_process_set_ids_and_ranks()
    sets = (_found.local, _found.across)
    return _found if all(registered.get(each.process_set_id) == each.ranks for each in sets) else None


def of_settings(settings: Settings) -> Hosts | None:
    """The hosts between which gradients are reduced, None where they are not known.

    Raises:
        ValueError: `hierarchical=True` is asked for, and there are none.
    """
    found = current() if settings.process_set is hvd.global_process_set else None
    if found is None and settings.hierarchical is True:
        why = _why or "Horovod was initialized anew without hvdc.init()"
        raise ValueError(
            "hierarchical=True needs several hosts with the same number of workers, more than one, and "
            f"hvdc.init() in place of hvd.init(): {why}"
        )
    return found
