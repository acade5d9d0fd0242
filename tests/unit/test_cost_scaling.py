"""Many ranks: the fat tree, the exchange in two levels, weak scaling."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_compress.cost import (
    CostModel,
    FatTree,
    KernelCost,
    Link,
    Ring,
    TwoLevel,
    pays,
    simulate,
    weak_scaling,
)

COLLECTIVES = ("allreduce", "allgather", "alltoall")
LINKS = st.builds(Link, st.floats(1e-6, 1e-2), st.floats(1e-11, 1e-7), st.floats(0, 1e-9))
SIZES = st.floats(1.0, 1e9)
SLOW, FAST = Link(1.0, 10.0), Link(0.01, 0.1)
KERNELS = {"none": KernelCost(), "quantize": KernelCost(1e-5, 5e-10, 1e-10, 2e-11)}
SIZE = 25 * 2**20


@settings(deadline=None, max_examples=60)
@given(
    st.builds(Link, st.floats(1e-6, 1e-2), st.floats(1e-11, 1e-7)),
    st.integers(2, 12),
    st.integers(1, 6),
    st.floats(1, 16),
    SIZES,
)
def test_a_fat_tree_takes_what_the_formula_says(link, n, k, oversubscription, nbytes):
    nodes = range(n)
    graph = simulate.fat_tree(nodes, link, k, oversubscription)
    tree = FatTree(link, n, k, oversubscription)
    for schedule, seconds in (
        (simulate.ring_allreduce(nodes, nbytes), tree.allreduce(nbytes)),
        (simulate.ring_allgather(nodes, nbytes), tree.allgather(nbytes)),
        (simulate.pairwise_alltoall(nodes, nbytes), tree.alltoall(nbytes)),
    ):
        assert simulate.simulate(graph, schedule) == pytest.approx(seconds, rel=1e-6)


def test_a_fat_tree_by_hand():
    # Eight ranks at two leaves of four, each leaf with links for two: two flows leave at full rate, four at half.
    tree = FatTree(Link(alpha=1.0, beta=10.0, gamma=100.0), 8, 4, 2)
    assert tree.leaves == 2
    assert tree.allreduce(8) == 14 * (1 + 10) + 7 * 100
    assert tree.allgather(8) == 7 * (1 + 80)
    # From a leaf 1, 2, 3, 4, 3, 2, 1 flows leave; each round takes as long as the slowest message.
    assert tree.alltoall(8) == 7 + 10 * (1 + 1 + 1.5 + 2 + 1.5 + 1 + 1)
    # Links for half of a rank: the ring feels it, too.
    assert FatTree(Link(0.0, 1.0), 8, 4, 8).allgather(8) == 7 * 8 * 2


@given(LINKS, st.integers(1, 4096), st.integers(1, 64), SIZES)
def test_a_core_as_wide_as_its_leaves_is_a_ring(link, n, k, nbytes):
    for name in COLLECTIVES:
        expected = getattr(Ring(link, n), name)(nbytes)
        assert getattr(FatTree(link, n, k), name)(nbytes) == pytest.approx(expected, rel=1e-9)
        # All ranks at one leaf never see the core.
        assert getattr(FatTree(link, n, n, 8.0), name)(nbytes) == pytest.approx(expected, rel=1e-9)


@given(LINKS, st.integers(2, 4096), st.integers(1, 64), st.floats(1, 32), st.floats(1, 2), SIZES)
def test_more_bytes_ranks_and_oversubscription_take_longer(link, n, k, oversubscription, more, nbytes):
    tree = FatTree(link, n, k, oversubscription)
    for name in COLLECTIVES:
        seconds = getattr(tree, name)(nbytes)
        assert seconds >= getattr(Ring(link, n), name)(nbytes) * (1 - 1e-9)
        assert getattr(tree, name)(nbytes * more) >= seconds
        narrower = FatTree(link, n, k, oversubscription * more)
        assert getattr(narrower, name)(nbytes) >= seconds * (1 - 1e-9)
        larger = FatTree(link, n + k, k, oversubscription)
        assert getattr(larger, name)(nbytes) >= seconds * (1 - 1e-9)


def test_far_flows_all_cross_the_core():
    """Of an alltoall between 4,096 ranks all but 1 / 128 leaves its leaf: four times as long as on a ring."""
    link = Link(0.0, 1e-9)
    ratio = FatTree(link, 4096, 32, 4).alltoall(1e6) / Ring(link, 4096).alltoall(1e6)
    assert 3.95 < ratio < 4.0
    assert FatTree(link, 4096, 32, 4).allgather(1e6) == Ring(link, 4096).allgather(1e6)


def test_a_fat_tree_refuses_what_it_cannot_be():
    with pytest.raises(ValueError, match="FatTree: ranks_per_leaf must be a whole number from 1 on, got 0"):
        FatTree(SLOW, 8, 0)
    for wrong in (0.5, float("nan"), float("inf"), True, "4"):
        with pytest.raises(ValueError, match="FatTree: oversubscription must be a number from 1 on"):
            FatTree(SLOW, 8, 4, wrong)


def test_two_levels_over_another_network():
    tree = FatTree(SLOW, 8, 4, 2)
    both = TwoLevel(SLOW, FAST, 8, 4, tree)
    assert both.allreduce(8) == Ring(FAST, 4).allreduce(8) + tree.allreduce(8)
    assert both.alltoall(8) == Ring(FAST, 4).alltoall(1) + tree.alltoall(32)
    assert TwoLevel(SLOW, FAST, 8, 4, Ring(SLOW, 8)).allgather(8) == TwoLevel(SLOW, FAST, 8, 4).allgather(8)
    with pytest.raises(ValueError, match="TwoLevel: network is one between 8 hosts, not between 4"):
        TwoLevel(SLOW, FAST, 4, 4, tree)
    for wrong in ("ring", both, 8):
        with pytest.raises(ValueError, match="TwoLevel: network must be a Ring, Star, Tree or FatTree between"):
            TwoLevel(SLOW, FAST, 32, 4, wrong)


@given(LINKS, LINKS, st.integers(2, 64), st.integers(2, 8), st.integers(1, 16), st.floats(1, 16), SIZES)
def test_two_levels_over_a_core_as_wide_as_its_leaves(link, local, hosts, workers, k, narrow, nbytes):
    def model(network):
        return CostModel(link, hosts * workers, TwoLevel(link, local, hosts, workers, network), KERNELS)

    ring, wide = model(None), model(FatTree(link, hosts, k))
    narrower = model(FatTree(link, hosts, k, narrow))
    for name in COLLECTIVES:
        seconds = getattr(ring.topology, name)(nbytes)
        assert getattr(wide.topology, name)(nbytes) == pytest.approx(seconds, rel=1e-9)
        assert getattr(narrower.topology, name)(nbytes) >= seconds * (1 - 1e-9)
    found = ring.predict("int8", nbytes, pattern="two_level").total
    assert wide.predict("int8", nbytes, pattern="two_level").total == pytest.approx(found, rel=1e-9)
    assert narrower.predict("int8", nbytes, pattern="two_level").total >= found * (1 - 1e-9)


def test_alone_there_is_nothing_to_do():
    alone = FatTree(SLOW, 1, 4, 8)
    assert alone.leaves == 1
    assert alone.allreduce(8) == alone.allgather(8) == alone.alltoall(8) == 0
    assert CostModel(SLOW, 1, alone, KERNELS).predict("int8", SIZE).total == 0.0


def test_payloads_in_two_levels_by_hand():
    link, local = Link(1e-4, 8e-9), Link(1e-6, 1e-10)
    payload = SIZE // 4 + SIZE // 4 // 256 * 8
    summed = 3 * 1e-6 + 3 / 4 * SIZE * 1e-10
    for network, slowdown in ((None, 1), (FatTree(link, 8, 2, 8), 4)):
        model = CostModel(link, 32, TwoLevel(link, local, 8, 4, network), KERNELS)
        found = model.predict("int8", SIZE, pattern="two_level", form="alpha_beta")
        assert (found.pattern, found.payload) == ("two_level", payload)
        # Between eight hosts 2 (h - 1) / h payloads, first in an alltoall, in which both of a leaf's hosts send through
        # the core but for the next and the last one; the four workers' quarters share their host's link.
        far = 5 * 2 * slowdown + 2 * slowdown if slowdown > 1 else 7
        wire = 2 * 7 * 1e-4 + payload / 8 * 8e-9 * (far + 7 * slowdown)
        handed = 3 * (1e-6 + payload / 4 * 1e-10)
        assert found.total == pytest.approx(wire + summed + handed)


def test_two_levels_need_hosts():
    with pytest.raises(ValueError, match="int8 between 4 ranks crosses as allgather or scatter_reduce, not"):
        CostModel(SLOW, 4, kernels=KERNELS).predict("int8", SIZE, pattern="two_level")


def test_weak_scaling():
    link = Link.of_rate(10e9, 5e-5)

    def step(n):
        assert n > 1
        return 0.1 + CostModel(link, n, kernels=KERNELS).predict("none", SIZE).total

    rows = weak_scaling(step, 0.1, [1, 2, 4096])
    assert rows[0] == (1, 0.1, 1.0)
    assert rows[1].step == pytest.approx(0.1 + 2 * 5e-5 + SIZE * 8e-10)
    assert rows[2].efficiency == pytest.approx(0.1 / (0.1 + 8190 * 5e-5 + 8190 / 4096 * SIZE * 8e-10))
    with pytest.raises(ValueError, match="weak_scaling: alone must be above 0 seconds, got 0"):
        weak_scaling(step, 0.0, [2])


def test_a_gathered_payload_pays_between_few_ranks_only():
    link, counts = Link.of_rate(10e9), [2**i for i in range(13)]

    def scaled(spec, pattern):
        def step(n):
            pattern_ = pattern if n > 2 else None
            return 1.0 + CostModel(link, n).predict(spec, SIZE, pattern_, "bandwidth").total

        return weak_scaling(step, 1.0, counts)

    plain = scaled("none", "allreduce")
    assert pays(plain, plain) == []
    # n - 1 payloads of 1 / 3.88 against 2 (n - 1) / n whole buckets: up to n = 7.75.
    assert pays(plain, scaled("int8", "allgather")) == [2, 4]
    assert pays(plain, scaled("int8", "scatter_reduce")) == counts[1:]
    with pytest.raises(ValueError, match="pays: both must be of the same numbers of ranks"):
        pays(plain, plain[:-1])
