"""Where workers run."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from http.client import IncompleteRead

import pytest
from horovod.runner.http.http_server import RendezvousServer
from hypothesis import given
from hypothesis import strategies as st

import hvd_compress as hvdc
from hvd_compress.engine.settings import Settings
from hvd_compress.exchange import hosts, volume
from hvd_compress.exchange.allgather import Allgather
from hvd_compress.exchange.choice import choose
from hvd_compress.exchange.hierarchical import HostCounts
from hvd_compress.exchange.scatter_reduce import ScatterReduce


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.randoms())
def test_two_levels_only_where_all_hosts_have_as_many_workers(workers, random):
    slots = [(host, local) for host, count in enumerate(workers) for local in range(count)]
    random.shuffle(slots)  # ranks need not follow each other
    # A cross rank counts the hosts that have a worker of this local rank, as Horovod does.
    places = [(sum(workers[h] > local for h in range(host)), local) for host, local in slots]
    found = hosts.grouped(places)
    even = len(set(workers)) == 1
    assert (not hosts._obstacle(found)) == (even and len(workers) > 1 and workers[0] > 1)
    if even:
        expected = [[slots.index((host, local)) for local in range(workers[0])] for host in range(len(workers))]
        assert found == expected


def test_where_ranks_cannot_be_asked(monkeypatch):
    monkeypatch.setenv("HOROVOD_SIZE", "4")
    assert "not started with Gloo" in hosts._unknown(None)  # by MPI
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", "127.0.0.1")
    assert hosts._unknown(None) == ""
    assert "has a comm" in hosts._unknown([0, 1])
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    assert "do not outlive a reset" in hosts._unknown(None)


@pytest.fixture
def rank(monkeypatch):
    """Lets a thread act for a rank, by the variables that horovodrun sets."""
    here = threading.local()
    monkeypatch.setattr(hosts.os, "environ", Environment(here))

    def act(variables):
        here.variables = variables
        return hosts._places()

    return act


class Environment(dict):
    def __init__(self, here):
        self.here = here

    def __getitem__(self, name):
        return self.here.variables[name]

    def get(self, name, default=None):
        return self.here.variables.get(name, default)


def variables_of(rank, size, port, seconds=30):
    places = {"RANK": rank, "SIZE": size, "CROSS_RANK": rank // 2, "LOCAL_RANK": rank % 2}
    gloo = {"RENDEZVOUS_ADDR": "127.0.0.1", "RENDEZVOUS_PORT": str(port), "TIMEOUT_SECONDS": str(seconds)}
    return {
        **{f"HOROVOD_{name}": str(value) for name, value in places.items()},
        **{f"HOROVOD_GLOO_{name}": value for name, value in gloo.items()},
    }


@pytest.fixture
def store():
    """The port of Horovod's key-value store."""
    server = RendezvousServer()
    yield server.start()
    server.stop()


def test_all_ranks_hear_where_all_ranks_are(rank, store):
    variables = [variables_of(r, 6, store) for r in range(6)]
    with ThreadPoolExecutor(6) as threads:
        found = list(threads.map(rank, variables, timeout=60))
    assert found == [[(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]] * 6


@pytest.mark.parametrize("error", [ConnectionResetError, IncompleteRead(b""), RuntimeError], ids=repr)
def test_a_store_that_hangs_up_is_asked_again(rank, store, monkeypatch, error):
    for name in ("read_data_from_kvstore", "put_data_into_kvstore"):
        monkeypatch.setattr(hosts.http_client, name, hanging_up(getattr(hosts.http_client, name), error))
    variables = [variables_of(r, 3, store) for r in range(3)]
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(rank, variables, timeout=60))
    assert found == [[(0, 0), (0, 1), (1, 0)]] * 3


def hanging_up(function, error):
    """Raises the error at each thread's first call."""
    seen = threading.local()

    def called(*arguments):
        if not hasattr(seen, "once"):
            seen.once = True
            raise error
        return function(*arguments)

    return called


def test_a_store_that_is_not_there_is_named(rank):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(RuntimeError, match="has not reached horovodrun within 0.2 s"):
        rank(variables_of(1, 3, port, 0.2))


def test_who_does_not_come_is_named(rank, store):
    with pytest.raises(RuntimeError, match=r"has not heard of rank_1 within 0.2 s: look for"):
        rank(variables_of(0, 3, store, 0.2))
    with pytest.raises(RuntimeError, match=r"has not heard of all_ranks within 0.2 s: look for"):
        rank(variables_of(2, 3, store, 0.2))


def test_what_may_be_asked_for():
    int8, topk = hvdc.Compression.int8, hvdc.Compression.topk(0.01)
    assert Settings(int8).hierarchical == "auto"
    for wrong in ("yes", 1.5, None, "True"):
        with pytest.raises(ValueError, match="hierarchical must be 'auto', True or False, got"):
            Settings(int8, hierarchical=wrong)
    with pytest.raises(ValueError, match="hierarchical=True and momentum_correction cannot go together"):
        Settings(topk, hierarchical=True, momentum_correction=0.9)
    Settings(topk, momentum_correction=0.9)


def test_what_leaves_a_host():
    """Against what a link between hosts carries, counted message by message."""
    int8, hosts_, workers = hvdc.Compression.int8, 3, 2
    ranks = hosts_ * workers
    chunks = [(2**16,)] * 12
    payload = 2**16 + 2**16 // 256 * 8

    def flagged(count):
        return volume.flagged_bytes(count * payload)

    def host(rank):
        return rank // workers

    ring = sum(host(r) != host((r + 1) % ranks) for r in range(workers))  # messages per round
    assert Allgather().leaving_host(int8, chunks, hosts_, workers) == ring * (ranks - 1) * flagged(12)
    away = sum(host(a) == 0 != host(b) for a in range(ranks) for b in range(ranks))
    both = (away + ring * (ranks - 1)) * flagged(2)
    assert ScatterReduce().leaving_host(int8, chunks, hosts_, workers) == both
    # Six chunks for each worker, two of them for each of the three that have its place.
    assert choose(int8, chunks[:6], hosts_).name == "scatter_reduce"
    three = choose(int8, chunks, ranks, HostCounts(hosts_, workers))
    assert three.leaving_host(int8, chunks, hosts_, workers) == workers * 2 * 2 * flagged(2)
    two = choose(int8, chunks, 2 * workers, HostCounts(2, workers))
    assert two.name == three.name == "two_level"
    assert two.leaving_host(int8, chunks, 2, workers) == workers * flagged(6)
    assert not choose(hvdc.Compression.randomk(0.1), chunks, 4, HostCounts(2, 2)).hierarchical
    assert not choose(int8, chunks, 10, HostCounts(2, 5)).hierarchical
    assert not choose(int8, [(8,), (9,)], 4, HostCounts(2, 2)).hierarchical
