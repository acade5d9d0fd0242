"""A compressor that a user writes: `compress` and `decompress`, nothing else."""

import dataclasses

import numpy as np
import pytest
import reference
import tensorflow as tf
from compressors import seeds

import hvd_compress as hvdc


class Ternary(hvdc.Compressor):
    """The one of the base class's docstring: -1, 0, 1 times the largest magnitude."""

    def compress(self, tensor):
        scale = tf.reduce_max(tf.abs(tensor))
        return (tf.cast(tf.round(tensor / scale), tf.int8), scale), tensor.shape

    def decompress(self, payload, ctx):
        codes, scale = payload
        return tf.reshape(tf.cast(codes, tf.float32) * scale, ctx)


def numpy_ternary(x):
    scale = np.abs(x).max()
    return np.rint(x / scale) * scale


class Halves(hvdc.Compressor):
    """A payload that is one tensor, in a nest of none."""

    def compress(self, tensor):
        return tf.cast(tensor, tf.float16), None

    def decompress(self, payload, ctx):
        return tf.cast(payload, tf.float32)


class Nested(hvdc.Compressor):
    """A payload with a structure, of several dtypes."""

    def compress(self, tensor):
        return {"sign": tensor < 0, "size": [tf.abs(tensor), tf.constant(3, tf.int64)]}, 2.0

    def decompress(self, payload, ctx):
        size, three = payload["size"]
        return tf.where(payload["sign"], -size, size) * ctx * tf.cast(three, tf.float32) / 6.0


@pytest.mark.parametrize("shape", [(10,), (4, 5), (1000,)], ids=str)
def test_encode_and_decode(shape):
    x = reference.vector("normal", int(np.prod(shape))).reshape(shape)
    compressor = Ternary()
    parts, ctx, lost, finite = compressor.encode(tf.constant(x), seeds(), keep=True)
    assert finite
    assert [part.dtype for part in parts] == [tf.int8, tf.float32]
    np.testing.assert_allclose(compressor.decode(parts, ctx), numpy_ternary(x), rtol=1e-6)
    np.testing.assert_allclose(lost, x - numpy_ternary(x), atol=1e-6)


def test_decode_sum():
    compressor = Ternary()
    ranks = [reference.vector("normal", 50, seed) for seed in range(4)]
    encoded = [compressor.encode(tf.constant(x), seeds()) for x in ranks]
    ranks_parts = [e.parts for e in encoded]
    total = compressor.decode_sum(ranks_parts, encoded[0].ctx, tf.constant(0.25))
    np.testing.assert_allclose(total, np.mean([numpy_ternary(x) for x in ranks], axis=0), rtol=1e-5, atol=1e-6)
    assert np.isnan(compressor.decode_sum(ranks_parts, encoded[0].ctx, tf.constant(np.nan, tf.float32))).all()


@pytest.mark.parametrize(
    ("compressor", "per_element", "more"),
    [(Ternary(), 1, 4), (Halves(), 2, 0), (Nested(), 1 + 4, 8)],
    ids=str,
)
@pytest.mark.parametrize("shape", [10, (10,), (4, 5), ()], ids=str)
def test_wire_bytes(compressor, per_element, more, shape):
    assert compressor.wire_bytes(shape) == per_element * int(np.prod(shape)) + more


@pytest.mark.parametrize("compressor", [Ternary(), Halves(), Nested()], ids=str)
def test_round_trip_in_a_graph_and_eagerly(compressor):
    x = tf.constant(reference.vector("ties", 60).reshape(6, 10))

    def round_trip(t):
        parts, ctx, _, _ = compressor.encode(t, seeds())
        return compressor.decode(parts, ctx)

    np.testing.assert_array_equal(round_trip(x), tf.function(round_trip)(x))


def test_defaults():
    compressor = Ternary()
    assert compressor.spec == str(compressor) == "Ternary"
    assert compressor.error_feedback
    assert not (compressor.summable or compressor.sparse or compressor.per_tensor)


def test_a_payload_whose_shape_depends_on_values_is_refused():
    class Nonzeros(hvdc.Compressor):
        def compress(self, tensor):
            where = tf.where(tensor != 0)[:, 0]
            return (tf.gather(tensor, where), where), tensor.shape

        def decompress(self, payload, ctx):
            return tf.scatter_nd(payload[1][:, None], payload[0], tf.cast(ctx, tf.int64))

    with pytest.raises(ValueError, match=r"Nonzeros: compress\(\) returned a payload of unknown shape"):
        Nonzeros().wire_bytes(10)


def test_what_is_not_defined_is_said():
    class Half(hvdc.Compressor):
        pass

    with pytest.raises(NotImplementedError, match="Half must define compress"):
        Half().compress(tf.ones([3]))
    with pytest.raises(NotImplementedError, match="Half must define decompress"):
        Half().decompress(None, None)


def test_state_from_outside_may_be_tensors_and_variables():
    """Layouts are found by tracing; a bare tf.Graph could not read these."""

    class Scaled(Halves):
        def __init__(self):
            self.constant, self.variable = tf.constant(2.0), tf.Variable(3.0)

        def compress(self, tensor):
            return super().compress(tensor * self.constant * self.variable)

    compressor = Scaled()
    assert compressor.wire_bytes(10) == 20

    @tf.function
    def inside_of_a_step(x):
        assert compressor.wire_bytes(11) == 22
        return compressor.decode(*compressor.encode(x, seeds())[:2])

    np.testing.assert_array_equal(inside_of_a_step(tf.ones([4])), [6, 6, 6, 6])


@pytest.mark.parametrize("frozen", [True, False])
def test_it_may_be_a_dataclass(frozen):
    @dataclasses.dataclass(frozen=frozen)
    class Scaled(Halves):
        scale: float = 1.0

    assert Scaled(2.0).wire_bytes(10) == 20
    assert Scaled(2.0).wire_bytes(10) == 20
