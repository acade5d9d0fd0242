"""One tensor of bytes: joined, split, and refused where it would be summed."""

import numpy as np
import pytest
import tensorflow as tf
from horovod.tensorflow import mpi_ops
from specs import PACKED, SUMMABLE

import hvd_compress as hvdc
from hvd_compress.compressors import payload

DTYPES = [
    tf.uint8,
    tf.int8,
    tf.bool,
    tf.uint16,
    tf.float16,
    tf.bfloat16,
    tf.int32,
    tf.float32,
    tf.int64,
    tf.float64,
]


def tensors(seed=0, shapes=((3,), (), (2, 3), (0,), (1,))):
    rng = np.random.default_rng(seed)
    return [
        tf.cast(rng.integers(0, 2 if dtype == tf.bool else 100, shape), dtype) for dtype in DTYPES for shape in shapes
    ]


def specs_of(parts):
    return [tf.TensorSpec(part.shape, part.dtype) for part in parts]


def assert_equal(a, b):
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    assert a.numpy().tobytes() == b.numpy().tobytes()


def test_join_is_the_parts_bytes_one_after_the_other():
    parts = tensors()
    joined = payload.join(parts)
    assert joined.dtype == tf.uint8
    assert joined.numpy().tobytes() == b"".join(part.numpy().tobytes() for part in parts)
    assert payload.nbytes(specs_of(parts)) == joined.shape[0]


def test_split_undoes_join():
    parts = tensors()
    for part, again in zip(parts, payload.split(payload.join(parts), specs_of(parts))):
        assert_equal(part, again)
    for part in parts:
        assert_equal(part, payload.split(payload.join([part]), specs_of([part]))[0])


def test_take_finds_the_parts_of_all_pieces():
    chunks = [tensors(seed) for seed in range(3)]
    joined = payload.join([part for parts in chunks for part in parts])
    for padding in (0, 3):
        padded = tf.concat([joined, tf.zeros([padding], tf.uint8)], 0)
        found = payload.take(padded, [specs_of(parts) for parts in chunks])
        for parts, again in zip(chunks, found):
            for part, same in zip(parts, again):
                assert_equal(part, same)


@pytest.mark.parametrize("more", [[], [((3,), np.float32), ((5, 4), np.uint8)], [((5,), np.uint8)]])
def test_take_keeps_every_bit(more):
    """In parts of 64 bytes, of whole words, and of any length."""
    random = np.random.default_rng(1)
    kinds = [
        ((2, 32), np.uint8),
        ((16,), np.float32),
        ((4, 8), np.int32),
        ((32,), np.int16),
        ((8,), np.int64),
    ]
    kinds += [((64,), np.int8), ((16, 4), np.bool_), ((3, 16), np.uint32), *more]
    arrays = [np.frombuffer(random.bytes(np.prod(shape) * np.dtype(kind).itemsize), np.uint8) for shape, kind in kinds]
    arrays = [
        (raw % 2).astype(kind).reshape(shape) if kind == np.bool_ else raw.view(kind).reshape(shape)
        for raw, (shape, kind) in zip(arrays, kinds)
    ]
    parts = [tf.constant(array) for array in arrays]
    for padding in (0, 64):
        joined = tf.concat([payload.join(parts * 2), tf.zeros([padding], tf.uint8)], 0)
        for found in payload.take(joined, [specs_of(parts)] * 2):
            for array, again in zip(arrays, found):
                assert again.shape == array.shape and again.numpy().tobytes() == array.tobytes()


@pytest.mark.parametrize("length", [0, 11, 13])
def test_split_refuses_a_wrong_length(length):
    with pytest.raises(ValueError, match=f"a payload of {length} bytes cannot be decoded: 12 are expected"):
        payload.split(tf.zeros([length], tf.uint8), [tf.TensorSpec([3], tf.float32)])


@pytest.mark.parametrize("spec", PACKED)
def test_a_payload_of_codes_refuses_to_become_a_tensor(spec):
    packed, _ = hvdc.Compression.parse(spec).compress(tf.ones([64, 32]))
    for convert in (tf.convert_to_tensor, mpi_ops._allreduce, lambda p: tf.add(p, p)):
        with pytest.raises(TypeError, match=r"hvdc\.allreduce") as error:
            convert(packed)
        assert hvdc.Compression.parse(spec).spec in str(error.value)


@pytest.mark.parametrize("spec", PACKED)
def test_a_payload_of_codes_refuses_in_a_graph_too(spec):
    @tf.function
    def step(x):
        return mpi_ops._allreduce(hvdc.Compression.parse(spec).compress(x)[0])

    with pytest.raises(TypeError, match=r"hvdc\.allreduce"):
        step(tf.ones([64, 32]))


@pytest.mark.parametrize("spec", SUMMABLE)
def test_a_payload_that_may_be_summed_goes_into_horovods_op(spec):
    @tf.function
    def step(x):
        packed, ctx = hvdc.Compression.parse(spec).compress(x)
        return hvdc.Compression.parse(spec).decompress(mpi_ops._allreduce(packed), ctx)

    # Traced only: running it needs hvd.init().
    graph = step.get_concrete_function(tf.TensorSpec([64, 32], tf.float32))
    assert "HorovodAllreduce" in {op.type for op in graph.graph.get_operations()}
    assert graph.structured_outputs.dtype == tf.float32
    assert graph.structured_outputs.shape == [64, 32]
    assert tf.convert_to_tensor(hvdc.Compression.parse(spec).compress(tf.ones([8]))[0]).dtype.is_floating


def test_bf16_becomes_float32_for_horovod_which_has_no_bfloat16():
    x = tf.constant([1.0, 1 + 2**-9, -3.0])
    packed, ctx = hvdc.Compression.bf16.compress(x)
    assert packed.dtype == tf.bfloat16 and packed.shape == [3] and packed.nbytes == 6
    assert tf.convert_to_tensor(packed).dtype == tf.float32
    np.testing.assert_array_equal(tf.convert_to_tensor(packed), [1, 1, -3])
    assert tf.convert_to_tensor(packed, tf.float16).dtype == tf.float16
    summed = tf.convert_to_tensor(packed) + tf.convert_to_tensor(packed)
    np.testing.assert_array_equal(hvdc.Compression.bf16.decompress(summed, ctx), [2, 2, -6])


def test_a_payload_says_what_it_is():
    packed, _ = hvdc.Compression.int8.compress(tf.ones([64]))
    assert repr(packed) == "<Payload of int8, 72 bytes>"
    assert len(packed) == packed.nbytes == packed.tensor.shape[0] == 72
