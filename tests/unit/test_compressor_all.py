"""What holds for every compressor of `hvdc.Compression`."""

import dataclasses

import horovod.tensorflow.compression as horovod_compression
import numpy as np
import pytest
import reference
import tensorflow as tf
from compressors import payload_bytes, round_trip, seeds
from specs import ALL, CASTS, PACKED, SUMMABLE

import hvd_compress as hvdc

SHAPES = [(), (1,), (0,), (7,), (1000,), (64, 32), (3, 3, 16, 64), (100001,)]
DTYPES = [tf.float16, tf.bfloat16, tf.float32, tf.float64]
EPSILON = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-22, "float64": 2.0**-22}
parse = hvdc.Compression.parse


def data(shape, seed=0, kind="normal"):
    return reference.vector(kind, int(np.prod(shape)), seed).reshape(shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("spec", ALL)
def test_round_trip(spec, shape, dtype):
    compressor = parse(spec)
    x = tf.cast(data(shape), dtype)
    payload, ctx = compressor.compress(x)
    y = compressor.decompress(payload, ctx)
    assert y.dtype == dtype and y.shape == shape
    # In float16 and bfloat16, also the result is rounded, to nearest.
    exact, lossy = (tf.cast(t, tf.float64).numpy() for t in (x, y))
    reference.assert_error_is_bounded(compressor, exact, lossy, relative=EPSILON[dtype.name])


@pytest.mark.parametrize("spec", ALL)
def test_shared_instances_cannot_be_changed(spec):
    with pytest.raises(dataclasses.FrozenInstanceError):
        parse(spec).error_feedback = False


@pytest.mark.parametrize("spec", ALL)
def test_wire_bytes_are_the_documented_formula(spec):
    compressor = parse(spec)
    sizes = [2, 8, 9, 64, 65, 1023, 1024, 1025, 2047, 2048, 2049, 65535, 65536, 65537, 10**6, 25 * 10**6 + 1]
    for shape in [*SHAPES, *((n,) for n in sizes), (1024, 1000), (1022, 1000), (7, 8), (2, 3, 10, 8)]:
        assert compressor.wire_bytes(shape) == reference.wire_bytes(compressor, shape), shape
        if len(shape) == 1:
            assert compressor.wire_bytes(shape[0]) == compressor.wire_bytes(shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("spec", ALL)
def test_payloads_have_that_size_whatever_the_values(spec, shape):
    compressor = parse(spec)
    expected = reference.wire_bytes(compressor, shape)
    for kind in ("normal", "zeros", "huge"):
        payload, _ = compressor.compress(tf.constant(data(shape, kind=kind)))
        assert len(payload_bytes(payload)) == payload_nbytes(payload) == expected


def payload_nbytes(payload):
    return payload.nbytes if hasattr(payload, "nbytes") else payload.numpy().nbytes


@pytest.mark.parametrize("spec", ALL)
def test_parts_are_laid_out_as_announced(spec):
    compressor = parse(spec)
    for shape in ((1000,), (64, 32)):
        parts, ctx, residual, finite = compressor.encode(tf.constant(data(shape)), seeds())
        assert residual is None and finite
        announced = [(spec.shape, spec.dtype) for spec in compressor.layout(shape)]
        assert [(part.shape, part.dtype) for part in parts] == announced
        assert compressor.decode(parts, ctx).dtype == tf.float32


@pytest.mark.parametrize("shape", [(1,), (7,), (1000,), (64, 32), (100001,)], ids=str)
@pytest.mark.parametrize("spec", ALL)
def test_zeros_are_exact(spec, shape):
    np.testing.assert_array_equal(round_trip(parse(spec), np.zeros(shape, np.float32)), np.zeros(shape))


@pytest.mark.parametrize("spec", ALL)
def test_compress_is_pure(spec):
    compressor = parse(spec)
    x, other = tf.constant(data((64, 32))), tf.constant(data((64, 32), seed=1))
    before = x.numpy().copy()
    first, ctx = compressor.compress(x)
    bytes_of_first = payload_bytes(first)
    decoded = compressor.decompress(first, ctx).numpy()
    assert payload_bytes(compressor.compress(other)[0]) != bytes_of_first
    second, second_ctx = compressor.compress(x)
    assert payload_bytes(second) == bytes_of_first == payload_bytes(first)
    np.testing.assert_array_equal(compressor.decompress(second, second_ctx), decoded)
    np.testing.assert_array_equal(x, before)


@pytest.mark.parametrize("spec", ALL)
def test_a_tf_function_computes_what_eager_execution_does(spec):
    compressor = parse(spec)
    x = tf.constant(data((64, 32)))

    @tf.function
    def in_graph(t):
        payload, ctx = compressor.compress(t)
        tensor = payload.tensor if isinstance(payload, hvdc.Payload) else tf.convert_to_tensor(payload)
        return tensor, compressor.decompress(payload, ctx)

    tensor, decoded = in_graph(x)
    expected = round_trip(compressor, x)
    np.testing.assert_allclose(decoded, expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())
    payload, _ = compressor.compress(x)
    if isinstance(payload, hvdc.Payload):
        assert tensor.shape == payload.tensor.shape


@pytest.mark.parametrize("spec", ALL)
def test_decode_sum_adds_the_ranks_and_scales(spec):
    compressor = parse(spec)
    shape = (7,) if spec.startswith("quantize") else (64, 32)
    encoded = [compressor.encode(tf.constant(data(shape, seed)), seeds()) for seed in range(3)]
    single = [compressor.decode(e.parts, e.ctx).numpy().astype(np.float64) for e in encoded]
    ranks = [e.parts for e in encoded]
    total = compressor.decode_sum(ranks, encoded[0].ctx, tf.constant(0.25))
    expected = 0.25 * (single[0] + single[1] + single[2])
    assert total.dtype == tf.float32 and total.shape == shape
    np.testing.assert_allclose(total, expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max())
    poisoned = compressor.decode_sum(ranks, encoded[0].ctx, tf.constant(np.nan, tf.float32))
    assert np.isnan(poisoned).all()


@pytest.mark.parametrize("dtype", [None, tf.float32, tf.bfloat16])
@pytest.mark.parametrize("spec", ALL)
def test_the_new_residual_is_what_the_decoded_tensor_lacks(spec, dtype):
    compressor = parse(spec)
    # All shapes with a residual of float32; of another kind it takes the same way after a cast.
    for shape in ((7,), (1000,), (64, 32), (70000,)) if dtype == tf.float32 else ((7,), (64, 32)):
        x = gradient = data(shape)
        old, decay = None, 1.0
        if dtype is not None:
            old, decay = tf.cast(data(shape, seed=1), dtype), 0.5
            x = gradient.astype(np.float64) + 0.5 * tf.cast(old, tf.float64).numpy()
        parts, ctx, residual, finite = compressor.encode(tf.constant(gradient), seeds(3, 4), old, decay, keep=True)
        assert residual.shape == shape and residual.dtype == tf.float32 and finite
        expected = x - compressor.decode(parts, ctx).numpy().astype(np.float64)
        np.testing.assert_allclose(residual, expected, rtol=1e-6, atol=1e-6 * np.abs(x).max())


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("spec", ALL)
def test_what_is_not_finite_is_noticed(spec, bad):
    compressor = parse(spec)
    for shape in ((7,), (64, 32), (70000,)):
        for where in (0, int(np.prod(shape)) // 2, -1):
            x = data(shape)
            old = np.zeros_like(x)
            (x if where else old).reshape(-1)[where] = bad
            encoded = compressor.encode(tf.constant(x), seeds(), tf.constant(old), 1.0, keep=True)
            assert not encoded.finite


@pytest.mark.parametrize("spec", [spec for spec in ALL if parse(spec).error_feedback])
@pytest.mark.parametrize("kind", ["normal", "heavy", "sparse", "layers", "offset"])
def test_what_is_fed_back_is_a_contraction(spec, kind):
    """||x - C(x)|| < ||x||, which error feedback needs (Karimireddy et al. 2019, Assumption A)."""
    x = data((64, 32), kind=kind)
    error = np.linalg.norm(x.astype(np.float64) - round_trip(parse(spec), x))
    limit = 1 - 1e-6
    if spec.startswith("randomk"):
        limit = 1 + 1e-6  # a contraction in expectation; a single choice may hit zeros only
    assert error <= limit * np.linalg.norm(x.astype(np.float64))


@pytest.mark.parametrize("spec", [spec for spec in ALL if spec not in CASTS])
def test_refuses_what_is_not_floating_point(spec):
    for x in ([1, 2], [True], [1j]):
        with pytest.raises(TypeError, match="floating point"):
            parse(spec).compress(tf.constant(x))


@pytest.mark.parametrize("spec", CASTS)
def test_casts_pass_integers_unchanged_as_horovods_do(spec):
    x = tf.constant([1, 2, 1 << 30])
    payload, ctx = parse(spec).compress(x)
    assert payload is x or payload.dtype == tf.int32
    np.testing.assert_array_equal(parse(spec).decompress(payload, ctx), x)


@pytest.mark.parametrize("spec", [spec for spec in ALL if spec not in CASTS])
@pytest.mark.parametrize("shape", [None, [None], [3, None]])
def test_refuses_a_tensor_of_unknown_shape(spec, shape):
    @tf.function(input_signature=[tf.TensorSpec(shape, tf.float32)])
    def compress(t):
        return parse(spec).compress(t)[0].tensor

    with pytest.raises(ValueError, match=r"static shape.*tf.ensure_shape"):
        compress.get_concrete_function()


@pytest.mark.parametrize("spec", CASTS)
def test_casts_take_a_tensor_of_unknown_shape(spec):
    @tf.function(input_signature=[tf.TensorSpec(None, tf.float32)])
    def in_graph(t):
        return parse(spec).decompress(*parse(spec).compress(t))

    np.testing.assert_array_equal(in_graph([[0.5, -2.0]]), [[0.5, -2.0]])


@pytest.mark.parametrize("spec", ALL)
def test_is_a_horovod_compressor_that_says_whether_payloads_may_be_summed(spec):
    compressor = parse(spec)
    assert isinstance(compressor, hvdc.Compressor)
    assert isinstance(compressor, horovod_compression.Compressor)
    assert compressor.summable == (spec in SUMMABLE)
    payload, _ = compressor.compress(tf.ones([10]))
    assert isinstance(payload, hvdc.Payload) == (spec in PACKED)


FEEDBACK = {
    "none": False, "fp16": False, "bf16": False, "int8": True, "quantize:bits=2,rounding=stochastic": False,
    "onebit": True, "topk:ratio=0.01": True, "randomk:ratio=0.1": True, "randomk:ratio=0.1,unbiased=true": False,
    "block_topk:ratio=0.05": True, "block_sparse:ratio=0.1,block=4": True, "hybrid:ratio=0.05,bits=4": True,
    "hadamard": True, "int2": True, "powersgd:rank=2": True,
}  # fmt: skip


@pytest.mark.parametrize("spec", FEEDBACK)
def test_feeds_back_exactly_where_the_docstring_says_so(spec):
    assert parse(spec).error_feedback is FEEDBACK[spec]


def test_a_payload_of_another_length_is_refused():
    payload, ctx = hvdc.Compression.int8.compress(tf.ones([100]))
    with pytest.raises(ValueError, match="bytes cannot be decoded"):
        hvdc.Compression.int8.decompress(payload.tensor[:-1], ctx)
