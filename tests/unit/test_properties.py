"""Properties of every compressor over many kinds of values, ratios and widths."""

import os

import numpy as np
import pytest
import reference
import tensorflow as tf
from compressors import seeds
from hypothesis import given
from hypothesis import strategies as st
from specs import ALL, CASTS

import hvd_compress as hvdc
from hvd_compress.exchange import coding

Compression = hvdc.Compression

# Few shapes and arguments, those of the other tests: each pair of them is compiled anew.
shapes = st.sampled_from([(1,), (7,), (64, 32), (1000,)])
rank_counts = st.sampled_from([1, 2, 5])
if os.environ.get("HYPOTHESIS_PROFILE") == "deep":
    shapes |= st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple)
    rank_counts = st.integers(1, 9)
kinds = st.sampled_from(reference.KINDS)
numbers = st.integers(0, 10**6)
ratios = st.sampled_from([0.01, 0.3, 1.0])
MAKERS = {
    "casts": st.sampled_from([Compression.parse(spec) for spec in CASTS]),
    "quantize": st.sampled_from([Compression.parse(spec) for spec in ALL if "quant" in spec or "int" in spec]),
    "onebit": st.just(Compression.onebit),
    "topk": st.builds(Compression.topk, ratio=ratios),
    "randomk": st.builds(Compression.randomk, ratio=ratios, unbiased=st.booleans()),
    "block_topk": st.builds(Compression.block_topk, ratio=ratios),
    "block_sparse": st.builds(Compression.block_sparse, ratio=ratios, block=st.sampled_from([1, 4, 8])),
    "hybrid": st.builds(Compression.hybrid, ratio=st.sampled_from([0.05, 1.0]), bits=st.just(4)),
    "powersgd": st.builds(Compression.powersgd, rank=st.sampled_from([1, 2])),
}


@pytest.mark.parametrize("name", MAKERS)
def test_round_trip(name):
    @given(MAKERS[name], shapes, kinds, numbers)
    def check(compressor, shape, kind, number):
        if kind == "huge" and getattr(compressor, "unbiased", False):
            kind = "heavy"  # n / k times 1e38 is infinite
        if compressor.name == "fp16" and kind in ("huge", "far offset", "mixed scale"):
            kind = "heavy"  # overflow by contract
        if compressor.name == "powersgd" and kind == "huge":
            kind = "heavy"  # sums of 64 such values are infinite
        x = reference.vector(kind, int(np.prod(shape)), number).reshape(shape)
        parts, ctx, lost, finite = compressor.encode(tf.constant(x), seeds(number, number + 1), keep=True)
        assert finite
        decoded = compressor.decode(parts, ctx).numpy()
        assert decoded.shape == shape
        assert sum(part.numpy().nbytes for part in parts) == compressor.wire_bytes(shape)
        reference.assert_error_is_bounded(compressor, x, decoded)

        total = lost.numpy().astype(np.float64) + decoded
        # Rounding of the difference; what is subnormal is flushed to zero.
        limit = 2.0**-23 * (np.abs(x.astype(np.float64)) + np.abs(decoded)) + 2 * reference.SMALLEST_NORMAL
        assert (np.abs(total - x) <= limit).all()

    check()


@pytest.mark.parametrize("name", [name for name in MAKERS if name != "casts"])
def test_nothing_is_lost_among_any_number_of_ranks(name):
    """Sum of what ranks bring = what all decode + sum of what ranks keep; residuals come along from step to step."""

    @given(MAKERS[name], rank_counts, numbers, st.sampled_from([tf.float32, tf.bfloat16]))
    def check(compressor, ranks, number, dtype):
        n = 1000
        kept = [np.zeros(n, np.float32)] * ranks
        for step in range(2):
            gradients = [reference.vector("layers", n, number + 100 * step + r) for r in range(ranks)]
            old = [tf.cast(r, dtype) for r in kept]
            encoded = [
                compressor.encode(tf.constant(g), seeds(number + step, r), o, keep=True)
                for r, (g, o) in enumerate(zip(gradients, old))
            ]
            total = coding.decode_sum(compressor, [e.parts for e in encoded], encoded[0].ctx, tf.constant(1.0))
            kept = [e.residual.numpy() for e in encoded]
            brought = np.array(gradients, np.float64) + np.array([tf.cast(o, tf.float32) for o in old], np.float64)
            left = np.sum(kept, axis=0, dtype=np.float64)
            size = np.abs(brought).sum(0) + np.abs(np.array(kept)).sum(0) + np.abs(total)
            assert (np.abs(brought.sum(0) - total - left) <= 2.0**-21 * size + ranks * 1e-37).all()
            # Alone, each rank's payload decodes to its part of the sum.
            alone = [compressor.decode(e.parts, e.ctx).numpy().astype(np.float64) for e in encoded]
            limit = 2.0**-22 * ranks * np.abs(alone).sum(0) + ranks * 1e-37
            assert (np.abs(np.sum(alone, axis=0) - total) <= limit).all()

    check()


@pytest.mark.parametrize("name", [name for name in MAKERS if name != "casts"])
def test_damage_never_gets_further_than_an_error_or_a_tensor_of_the_right_shape(name):
    @given(
        MAKERS[name],
        st.sampled_from([(7,), (64, 32)]),
        st.lists(st.tuples(numbers, st.integers(0, 255)), min_size=1),
        st.data(),
    )
    def check(compressor, shape, changes, data):
        payload, ctx = compressor.compress(tf.constant(reference.vector("normal", int(np.prod(shape))).reshape(shape)))
        if not isinstance(payload, hvdc.Payload):
            return
        damaged = payload.tensor.numpy().copy()
        for where, value in changes:
            damaged[where % len(damaged)] = value
        length = data.draw(st.sampled_from([len(damaged), len(damaged) - 1, 0]))
        try:
            decoded = compressor.decompress(tf.constant(damaged[:length]), ctx)
        except ValueError as error:
            assert len(str(error).splitlines()) == 1
        else:
            assert length == len(damaged) and decoded.shape == shape

    check()
