"""The patterns in which buckets cross, against sums over the ranks in NumPy."""

import itertools

import horovod.tensorflow as hvd
import introspect
import numpy as np
import pytest
import tensorflow as tf
from specs import EXCHANGED

import hvd_compress as hvdc
from hvd_compress.common import devices
from hvd_compress.exchange import choice
from hvd_compress.exchange.allgather import Allgather
from hvd_compress.exchange.scatter_reduce import ScatterReduce

SHAPES = [(100, 83), (512, 258), (1500, 250), (7, 11)]
BUCKET = 2**20  # bytes; these fill two, but between two ranks a model has four buckets at least


class HalfPrecision(hvdc.Compressor):
    """A user's own, whose context counts the elements."""

    error_feedback = True

    def compress(self, tensor):
        return tf.cast(tensor, tf.float16), tensor.shape

    def decompress(self, payload, ctx):
        return tf.reshape(tf.cast(payload, tf.float32), ctx)


def residuals_of(reducer):
    """Every gradient's residual, or zeros."""
    return introspect.residuals(introspect.plan_of(reducer))


def draw(rank, step):
    rng = np.random.default_rng([rank, step])
    return [rng.standard_normal(shape).astype(np.float32) for shape in SHAPES]


def check_mass(compressor, gather, size, steps=3, **settings):
    """What comes in equals what goes out and what stays, each step, on ranks that all get the same."""
    reducer = introspect.new_reducer(compressor, bucket_bytes=BUCKET, **settings)
    variables = [tf.Variable(tf.zeros(shape)) for shape in SHAPES]
    old = [np.zeros(shape) for shape in SHAPES]
    for step in range(steps):
        outputs = reducer([tf.constant(g) for g in draw(hvd.rank(), step)], variables)
        for output in outputs:
            everyone = gather(output)
            assert (everyone == everyone[0]).all()
        left = [gather(r).astype(np.float64).sum(0) for r in residuals_of(reducer)]
        came = [sum(parts).astype(np.float64) for parts in zip(*(draw(r, step) for r in range(size)))]
        for i, output in enumerate(outputs):
            np.testing.assert_allclose(size * output.numpy() + left[i], came[i] + old[i], atol=2e-5)
        old = left
    assert max(np.abs(r).max() for r in old) > 0
    return reducer


@pytest.mark.parametrize("compressor", [*map(hvdc.Compression.parse, EXCHANGED), HalfPrecision()], ids=str)
def test_mass_is_conserved_in_pieces(compressor, gather, size):
    reducer = check_mass(compressor, gather, size)
    plan = introspect.plan_of(reducer)
    (group,) = introspect.groups(plan)
    # On a GPU, a bucket is one chunk of twice the size.
    assert len(group.shapes) == len(introspect.buckets(plan)) == (2 if devices.has_gpu() else 4)


@pytest.mark.np4
@pytest.mark.parametrize("compressor", [*map(hvdc.Compression.parse, EXCHANGED), HalfPrecision()], ids=str)
def test_mass_is_conserved_in_scatter_reduce(compressor, gather, size, monkeypatch):
    introspect.prefer_scatter_reduce(monkeypatch)
    reducer = check_mass(compressor, gather, size)
    plan = introspect.plan_of(reducer)
    (group,) = introspect.groups(plan)
    # Of each owner one chunk in the first bucket, two in the next one, and then three.
    assert [len(bucket.chunks) for bucket in introspect.buckets(plan)] == [size, 2 * size, 3 * size]
    assert introspect.is_scatter_reduced(compressor, group.shapes, size)


@pytest.mark.np4
@pytest.mark.parametrize("spec", ["int8", "fp16"])
def test_scatter_reduce_comes_close_to_the_average(spec, size, monkeypatch):
    introspect.prefer_scatter_reduce(monkeypatch)
    reducer = introspect.new_reducer(spec)
    outputs = reducer(list(map(tf.constant, draw(hvd.rank(), 0))), [tf.Variable(tf.zeros(s)) for s in SHAPES])
    for i, output in enumerate(outputs):
        mean = np.mean([draw(r, 0)[i] for r in range(size)], axis=0)
        # Half a step for each rank's share, and one for the sum: about 7 / 255 at most.
        np.testing.assert_allclose(output, mean, atol=0.03 if spec == "int8" else 0.004)


@pytest.mark.np4
@pytest.mark.parametrize(
    "spec, groups",
    [("int8", None), ("int8", 1), ("hybrid:ratio=0.05,bits=4", None), ("topk:ratio=0.01", 1), ("bf16", None)],
)
def test_scatter_reduce_takes_nan_to_all_and_keeps_no_trace(spec, groups, rank, size, monkeypatch):
    introspect.prefer_scatter_reduce(monkeypatch)
    reducer = introspect.new_reducer(spec, groups=groups)
    variables = [tf.Variable(tf.zeros(s)) for s in SHAPES]
    reducer(list(map(tf.constant, draw(rank, 0))), variables)
    before = residuals_of(reducer)
    gradients = draw(rank, 1)
    # Each rank in turn; the place is each owner's in turn.
    for bad, place in itertools.product(range(size), (0, -1)):
        broken = [g.copy() for g in gradients]
        if rank == bad:
            broken[2].flat[place] = np.nan
        outputs = reducer(list(map(tf.constant, broken)), variables)
        found = np.isnan(outputs[2].numpy())
        assert found.all() if groups == 1 else found.flat[place]  # all of its bucket
        for old, new in zip(before, residuals_of(reducer)):
            np.testing.assert_array_equal(old, new)
    assert all(np.isfinite(g).all() for g in reducer(list(map(tf.constant, gradients)), variables))


def test_a_short_residual_is_kept_rounded(rank, size, gather):
    compressor = hvdc.Compression.parse("topk:ratio=0.05")
    short = introspect.new_reducer(compressor, residual_dtype="bfloat16")
    exact = introspect.new_reducer(compressor)
    variables = [tf.Variable(tf.zeros(s)) for s in SHAPES]
    gradients = list(map(tf.constant, draw(rank, 0)))
    for a, b in zip(short(gradients, variables), exact(gradients, variables)):
        np.testing.assert_array_equal(a, b)
    for rounded, kept in zip(residuals_of(short), residuals_of(exact)):
        np.testing.assert_array_equal(rounded, tf.cast(tf.cast(kept, tf.bfloat16), tf.float32))
    assert introspect.residual_variables(introspect.plan_of(short))[0].dtype == tf.bfloat16
    outputs = short(gradients, variables)
    for output in outputs:
        everyone = gather(output)
        assert (everyone == everyone[0]).all()


def test_the_pattern_that_sends_least_is_chosen():
    int8, topk = hvdc.Compression.int8, hvdc.Compression.topk(0.001)
    chunks = [(2**20,)] * 8

    def name(compressor, ranks):
        return choice.choose(compressor, chunks, ranks).name

    assert name(int8, 2) == "allgather"
    assert name(int8, 8) == name(int8, 4) == "scatter_reduce"
    assert name(int8, 3) == "allgather"  # 8 chunks cannot be shared by 3
    assert name(topk, 4) == "allgather"  # saves less than a collective costs
    assert name(hvdc.Compression.randomk(0.1), 4) == "allreduce"
    # Per element 1 + 8 / 256 bytes, and a flag in 64 bytes of each payload.
    payload = 2**20 + 2**20 // 256 * 8
    assert Allgather().bytes_sent(int8, chunks, 4) == 3 * (8 * payload + 64)
    assert ScatterReduce().bytes_sent(int8, chunks, 4) == 2 * 3 * (2 * payload + 64)


def ancestors(op):
    seen, todo = set(), [op]
    while todo:
        op = todo.pop()
        if op not in seen:
            seen.add(op)
            todo += [tensor.op for tensor in op.inputs] + list(op.control_inputs)
    return seen


def test_a_bucket_waits_for_no_gradient_of_the_layers_before_it():
    reducer = introspect.new_reducer("int8", bucket_bytes=BUCKET // 4)
    variables = [tf.Variable(tf.zeros(shape)) for shape in SHAPES[:3]]

    @tf.function
    def reduce(first, second, third):
        return reducer([first, second, third], variables)

    graph = reduce.get_concrete_function(*[tf.TensorSpec(shape) for shape in SHAPES[:3]]).graph
    gathers = [op for op in graph.get_operations() if op.type == "HorovodAllreduce"]
    names = ("first", "second", "third")
    needs = [{op.name for op in ancestors(gather) if op.name in names} for gather in gathers]
    # 375k, 132k and 8k elements, in buckets of 66k.
    assert len(needs) == 8 and needs[-1] == {"third", "second", "first"}
    assert all(need == {"third"} for need in needs[:5])


def test_a_plan_is_traced_once(rank):
    reducer = introspect.new_reducer("int8")
    variables = [tf.Variable(tf.zeros(shape)) for shape in SHAPES]
    runs = []

    @tf.function
    def reduce(gradients):
        runs.append(1)
        return reducer(gradients, variables)

    gradients = list(map(tf.constant, draw(rank, 0)))
    reduce(gradients)
    reduce(gradients)
    assert len(runs) == 1
    assert introspect.steps_made(introspect.plan_of(reducer)) == 2


def test_small_dense_gradients_cross_as_one(gather, rank, size):
    """Several dtypes and sizes, none compressed."""
    reducer = introspect.new_reducer("none")
    shapes = [
        ((3,), tf.float32),
        ((), tf.float32),
        ((2, 2), tf.float64),
        ((300, 100), tf.float32),
        ((5,), tf.float32),
    ]
    variables = [tf.Variable(tf.zeros(shape, dtype)) for shape, dtype in shapes]

    @tf.function
    def reduce():
        return reducer([tf.cast(tf.fill(s, rank + 1.0 + i), d) for i, (s, d) in enumerate(shapes)], variables)

    for i, (output, (shape, dtype)) in enumerate(zip(reduce(), shapes)):
        assert (output.shape, output.dtype) == (shape, dtype)
        np.testing.assert_allclose(output, np.full(shape, (size + 1) / 2 + i), rtol=1e-6)
    operations = reduce.get_concrete_function().graph.get_operations()
    # One of float64, the large one of float32, and the three small ones.
    assert (
        sum(len(op.inputs) for op in operations if op.type.startswith("HorovodGrouped"))
        + sum(op.type == "HorovodAllreduce" for op in operations)
        == 3
    )


def test_chunks_of_a_gpu(rank, size, gather, monkeypatch):
    """On a GPU, a bucket of two ranks is one chunk. Blocks of 256 are quantized alone, so nothing else changes."""
    monkeypatch.setenv("HVD_COMPRESS_KERNELS", "xla")
    gradients = [np.random.default_rng([rank, i]).standard_normal((2048, 2048), np.float32) for i in range(2)]
    results = []
    for has_gpu in (False, True):
        monkeypatch.setattr(devices, "has_gpu", lambda has_gpu=has_gpu: has_gpu)
        reducer = introspect.new_reducer("int4")
        outputs = reducer([tf.constant(g) for g in gradients], [tf.Variable(tf.zeros([2048, 2048])) for _ in range(2)])
        results.append([*outputs, *residuals_of(reducer)])
        layout = introspect.plan_of(reducer).layout
        assert len(layout.buckets) == (5 if not has_gpu else 4)
        assert max(len(bucket.chunks) for bucket in layout.buckets) == (1 if has_gpu else 2)
    for on_cpu, on_gpu in zip(*results):
        np.testing.assert_array_equal(on_cpu, on_gpu)
    for i in range(2):
        everyone = gather(gradients[i])
        left = sum(gather(results[1][2 + i]))
        np.testing.assert_allclose(size * results[1][i].numpy() + left, sum(everyone), atol=2e-5)
