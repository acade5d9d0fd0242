"""Predictions against sums by hand."""

import pytest
import tensorflow as tf
from specs import ONE_EACH

import hvd_compress as hvdc
from hvd_compress.cost import CostModel, KernelCost, Link, TwoLevel
from hvd_compress.cost.model import bits_per_element

LINK = Link(alpha=1e-4, beta=8e-9)  # 1 Gbit/s
KERNELS = {
    "none": KernelCost(),
    "quantize": KernelCost(call=1e-5, encode=5e-10, decode=1e-10, decode_rank=2e-11),
    "topk:ratio=0.01": KernelCost(encode=1.5e-9, decode=1e-9),
    "topk": KernelCost(encode=9e-9, decode=1e-9),
    "randomk": KernelCost(encode=1e-10, decode=1e-10),
}
SIZE = 25 * 2**20


def test_none_is_an_allreduce():
    prediction = CostModel(LINK, 4, kernels=KERNELS).predict("none", SIZE)
    assert (prediction.pattern, prediction.payload) == ("allreduce", SIZE)
    assert (prediction.encode, prediction.decode) == (0.0, 0.0)
    assert prediction.total == prediction.wire == pytest.approx(6 * 1e-4 + 1.5 * SIZE * 8e-9)


def test_allgather_of_quantized_values():
    model = CostModel(LINK, 4, kernels=KERNELS)
    prediction = model.predict("int4", SIZE, pattern="allgather")
    payload = hvdc.Compression.int4.wire_bytes(SIZE // 4)
    assert prediction.payload == payload == SIZE // 8 + SIZE // 4 // 256 * 8
    assert prediction.wire == pytest.approx(3 * (1e-4 + payload * 8e-9))
    assert prediction.encode == pytest.approx(1e-5 + SIZE * 5e-10)
    assert prediction.decode == pytest.approx(1e-5 + SIZE * (1e-10 + 4 * 2e-11))
    assert prediction.total == prediction.encode + prediction.wire + prediction.decode


def test_scatter_reduce_of_quantized_values():
    prediction = CostModel(LINK, 4, kernels=KERNELS).predict("int8", SIZE, pattern="scatter_reduce")
    payload = hvdc.Compression.int8.wire_bytes(SIZE // 4)
    assert prediction.wire == pytest.approx(2 * 3 * (1e-4 + payload / 4 * 8e-9))
    assert prediction.encode == pytest.approx(2 * 1e-5 + SIZE * 5e-10)
    expected = 2 * 1e-5 + SIZE / 4 * (1e-10 + 3 * 2e-11) + SIZE * (1e-10 + 2e-11)
    assert prediction.decode == pytest.approx(expected)


def test_the_faster_pattern_is_chosen():
    model = CostModel(LINK, 8, kernels=KERNELS)
    assert model.predict("int8", SIZE).pattern == "scatter_reduce"  # 1.75 payloads, not 7
    assert model.predict("int8", 1000).pattern == "allgather"  # 7 messages, not 14
    assert CostModel(LINK, 2, kernels=KERNELS).predict("int8", SIZE).pattern == "allgather"
    assert model.predict("randomk:ratio=0.1", SIZE).pattern == "allreduce"


def test_kernels_by_spec_and_by_name():
    model = CostModel(LINK, 2, kernels=KERNELS)
    assert model.cost_of("topk:ratio=0.01").encode == 1.5e-9
    assert model.cost_of("topk:ratio=0.1").encode == 9e-9
    with pytest.raises(ValueError, match="no kernel cost is known for onebit"):
        model.predict("onebit", SIZE)


def test_what_a_burst_saves_is_told_apart():
    link = Link(LINK.alpha, LINK.beta, burst=1e5)
    found = CostModel(link, 4).predict("int4", SIZE, "allgather")
    plain = CostModel(LINK, 4).predict("int4", SIZE, "allgather")
    assert found.latency == plain.latency == pytest.approx(3 * LINK.alpha)
    assert found.burst == pytest.approx(1e5 * LINK.beta) and plain.burst == 0.0
    assert found.wire + found.burst == pytest.approx(plain.wire)
    assert found.sustained.burst == 0.0 and found.sustained.total == pytest.approx(plain.total)
    assert CostModel(link, 4).predict("int4", 1e3, "allgather").wire == pytest.approx(3 * LINK.alpha)
    low_rank = CostModel(link, 4).predict("powersgd:rank=2", SIZE)
    assert low_rank.latency == pytest.approx(2 * 6 * LINK.alpha)


def test_simple_forms_leave_out_more_and_more():
    model = CostModel(LINK, 4, kernels=KERNELS)
    full, alpha_beta, bandwidth, k_bit = (
        model.predict("int4", SIZE, pattern="allgather", form=form)
        for form in ("full", "alpha_beta", "bandwidth", "k_bit")
    )
    assert alpha_beta.total == full.wire
    assert bandwidth.total == pytest.approx(full.wire - 3 * 1e-4)
    assert k_bit.total == pytest.approx(3 * SIZE / 8 * 8e-9)
    assert full.total > alpha_beta.total > bandwidth.total > k_bit.total


@pytest.mark.parametrize(
    "spec, bits",
    [
        ("none", 32), ("fp16", 16), ("bf16", 16), ("int8", 8), ("onebit", 1), ("topk:ratio=0.25", 8),
        ("hybrid:ratio=0.01,bits=4", 0.04), ("block_sparse:ratio=0.5,block=4", 16),
    ],
)  # fmt: skip
def test_bits_per_element(spec, bits):
    assert bits_per_element(spec) == pytest.approx(bits)


@pytest.mark.parametrize("spec", ONE_EACH)
def test_every_compressor_has_a_prediction_without_calibration(spec):
    for ranks in (2, 16):
        prediction = CostModel(link=LINK, ranks=ranks).predict(spec, nbytes=SIZE)
        assert 0 < prediction.wire < prediction.total or spec == "none"
        shape = (round((SIZE / 4) ** 0.5),) * 2 if spec.startswith("powersgd") else SIZE // 4
        assert prediction.payload == hvdc.Compression.parse(spec).wire_bytes(shape)


def test_low_rank_takes_two_allreduces():
    square = 1000
    for ranks in (2, 16):
        model = CostModel(link=Link(1e-3, 1e-9), ranks=ranks)
        found = model.predict("powersgd:rank=2", nbytes=4 * square**2)
        factor = 4 * 2 * square
        assert found.pattern == "low_rank" and found.payload == 2 * factor
        assert found.wire == pytest.approx(2 * model.topology.allreduce(factor))
        assert model.predict("powersgd:rank=2", 4 * square**2, form="k_bit").payload == found.payload


class Bytes(hvdc.Compressor):
    """A user's own: a byte per element."""

    def compress(self, tensor):
        return tf.cast(tf.round(tensor), tf.int8), None

    def decompress(self, payload, ctx):
        return tf.cast(payload, tf.float32)


class Halves(Bytes):
    """Of which the payload may be summed, and is of 32 bits."""

    summable = True

    def compress(self, tensor):
        return tensor[: tensor.shape[0] // 2], None


def test_a_users_own_compressor():
    model = CostModel(LINK, 2, kernels={"Bytes": KernelCost(encode=1e-9), "Halves": KernelCost()})
    prediction = model.predict(Bytes(), 4000)
    assert (prediction.compressor, prediction.pattern) == ("Bytes", "allgather")
    assert prediction.payload == 1000 and prediction.wire == pytest.approx(1e-4 + 1000 * 8e-9)
    assert prediction.encode == pytest.approx(4000e-9)
    assert model.predict(Bytes(), 4000, form="k_bit").payload == 4000
    summed = model.predict(Halves(), 4000)
    assert summed.payload == 2000 and summed.pattern == "allreduce"


def test_more_bandwidth_favours_less_compression():
    def best(rate):
        model = CostModel(Link.of_rate(rate, 5e-5), 4)
        return min(("none", "int8", "hybrid:ratio=0.01,bits=4"), key=lambda spec: model.predict(spec, SIZE).total)

    assert best(1e8) == "hybrid:ratio=0.01,bits=4"
    assert best(1e12) == "none"


def test_topologies():
    local = Link(1e-6, 1e-10)
    two_level = CostModel(LINK, 8, TwoLevel(LINK, local, hosts=2, workers=4), KERNELS)
    flat = CostModel(LINK, 8, kernels=KERNELS)
    assert two_level.ranks == 8
    assert two_level.predict("none", SIZE).total < flat.predict("none", SIZE).total
    star = CostModel(LINK, 8, "star", KERNELS)
    assert star.predict("none", SIZE).total > 4 * flat.predict("none", SIZE).total
    assert CostModel(LINK, 8, "tree", KERNELS).predict("none", 100).total < flat.predict("none", 100).total


def test_alone_nothing_is_sent():
    assert CostModel(LINK, 1, kernels=KERNELS).predict("int8", SIZE).total == 0.0


def test_what_is_wrong_is_named():
    model = CostModel(LINK, 4, kernels=KERNELS)
    with pytest.raises(ValueError, match="topology must be one of ring, star, tree"):
        CostModel(LINK, 4, "rign")
    with pytest.raises(ValueError, match="one of 8 ranks, not of 4"):
        CostModel(LINK, 4, TwoLevel(LINK, LINK, 2, 4))
    with pytest.raises(ValueError, match="int8 between 4 ranks crosses as allgather or scatter_reduce, not"):
        model.predict("int8", SIZE, pattern="allreduce")
    with pytest.raises(ValueError, match="form must be one of full"):
        model.predict("int8", SIZE, form="exact")
    with pytest.raises(ValueError, match="nbytes must be from 0 on, got -1"):
        model.predict("int8", -1)
    with pytest.raises(ValueError, match="int8"):
        model.predict("int9", SIZE)


def test_two_levels_add_up():
    """2 hosts of 4 workers: sum inside, an allgather between hosts of shares, handing on; and half of the kernels."""
    local, cost, size = Link(1e-6, 1e-10, 2e-10), KERNELS["quantize"], 2**22
    model = CostModel(LINK, 8, TwoLevel(LINK, local, hosts=2, workers=4), KERNELS)
    found = model.predict("int8", size, "two_level")
    share = found.payload / 4
    assert found.wire == pytest.approx(LINK.alpha + 4 * share * LINK.beta)  # of all four workers
    handed = 3 * (local.alpha + 2 * share * local.beta)
    summed = 3 * (local.alpha + size / 4 * (local.beta + local.gamma))
    assert found.inside == pytest.approx(summed + handed)
    assert found.encode == pytest.approx(cost.encoding(size / 4))
    assert found.decode == pytest.approx(2 * cost.call + size * (cost.decode + 2 * cost.decode_rank))
    assert found.total == pytest.approx(found.encode + found.wire + found.decode + found.inside)
    # A third host: what each worker sends stops growing, once it pays.
    third = CostModel(LINK, 12, TwoLevel(LINK, local, 3, 4), KERNELS).predict("int8", size, "two_level")
    assert third.wire == pytest.approx(2 * 2 * (LINK.alpha + 4 * share / 3 * LINK.beta))
    bare = model.predict("int8", size, "two_level", form="bandwidth")
    assert (bare.encode, bare.decode) == (0.0, 0.0) and bare.wire == pytest.approx(4 * share * LINK.beta)


def test_two_levels_need_two_levels():
    two = CostModel(LINK, 8, TwoLevel(LINK, LINK, hosts=2, workers=4), KERNELS)
    assert "two_level" in two.patterns("int8")
    assert two.patterns("none") == ("allreduce",)
    for one in (CostModel(LINK, 8, "ring", KERNELS), CostModel(LINK, 8, TwoLevel(LINK, LINK, 8, 1), KERNELS)):
        with pytest.raises(ValueError, match="crosses as allgather or scatter_reduce, not as 'two_level'"):
            one.predict("int8", 1e6, "two_level")
