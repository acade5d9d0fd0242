"""Hosts of several workers: on which host each rank runs, and the process sets of the hierarchical exchange."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from http.client import HTTPException
from typing import Any, TypeVar

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.runner.http import http_client
from horovod.tensorflow.mpi_ops import _basics

from ..common.elastic import is_elastic
from ..common.verbosity import say
from . import connections

T = TypeVar("T")

# The values of `hierarchical=`.
CHOICES = ("auto", True, False)
# Seconds for which a rank that has finished waits for the other hosts.
_PATIENCE = 10.0
# Requests per second of all ranks together to the key-value store, which is written in Python.
_REQUESTS = 500


@dataclasses.dataclass(frozen=True)
class Hosts:
    """Several hosts with the same number of workers, more than one, and the process sets of this rank."""

    local: Any  # the workers of this rank's host
    across: Any  # the workers in this rank's place on all hosts, one on each

    @property
    def count(self) -> int:
        """The number of hosts."""
        return len(self.across.ranks)

    @property
    def workers(self) -> int:
        """The number of workers on each host."""
        return len(self.local.ranks)


_called = False
_found: Hosts | None = None
_why = "hvdc.init() was not called in place of hvd.init()"  # the reason why there are no hosts


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Initializes Horovod as `hvd.init()` does, and prepares the hierarchical exchange.

    Call it in place of `hvd.init()`, on all ranks. If there are several hosts of several workers, it creates two
    process sets for each rank: the workers of its host, and the workers in its place on all hosts. With them,
    `hierarchical="auto"` of `hvdc.DistributedOptimizer` and `hvdc.DistributedGradientTape` may sum gradients within
    hosts first. Horovod needs process sets when it starts, so the ranks exchange their places before, over the
    key-value store of `horovodrun`. A rank that has finished waits for the others, 10 seconds at most. With a single
    host, or one worker per host, this is the same as `hvd.init()`.

    If Horovod is initialized already, this does nothing, like `hvd.init()`. The exchange stays flat in an elastic job,
    with a `comm`, if the job was not started with Gloo (MPI has no such store), and if hosts have different numbers of
    workers; rank 0 prints the reason in one line. In an elastic job, Horovod is initialized again if a worker is lost
    meanwhile, and `hvdc.elastic.run` makes all workers see at once that one was lost.

    Args:
        comm: As in `hvd.init()`.
        process_sets: As in `hvd.init()`; these are created, too.

    Raises:
        RuntimeError: A rank did not report within HOROVOD_GLOO_TIMEOUT_SECONDS, 30 if not set.
    """
    global _called, _found, _why
    if hvd.is_initialized():
        if not _called:
            _why = "Horovod was initialized before hvdc.init()"
            _say(_why)
        return
    _called, _found, _why = True, None, _unknown(comm)
    hosts = [] if _why else grouped(_places())
    _why = _why or _obstacle(hosts)
    if _why:
        if is_elastic():
            connections.connect(functools.partial(hvd.init, comm, process_sets))
        else:
            hvd.init(comm, process_sets)
        if hvd.size() == hvd.local_size():
            _why = _obstacle([range(hvd.size())])
        elif hvd.size() > hvd.cross_size():
            _say(_why)
        return
    given = list(process_sets) if process_sets and not isinstance(process_sets, str) else []
    known = {tuple(one.ranks): one for one in given if one.ranks is not None}
    wanted = [*hosts, *(list(ranks) for ranks in zip(*hosts))]
    sets = [known.get(tuple(ranks)) or hvd.ProcessSet(ranks) for ranks in wanted]
    new = [one for one in sets if one not in given]
    if isinstance(process_sets, str):  # "dynamic"
        hvd.init(comm, process_sets)
        for one in new:
            hvd.add_process_set(one)
    else:
        hvd.init(comm, [*given, *new])
    local, across = (one for one in sets if one.included())
    _found = Hosts(local, across)
    _wait_at_exit()


def _unknown(comm: Any) -> str:
    """Why the places of the ranks cannot be known before Horovod starts; empty if they can."""
    if is_elastic():
        return "in an elastic job process sets do not outlive a reset"
    if comm is not None:
        return "hvdc.init() has a comm"
    if "HOROVOD_GLOO_RENDEZVOUS_ADDR" not in os.environ and int(os.environ.get("HOROVOD_SIZE", 2)) > 1:
        return "the job was not started with Gloo (horovodrun --gloo)"
    return ""


def _places() -> list[tuple[int, int]]:
    """The cross rank and local rank of each rank."""
    rank, size, cross, local = (
        int(os.environ.get(f"HOROVOD_{name}", default))
        for name, default in (("RANK", 0), ("SIZE", 1), ("CROSS_RANK", 0), ("LOCAL_RANK", 0))
    )
    if size == 1:
        return [(cross, local)]
    seconds = float(os.environ.get("HOROVOD_GLOO_TIMEOUT_SECONDS", 30))
    until = time.monotonic() + seconds
    address, port = (os.environ[f"HOROVOD_GLOO_RENDEZVOUS_{name}"] for name in ("ADDR", "PORT"))
    store = address, port, "hvdc_hosts"

    def patiently(action: Callable[[], T], failed: str) -> T:
        while True:
            try:
                return action()
            # RuntimeError: no such key yet, or no connection. The others: the store serves few ranks at a time, and
            # closes the connections of more.
            except (RuntimeError, OSError, HTTPException):
                if time.monotonic() > until:
                    raise RuntimeError(
                        f"hvdc.init() {failed} within {seconds:g} s: look for what that process "
                        "printed, and if it only began late, raise HOROVOD_GLOO_TIMEOUT_SECONDS"
                    ) from None
                time.sleep(max(0.02, size / _REQUESTS))

    def read(key: str) -> Any:
        return patiently(lambda: http_client.read_data_from_kvstore(*store, key), f"has not heard of {key}")

    def write(key: str, value: Any) -> None:
        patiently(lambda: http_client.put_data_into_kvstore(*store, key, value), "has not reached horovodrun")

    # Rank 0 collects all places, so that each other rank makes few requests.
    if rank > 0:
        write(f"rank_{rank}", (cross, local))
        return read("all_ranks")
    places = [(cross, local), *(read(f"rank_{other}") for other in range(1, size))]
    write("all_ranks", places)
    return places


def _wait_at_exit() -> None:
    """Makes this rank, when it exits, wait until all other ranks exit, too.

    The last transfers of a step are within a host, so a host does not know whether other hosts have finished theirs.
    When the first rank exits, Horovod shuts down on all ranks. A host that is still busy would then fail in the last
    step of a successful training. After an error of its own a rank does not wait, because the others are waiting for it
    in their step. A rank that calls sys.exit, or evaluates for long while others exit, delays them by some seconds.
    """
    ending = threading.Event()

    @tf.function(autograph=False)  # outside of functions Horovod's operations have no names
    def together() -> tf.Tensor:
        return hvd.allreduce(tf.zeros([]), name="hvdc_end", op=hvd.Sum)

    def meet() -> None:
        ending.wait()
        try:
            if current() is not None:
                together()
        except (ValueError, tf.errors.OpError):  # Horovod has shut down
            pass

    # In a thread, because Horovod waits without a limit; started now, because Python starts no threads when it exits.
    waiting = threading.Thread(target=meet, name="hvdc_end", daemon=True)
    waiting.start()

    # Registered after Horovod's own handler, so it runs before it.
    @atexit.register
    def wait() -> None:
        if not hasattr(sys, "last_value"):
            ending.set()
            waiting.join(_PATIENCE)


def grouped(places: Sequence[tuple[int, int]]) -> list[list[int]]:
    """The ranks of each host, in the order of their local ranks.

    `places` are the cross rank and local rank of each rank, as Horovod counts them. If hosts have different numbers of
    workers, a cross rank is not the number of a host; the lists returned then have different lengths, too.
    """
    hosts: dict[int, list[tuple[int, int]]] = {}
    for rank, (cross, local) in enumerate(places):
        hosts.setdefault(cross, []).append((local, rank))
    return [[rank for _, rank in sorted(hosts[cross])] for cross in sorted(hosts)]


def _obstacle(hosts: Sequence[Sequence[int]]) -> str:
    """Why there is no hierarchical exchange between these hosts; empty if there is."""
    workers = {len(host) for host in hosts}
    if len(hosts) == 1:
        return f"there is one host, with {len(hosts[0])} workers"
    if workers == {1}:
        return f"each of {len(hosts)} hosts has one worker"
    if len(workers) > 1:
        return "hosts have different numbers of workers"
    return ""


def _say(why: str) -> None:
    if hvd.rank() == 0:
        say(f"the exchange stays flat: {why}")


def current() -> Hosts | None:
    """The hosts that `init` has found, as long as Horovod knows their process sets."""
    if _found is None:
        return None
    registered = _basics._get_process_set_ids_and_ranks()
    sets = (_found.local, _found.across)
    return _found if all(registered.get(one.process_set_id) == one.ranks for one in sets) else None


def usable(process_set: Any, hierarchical: bool | str) -> Hosts | None:
    """The hosts between which the ranks of a process set exchange gradients; None if they are not known.

    Raises:
        ValueError: `hierarchical` is True, and there are no such hosts.
    """
    hosts = current() if process_set is hvd.global_process_set else None
    if hosts is None and hierarchical is True:
        raise ValueError(
            "hierarchical=True needs several hosts with the same number of workers, more than one, and hvdc.init() in "
            f"place of hvd.init(): {_why or 'Horovod was initialized anew without hvdc.init()'}"
        )
    return hosts
