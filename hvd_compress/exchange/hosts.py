"""Hosts with several workers: where the workers run, and the process sets for an exchange in two levels."""

from __future__ import annotations

import atexit
import dataclasses
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

T = TypeVar("T")

# In `hierarchical=`.
CHOICES = ("auto", True, False)
# Seconds for which a rank that ends waits for the other hosts.
_PATIENCE = 10.0
# So many times a second all ranks together ask the key-value store, which is written in Python.
_REQUESTS = 500


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
    hosts first. The ranks tell each other where they run over the key-value store by which they find each other:
    Horovod wants to know process sets when it begins. When a rank ends there, it waits for the others, 10 seconds at
    most. Elsewhere (a single host, or one worker per host) nothing else happens than with `hvd.init()`.

    Where Horovod is initialized already, this does nothing, as `hvd.init()`. In an elastic job, with a `comm`, where
    the job was not started with Gloo (MPI has no such store), and where hosts have different numbers of workers, the
    exchange stays flat; rank 0 says so in one line.

    Args:
        comm: As Horovod's.
        process_sets: As Horovod's: yours, besides.

    Raises:
        RuntimeError: A rank was not heard of within HOROVOD_GLOO_TIMEOUT_SECONDS, 30 if not set.
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
        hvd.init(comm, process_sets)
        if hvd.size() == hvd.local_size():
            _why = _obstacle([range(hvd.size())])
        elif hvd.size() > hvd.cross_size():
            _say(_why)
        return
    mine = list(process_sets) if process_sets and not isinstance(process_sets, str) else []
    known = {tuple(each.ranks): each for each in mine if each.ranks is not None}
    wanted = [*hosts, *(list(ranks) for ranks in zip(*hosts))]
    made = [known.get(tuple(ranks)) or hvd.ProcessSet(ranks) for ranks in wanted]
    new = [each for each in made if each not in mine]
    if isinstance(process_sets, str):  # "dynamic"
        hvd.init(comm, process_sets)
        for each in new:
            hvd.add_process_set(each)
    else:
        hvd.init(comm, [*mine, *new])
    local, across = (each for each in made if each.included())
    _found = Hosts(local, across)
    _wait_at_exit()


def _unknown(comm: Any) -> str:
    """Why the ranks cannot be asked where they run before Horovod begins; empty where they can."""
    if os.environ.get("HOROVOD_ELASTIC") == "1":
        return "in an elastic job process sets do not outlive a reset"
    if comm is not None:
        return "hvdc.init() has a comm"
    if "HOROVOD_GLOO_RENDEZVOUS_ADDR" not in os.environ and int(os.environ.get("HOROVOD_SIZE", 2)) > 1:
        return "the job was not started with Gloo (horovodrun --gloo)"
    return ""


def _places() -> list[tuple[int, int]]:
    """Cross rank and local rank of each rank."""
    rank, size, cross, local = (
        int(os.environ.get(f"HOROVOD_{name}", default))
        for name, default in (("RANK", 0), ("SIZE", 1), ("CROSS_RANK", 0), ("LOCAL_RANK", 0))
    )
    if size == 1:
        return [(cross, local)]
    seconds = float(os.environ.get("HOROVOD_GLOO_TIMEOUT_SECONDS", 30))
    until = time.monotonic() + seconds
    store = (
        os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"], os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"], "hvdc_hosts",
    )  # fmt: skip

    def patiently(action: Callable[[], T], failed: str) -> T:
        while True:
            try:
                return action()
            # RuntimeError: not there yet, or no connection. The others: the store hears few ranks at a time, and hangs
            # up on more of them.
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

    # One rank collects, so that each has few requests to make.
    if rank > 0:
        write(f"rank_{rank}", (cross, local))
        return read("all_ranks")
    found = [(cross, local), *(read(f"rank_{other}") for other in range(1, size))]
    write("all_ranks", found)
    return found


def _wait_at_exit() -> None:
    """Lets this rank, when it ends, wait until all other ranks end, too.

    Within its last step a host hands the sums around among its own workers, and does not hear how far other hosts are.
    When the first rank ends, Horovod ends on all, and a host that is not through with that would fail in the last step
    of a training that went well. After an error of its own a rank does not wait: the others wait for it in their
    step. Who calls sys.exit, or evaluates for long while others end, is waited for no longer than some seconds.
    """
    ending = threading.Event()

    @tf.function(autograph=False)  # Horovod has no names of operations outside of functions
    def together() -> tf.Tensor:
        return hvd.allreduce(tf.zeros([]), name="hvdc_end", op=hvd.Sum)

    def meet() -> None:
        ending.wait()
        try:
            if current() is not None:
                together()
        except (ValueError, tf.errors.OpError):  # Horovod has ended
            pass

    # A thread, since Horovod's wait has no limit; begun now, since none may begin when Python ends.
    waiting = threading.Thread(target=meet, name="hvdc_end", daemon=True)
    waiting.start()

    # Before Horovod's own, registered by hvd.init().
    @atexit.register
    def wait() -> None:
        if not hasattr(sys, "last_value"):
            ending.set()
            waiting.join(_PATIENCE)


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


def usable(process_set: Any, hierarchical: bool | str) -> Hosts | None:
    """The hosts between which the ranks of a process set exchange gradients; None if they are not known.

    Raises:
        ValueError: `hierarchical` is True, and there are no such hosts.
    """
    hosts = current() if process_set is hvd.global_process_set else None
    if hosts is None and hierarchical is True:
        why = _why or "Horovod was initialized anew without hvdc.init()"
        raise ValueError(
            "hierarchical=True needs several hosts with the same number of workers, more than one, and "
            f"hvdc.init() in place of hvd.init(): {why}"
        )
    return hosts
