"""Formulas of collectives against the simulation, and both against counting by hand."""

import dataclasses
import math

import networkx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_compress.cost import FatTree, Link, Ring, Star, Tree, TwoLevel, simulate

LINK = Link(1e-4, 8e-9)  # 1 Gbit/s
LINKS = st.builds(Link, st.floats(1e-6, 1e-2), st.floats(1e-11, 1e-7))
SIZES = st.floats(1.0, 1e9)
POWERS = st.sampled_from([2, 4, 8])


@settings(deadline=None, max_examples=40)
@given(LINKS, st.integers(2, 9), SIZES)
def test_ring_on_a_switch_takes_what_the_formula_says(link, n, nbytes):
    nodes = range(n)
    graph = simulate.switch(nodes, link)
    ring = Ring(link, n)
    for schedule, seconds in (
        (simulate.ring_allreduce(nodes, nbytes), ring.allreduce(nbytes)),
        (simulate.ring_allgather(nodes, nbytes), ring.allgather(nbytes)),
        (simulate.pairwise_alltoall(nodes, nbytes), ring.alltoall(nbytes)),
    ):
        assert simulate.simulate(graph, schedule) == pytest.approx(seconds, rel=1e-6)


@pytest.mark.parametrize("topology, sent", [
    (Ring(LINK, 4), (2 * 3 / 4, 3, 3 / 4)), (Tree(LINK, 4), (2, 3, 2 / 2)), (Star(LINK, 4), (8, 16, 6)),
    (FatTree(LINK, 4, 2), (2 * 3 / 4, 3, 3 / 4)),
    (TwoLevel(LINK, Link(0.0, 0.0), 4, 1), (2 * 3 / 4, 3, 3 / 4)),
])  # fmt: skip
def test_a_burst_passes_at_once(topology, sent):
    """All that a link sends in a collective but the burst takes time."""
    bursting = dataclasses.replace(topology, link=dataclasses.replace(LINK, burst=1e5))
    for name, times in zip(("allreduce", "allgather", "alltoall"), sent):
        for nbytes in (1e3, 1e5, 1e6):
            shorter = min(1e5, times * nbytes) * LINK.beta
            found = getattr(topology, name)(nbytes) - getattr(bursting, name)(nbytes)
            assert found == pytest.approx(shorter, rel=1e-6), (name, nbytes)


@settings(deadline=None, max_examples=40)
@given(LINKS, POWERS, SIZES)
def test_tree_on_a_switch_takes_what_the_formula_says(link, n, nbytes):
    nodes = range(n)
    graph = simulate.switch(nodes, link)
    tree = Tree(link, n)
    allreduce = simulate.simulate(graph, simulate.tree_allreduce(nodes, nbytes))
    assert allreduce == pytest.approx(tree.allreduce(nbytes), rel=1e-6)
    allgather = simulate.simulate(graph, simulate.tree_allgather(nodes, nbytes))
    assert allgather == pytest.approx(tree.allgather(nbytes), rel=1e-6)


@settings(deadline=None, max_examples=40)
@given(LINKS, st.integers(2, 9), SIZES)
def test_star_shares_the_servers_link(link, n, nbytes):
    graph = simulate.switch([*range(n), "server"], link)
    seconds = simulate.simulate(graph, simulate.star_allreduce(range(n), "server", nbytes))
    assert seconds == pytest.approx(Star(link, n).allreduce(nbytes), rel=1e-6)


def test_flows_share_an_edge_and_the_rest_of_another():
    """a and b both send over one edge of 1 byte/s; c's flow shares the second one with b's half."""
    graph = networkx.DiGraph()
    graph.add_edge("x", "y", alpha=0.0, beta=1.0)
    graph.add_edge("y", "z", alpha=0.0, beta=0.5)
    # x -> y carries two flows at 1/2 each; y -> z has 2 bytes/s, of which one flow takes 1/2: 3/2 are left.
    messages = [
        simulate.Message("x", "y", 10.0), simulate.Message("x", "z", 10.0), simulate.Message("y", "z", 30.0)
    ]  # fmt: skip
    assert simulate.simulate(graph, [messages]) == pytest.approx(20.0)
    # With 60 bytes the last one goes on alone, at 2 bytes/s, after 20 s: 30 are left.
    messages[2] = simulate.Message("y", "z", 60.0)
    assert simulate.simulate(graph, [messages]) == pytest.approx(20.0 + 15.0)


def test_latency_is_that_of_the_way():
    graph = networkx.Graph()
    graph.add_edge("a", "b", alpha=0.25, beta=0.0)
    graph.add_edge("b", "c", alpha=0.5, beta=0.1)
    assert simulate.simulate(graph, [[simulate.Message("a", "c", 10.0)]]) == pytest.approx(1.75)
    # Both directions at once.
    there_and_back = [simulate.Message("b", "c", 10.0), simulate.Message("c", "b", 10.0)]
    assert simulate.simulate(graph, [there_and_back]) == pytest.approx(1.5)


def test_a_node_does_not_wait_for_others_than_its_partners():
    graph = simulate.switch("abcd", Link(0.0, 1.0))
    rounds = [
        [simulate.Message("a", "b", 1.0), simulate.Message("c", "d", 5.0)],
        [simulate.Message("a", "b", 2.0)],
    ]
    assert simulate.simulate(graph, rounds) == pytest.approx(5.0)
    rounds[1] = [simulate.Message("a", "d", 2.0)]  # d is busy until 5
    assert simulate.simulate(graph, rounds) == pytest.approx(7.0)


def test_what_cannot_be_simulated_is_named():
    graph = networkx.DiGraph()
    graph.add_edge("a", "b", alpha=0.0, beta=1.0)
    with pytest.raises(ValueError, match="no way leads from b to a"):
        simulate.simulate(graph, [[simulate.Message("b", "a", 1.0)]])
    graph.add_edge("b", "c", alpha=0.0)
    with pytest.raises(ValueError, match="from b to c needs alpha and beta"):
        simulate.simulate(graph, [])
    with pytest.raises(ValueError, match="power of two of nodes, got 3"):
        simulate.tree_allreduce(range(3), 1.0)


def test_by_hand():
    link = Link(alpha=1.0, beta=10.0, gamma=100.0)
    # Four ranks, 8 bytes.
    assert Ring(link, 4).allreduce(8) == 6 * 1 + 6 * 2 * 10 + 3 * 2 * 100
    assert Ring(link, 4).allgather(8) == 3 * (1 + 80)
    assert Ring(link, 4).alltoall(8) == 3 * (1 + 20)
    assert Tree(link, 4).allreduce(8) == 2 * (1 + 80 + 800)
    assert Tree(link, 4).allgather(8) == 2 * 1 + 3 * 80
    assert Tree(link, 4).alltoall(8) == 2 * (1 + 40)
    assert Star(link, 4).allreduce(8) == 2 + 2 * 320 + 3200
    assert Star(link, 4).allgather(8) == 2 + (4 * 8 + 4 * 3 * 8) * 10
    assert Star(link, 4).alltoall(8) == 2 + 2 * 3 * 8 * 10


def test_two_levels():
    slow, fast = Link(1.0, 10.0), Link(0.01, 0.1)
    both = TwoLevel(slow, fast, hosts=2, workers=4)
    assert both.ranks == 8
    assert both.allreduce(8) == pytest.approx(Ring(fast, 4).allreduce(8) + Ring(slow, 2).allreduce(8))
    # Over the slow link goes less than a flat ring of all ranks sends.
    assert both.allreduce(1e6) < Ring(slow, 8).allreduce(1e6)
    # 4 ranks' bytes leave each host, whoever sends them.
    assert TwoLevel(slow, Link(0.0, 0.0), 2, 4).allgather(8) == 1.0 + 4 * 8 * 10.0
    assert TwoLevel(slow, Link(0.0, 0.0), 2, 4).alltoall(8) == 1.0 + 4 * 8 / 2 * 10.0
    for one in (TwoLevel(slow, fast, 3, 1), TwoLevel(fast, slow, 1, 3)):
        for collective in ("allreduce", "allgather", "alltoall"):
            assert getattr(one, collective)(9.0) == pytest.approx(getattr(Ring(slow, 3), collective)(9.0))


@pytest.mark.parametrize("shape", [Ring, Tree, Star])
def test_alone_there_is_nothing_to_do(shape):
    alone = shape(Link(1.0, 1.0, 1.0), 1)
    assert alone.allreduce(8) == alone.allgather(8) == alone.alltoall(8) == 0


def test_links():
    assert Link.of_rate(1e9, 1e-4) == Link(1e-4, 8e-9)
    for wrong in (-1.0, math.nan, math.inf, True, "1"):
        with pytest.raises(ValueError, match="beta must be a finite number of seconds"):
            Link(0.0, wrong)
    with pytest.raises(ValueError, match="the rate must be above 0"):
        Link.of_rate(0)
    for shape in (Ring, Tree, Star):
        with pytest.raises(ValueError, match=f"{shape.__name__}: ranks must be a whole number from 1 on"):
            shape(Link(0, 0), 0)
