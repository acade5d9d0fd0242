"""Properties of every compressor over many kinds of values, ratios and widths."""

import numpy as np
import pytest
import reference
import tensorflow as tf
from compressors import CASTS, SPECS, seeds
from hypothesis import given
from hypothesis import strategies as st

import hvd_compress as hvdc

Compression = hvdc.Compression

# Few shapes and arguments, those of the other tests: each pair of them is compiled anew.
shapes = st.sampled_from([(1,), (7,), (64, 32), (1000,)])
kinds = st.sampled_from(reference.KINDS)
numbers = st.integers(0, 10**6)
ratios = st.sampled_from([0.01, 0.3, 1.0])
MAKERS = {
    "casts": st.sampled_from([Compression.parse(spec) for spec in CASTS]),
    "quantize": st.sampled_from(
        [Compression.parse(spec) for spec in SPECS if "quant" in spec or "int" in spec]
    ),
    "onebit": st.just(Compression.onebit),
    "topk": st.builds(Compression.topk, ratio=ratios),
    "randomk": st.builds(Compression.randomk, ratio=ratios, unbiased=st.booleans()),
    "block_topk": st.builds(Compression.block_topk, ratio=ratios),
    "block_sparse": st.builds(Compression.block_sparse, ratio=ratios, block=st.sampled_from([1, 4, 8])),
    "hybrid": st.builds(Compression.hybrid, ratio=st.sampled_from([0.05, 1.0]), bits=st.just(4)),
}


@pytest.mark.parametrize("name", MAKERS)
def test_round_trip(name):
    @given(MAKERS[name], shapes, kinds, numbers)
    def check(compressor, shape, kind, number):
        if kind == "huge" and getattr(compressor, "unbiased", False):
            kind = "heavy"  # n / k times 1e38 is infinite
        if compressor.name == "fp16" and kind in ("huge", "far offset", "mixed scale"):
            kind = "heavy"  # overflow by contract
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
