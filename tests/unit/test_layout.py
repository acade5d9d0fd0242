"""Gradients to chunks and back."""

import math

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import hvd_compress as hvdc
from hvd_compress import formats
from hvd_compress.engine import layout as geometry
from hvd_compress.engine import packing
from hvd_compress.engine.grouping import TensorGroup
from hvd_compress.engine.layout import FlatLayout, PerTensorLayout
from hvd_compress.engine.packing import pack, unpack
from hvd_compress.exchange import volume

SHAPES = [(10, 10), (5,), (20, 10), (), (3, 3, 2, 2), (300, 2), (0, 3)]
DTYPES = [tf.float32, tf.float16, tf.float64, tf.bfloat16, tf.float32, tf.float32, tf.float32]


def gradients(shapes, dtypes):
    rng = np.random.default_rng(0)
    return [tf.cast(rng.integers(-99, 100, shape), dtype) for shape, dtype in zip(shapes, dtypes)]


def assert_round_trip(layout, tensors, dtypes):
    chunks = [chunk for bucket in layout.in_buckets(1) for chunk in pack(layout, tensors, bucket)]
    assert [tuple(chunk.shape) for chunk in chunks] == list(layout.shapes)
    assert all(chunk.dtype == tf.float32 for chunk in chunks)
    reduced = [chunks]
    if isinstance(layout, FlatLayout):  # runs of two chunks end to end, and all of them
        reduced += [[tf.concat(chunks[i : i + count], 0) for i in range(0, len(chunks), count)] for count in (2, 999)]
    for some in reduced:
        for tensor, again in zip(tensors, unpack(layout, some, dtypes)):
            assert (again.dtype, again.shape) == (tensor.dtype, tensor.shape)
            np.testing.assert_array_equal(tf.cast(again, tf.float64), tf.cast(tensor, tf.float64))
    total = sum(np.abs(tf.cast(t, tf.float64).numpy()).sum() for t in tensors)
    assert sum(np.abs(chunk.numpy().astype(np.float64)).sum() for chunk in chunks) == total  # all else is zero


@settings(deadline=None, max_examples=60)
@given(
    shapes=st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), min_size=1, max_size=8),
    multiple=st.integers(1, 5),
    largest=st.sampled_from([1024, 5000, 2**20]),
)
def test_pack_and_unpack(shapes, multiple, largest):
    bucket = TensorGroup(tuple(range(len(shapes))), tuple(shapes))
    chunks = FlatLayout(bucket, multiple, largest=largest)
    assert chunks.count % multiple == 0
    assert chunks.size <= 1.016 * largest
    assert chunks.count * chunks.size >= bucket.numel
    dtypes = [DTYPES[i % len(DTYPES)] for i in range(len(shapes))]
    assert_round_trip(chunks, gradients(shapes, dtypes), dtypes)


def test_gradients_lie_one_after_the_other():
    bucket = TensorGroup((3, 1), ((3,), (2, 2)))
    gradients = [tf.constant([1.0, 2, 3]), tf.constant([[4.0, 5], [6, 7]])]
    (chunk,) = pack(FlatLayout(bucket), gradients, range(1))
    assert chunk.numpy().tolist() == [1, 2, 3, 4, 5, 6, 7]


def test_whole_tensors_keep_their_shapes():
    bucket = TensorGroup(tuple(range(len(SHAPES))), tuple(SHAPES))
    assert list(PerTensorLayout(bucket).shapes) == SHAPES
    assert_round_trip(PerTensorLayout(bucket), gradients(SHAPES, DTYPES), DTYPES)


@pytest.mark.parametrize("numel", [1600, 10**5, 10**6, 2**20, 2**20 + 1, 6 * 10**6, 25 * 10**6])
@pytest.mark.parametrize("multiple", [1, 4])
@pytest.mark.parametrize("alignment", [16, 400, 4096, 10**6])
def test_little_is_added(numel, multiple, alignment):
    chunks = FlatLayout(TensorGroup((0,), ((numel,),)), multiple, alignment)
    assert chunks.count == multiple * math.ceil(numel / (multiple * 2**20))
    assert numel <= chunks.count * chunks.size <= 1.016 * (numel + chunks.count)
    if numel / chunks.count >= 100 * alignment:
        assert chunks.size % alignment == 0


@pytest.mark.parametrize("ranks", [4, 8, 16])
@pytest.mark.parametrize("spec", ["int8", "auto"])
def test_a_full_bucket_has_three_pieces_of_each_owner(spec, ranks):
    compressor = hvdc.Compression.parse(spec)
    candidates = getattr(compressor, "candidates", [compressor])
    for numel in np.random.default_rng(ranks).integers(30_000_000, 400_000_000, 20):
        bucket = TensorGroup((0,), ((int(numel),),))
        found = geometry.flat_layout(bucket, candidates, geometry.BUCKET_BYTES, ranks)
        assert max(map(len, found.in_buckets(geometry.BUCKET_BYTES))) == 3 * ranks


@pytest.mark.parametrize("ranks", [2, 8, 11, 16])
@pytest.mark.parametrize("spec", ["int8", "auto"])
def test_every_bucket_has_a_part_of_a_gradient(spec, ranks):
    compressor = hvdc.Compression.parse(spec)
    candidates = getattr(compressor, "candidates", [compressor])
    numels = [149_200_880, *np.random.default_rng(ranks).integers(1, 400_000_000, 40)]
    for numel in map(int, numels):
        layout = geometry.flat_layout(TensorGroup((0,), ((numel,),)), candidates, geometry.BUCKET_BYTES, ranks)
        assert layout.count % layout.multiple == 0 and layout.count * layout.size >= numel
        assert all(layout.reaching_into(bucket) for bucket in layout.in_buckets(geometry.BUCKET_BYTES)), numel


def test_pieces_suit_all_candidates():
    """4096 elements for the quantizers, or else a multiple of their blocks of 256; 100 for 1% of them."""
    auto = "auto:candidates=(none|int8|int4|hybrid:ratio=0.01,bits=4)"
    candidates = hvdc.Compression.parse(auto).candidates
    alignment = geometry.flat_layout(TensorGroup((0,), ((100,),)), candidates, geometry.BUCKET_BYTES, 2).alignment
    assert alignment == math.lcm(4096, 400)
    for numel, multiple, expected in (
        (25_500_000, 1, 102_400),
        (25_500_000, 48, 6_400),
        (1_000_000, 1, 12_800),
    ):
        size = FlatLayout(TensorGroup((0,), ((numel,),)), multiple, alignment).size
        assert size % expected == 0 and numel / multiple <= size * math.ceil(numel / multiple / size)


def test_an_alignment_below_one_is_refused():
    with pytest.raises(ValueError, match="alignment must be a whole number from 1 on, got 0"):
        FlatLayout(TensorGroup((0,), ((100,),)), 1, 0)


def test_large_gradients_are_not_copied():
    """A slice at 64-byte borders shares its memory: no operation but slices and reshapes."""
    bucket = TensorGroup((1, 0), ((1024, 2048), (512, 1024)))
    chunks = FlatLayout(bucket)
    assert chunks.count == 3 and chunks.size == 873824

    @tf.function
    def cut(a, b):
        return pack(FlatLayout(TensorGroup((0,), ((2**21,),)), 1, 4096), [a], range(2))

    ops = {op.type for op in cut.get_concrete_function(tf.zeros([1024, 2048]), 0).graph.get_operations()}
    assert "ConcatV2" not in ops and "StridedSlice" in ops


def test_only_small_pieces_are_put_together():
    shapes = ((5,), (200, 100), (30,), (7, 7), (300, 100))
    layout = FlatLayout(TensorGroup(tuple(range(5)), shapes))
    (of_chunk,) = packing.pieces(layout, gradients(shapes, DTYPES), range(1))
    # With the gaps before large gradients, and the zeros at the end.
    assert [piece.shape[0] for piece in of_chunk] == [16, 20_000, 80, 30_000]
    assert tf.concat(of_chunk, 0).shape[0] == layout.size


def test_joined_chunks_are_not_copied():
    shapes = ((1024, 2048), (512, 1024))
    layout = FlatLayout(TensorGroup((0, 1), shapes))

    @tf.function
    def cut(joined):
        return unpack(layout, [joined], [tf.float32] * 2)

    traced = cut.get_concrete_function(tf.TensorSpec([layout.count * layout.size]))
    assert layout.count == 3 and "ConcatV2" not in {op.type for op in traced.graph.get_operations()}


def test_pieces_in_buckets():
    chunks = FlatLayout(TensorGroup((0,), ((10**6,),)), 1, 16, 10**5)
    assert (chunks.count, chunks.size) == (10, 10**5)
    assert chunks.in_buckets(1) == [range(i, i + 1) for i in range(10)]
    assert chunks.in_buckets(12 * 10**5) == [range(0, 1), range(1, 3), range(3, 6), range(6, 9), range(9, 10)]
    assert chunks.in_buckets(10**9) == [range(10)]
    shared = FlatLayout(TensorGroup((0,), ((10**6,),)), 4, 16, 10**5)
    assert shared.count == 12
    assert shared.in_buckets(1) == [range(0, 4), range(4, 8), range(8, 12)]  # every rank owns as many
    whole = PerTensorLayout(TensorGroup((2, 1, 0), ((10,), (20,), (30,))))
    assert whole.in_buckets(1) == [range(0, 1), range(1, 2), range(2, 3)]
    assert whole.in_buckets(120) == [range(0, 2), range(2, 3)]
    assert whole.in_buckets(10**9) == [range(3)]


def test_shapes_that_are_alike_count_as_a_list_of_them_does():
    alike, listed = volume.Alike((8, 4), 6), [(8, 4)] * 6
    assert list(alike) == listed and len(alike) == 6 and alike[-1] == (8, 4)
    assert list(alike[1:4]) == listed[1:4] and list(alike[4:99]) == listed[4:]
    assert volume.counts(alike) == volume.counts(listed) == {(8, 4): 6}
    assert not volume.counts(alike[:0]) and not volume.are_alike(alike[:0])
    assert volume.are_alike(alike) and not volume.are_alike([(8, 4), (4, 8)])
    int8 = formats.parse("int8")
    assert volume.payload_bytes(int8, alike) == volume.payload_bytes(int8, listed)
    assert hash(alike[:3]) == hash(volume.Alike((8, 4), 3)) and alike[:3] == volume.Alike((8, 4), 3)


@pytest.mark.parametrize(("spec", "ranks", "chunks"), [("int8", 2, 1), ("int8", 4, 4), ("randomk:ratio=0.01", 4, 1)])
@pytest.mark.parametrize("limit", [25 * 2**20, 50 * 2**20])
def test_a_bucket_on_a_gpu_has_one_chunk_for_each_owner(spec, ranks, chunks, limit):
    tensors = TensorGroup((0,), ((500 * 2**20,),))
    layout = geometry.flat_layout(tensors, (hvdc.Compression.parse(spec),), limit, ranks, on_gpu=True)
    buckets = layout.in_buckets(limit)
    assert {len(bucket) for bucket in buckets} == {chunks}
    assert 0.95 * limit <= 4 * chunks * layout.size <= limit


@pytest.mark.parametrize(
    "numel, ranks, count",
    [(25_600_000, 2, 8), (1_200_000, 2, 4), (270_000, 2, 4), (100_000, 2, 2), (5000, 2, 1), (270_000, 8, 3)],
)
def test_small_models_have_four_buckets_too(numel, ranks, count):
    """Those of the last layers are sent during the backward pass."""
    limit = geometry.bucket_limit(2**24, numel, geometry.smallest_bucket(ranks))
    layout = geometry.flat_layout(TensorGroup((0,), ((numel,),)), [formats.parse("int8")], limit, ranks)
    assert len(layout.in_buckets(limit)) == count
