"""hvdc.allreduce and hvdc.grouped_allreduce over real collectives, with different data on each rank."""

import sys

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
from specs import ALL

import hvd_compress as hvdc
from hvd_compress.engine import agreement

SHAPE = (64, 48)  # one for most tests: each shape is compiled anew


def data(rank, shape=SHAPE, seed=0):
    rng = np.random.default_rng([seed, rank])
    return (rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 2, shape)).astype(np.float32)


def all_data(size, shape=SHAPE, seed=0):
    return np.stack([data(r, shape, seed) for r in range(size)])


def block_steps(x, bits):
    """NumPy: the quantization step of every element, blocks of 256 (x.size divisible)."""
    blocks = x.reshape(-1, 256).astype(np.float64)
    step = (blocks.max(1) - blocks.min(1)) / (2**bits - 1)
    return np.repeat(step, 256).reshape(x.shape)


def np_topk(x, k):
    out = np.zeros_like(x).ravel()
    keep = np.argsort(-np.abs(x.ravel()), kind="stable")[:k]
    out[keep] = x.ravel()[keep]
    return out.reshape(x.shape)


def np_strided_top1(x, k):
    flat = x.ravel()
    out = np.zeros_like(flat)
    for j in range(k):
        members = np.arange(j, flat.size, k)
        best = members[np.argmax(np.abs(flat[members]))]
        out[best] = flat[best]
    return out.reshape(x.shape)


@pytest.mark.parametrize("spec", ALL)
def test_result_is_the_same_on_all_ranks_to_the_bit(spec, rank, gather):
    result = hvdc.allreduce(tf.constant(data(rank)), compression=spec, name="same").numpy()
    everyone = gather(result)
    assert np.isfinite(result).all() and np.abs(result).sum() > 0
    assert (everyone == everyone[0]).all()


def test_none_is_the_mean(rank, size):
    result = hvdc.allreduce(tf.constant(data(rank)), compression="none", name="none")
    np.testing.assert_allclose(result, all_data(size).mean(0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("spec,bits", [("int8", 8), ("int4", 4), ("quantize:bits=3", 3)])
def test_quantized_is_within_half_a_step_of_the_mean(spec, bits, rank, size):
    result = hvdc.allreduce(tf.constant(data(rank)), compression=spec, name="quantized").numpy()
    xs = all_data(size).astype(np.float64)
    bound = np.mean([block_steps(x, bits) / 2 for x in xs], axis=0)
    assert (np.abs(result - xs.mean(0)) <= bound * (1 + 1e-5)).all()
    # codes summed as codes would be far off; so would a sum without the average
    assert np.abs(result - xs.sum(0)).max() > bound.max()


def test_casts_are_the_mean_of_what_numpy_casts(rank, size):
    for spec, dtype in (("fp16", np.float16), ("bf16", tf.bfloat16.as_numpy_dtype)):
        result = hvdc.allreduce(tf.constant(data(rank)), compression=spec, name=spec).numpy()
        expected = np.mean([x.astype(dtype).astype(np.float64) for x in all_data(size)], axis=0)
        np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("spec,select", [("topk:ratio=0.01", np_topk), ("block_topk:ratio=0.01", np_strided_top1)])
def test_sparse_is_the_mean_of_what_numpy_selects(spec, select, rank, size):
    result = hvdc.allreduce(tf.constant(data(rank)), compression=spec, name="sparse").numpy()
    k = -(-SHAPE[0] * SHAPE[1] // 100)
    expected = np.mean([select(x, k) for x in all_data(size)], axis=0)
    np.testing.assert_allclose(result, expected, rtol=1e-6, atol=0)


def test_randomk_keeps_the_same_elements_on_all_ranks(rank, size):
    result = hvdc.allreduce(tf.constant(data(rank)), compression="randomk:ratio=0.1", name="randomk").numpy()
    mean = all_data(size).mean(0)
    kept = result != 0
    assert kept.sum() == -(-mean.size // 10)
    np.testing.assert_allclose(result[kept], mean[kept], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("spec", ["none", "int8", "topk:ratio=0.05", "randomk:ratio=0.1", "powersgd:rank=2"])
def test_sum_is_size_times_average(spec, rank, size):
    x = tf.constant(data(rank))
    average = hvdc.allreduce(x, op=hvd.Average, compression=spec, name="average").numpy()
    total = hvdc.allreduce(x, op=hvd.Sum, compression=spec, name="sum").numpy()
    np.testing.assert_allclose(total, average * size, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "spec", ["none", "int4", "int2", "hybrid:ratio=0.05,bits=4", "randomk:ratio=0.1", "powersgd:rank=2"]
)
def test_inside_a_function_as_eagerly(spec, rank):
    x = tf.constant(data(rank))
    eager = hvdc.allreduce(x, compression=spec, name="eager").numpy()
    graph = tf.function(lambda t: hvdc.allreduce(t, compression=spec, name="graph"))(x).numpy()
    np.testing.assert_allclose(graph, eager, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("spec", ["none", "int8", "topk:ratio=0.05"])
def test_prescale_and_postscale(spec, rank):
    x = tf.constant(data(rank))
    plain = hvdc.allreduce(x, compression=spec, name="plain").numpy()
    scaled = hvdc.allreduce(x, compression=spec, prescale_factor=0.5, postscale_factor=8.0, name="scaled").numpy()
    np.testing.assert_allclose(scaled, plain * 4.0, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float32, tf.float64])
@pytest.mark.parametrize("spec", ["fp16", "int8", "topk:ratio=0.5"])
def test_dtypes_come_back(spec, dtype, rank, size):
    xs = [np.linspace(-1, 1, 64, dtype=np.float64) * (r + 1) for r in range(size)]
    result = hvdc.allreduce(tf.cast(xs[rank], dtype), compression=spec, name="dtypes")
    assert result.dtype == dtype
    if spec != "topk:ratio=0.5":
        np.testing.assert_allclose(tf.cast(result, tf.float64), np.mean(xs, 0), atol=0.02 * size)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (0,), (3, 5, 7)])
@pytest.mark.parametrize("spec", ["int8", "onebit", "hybrid:ratio=0.5,bits=4", "randomk:ratio=0.5", "powersgd:rank=1"])
def test_odd_shapes(spec, shape, rank):
    result = hvdc.allreduce(tf.constant(data(rank, shape)), compression=spec, name="odd")
    assert result.shape == shape
    assert np.isfinite(result.numpy()).all()


@pytest.mark.parametrize("spec", ALL[1:])
def test_nothing_but_zeros_stays_zero(spec):
    assert not hvdc.allreduce(tf.zeros(SHAPE), compression=spec, name="zeros").numpy().any()


@pytest.mark.parametrize("spec", ALL)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_one_bad_element_on_one_rank_is_seen_by_all(spec, bad, rank, size):
    x = data(rank)
    if rank == size - 1:
        x[3, 5] = bad
    result = hvdc.allreduce(tf.constant(x), compression=spec, name="bad").numpy()
    assert not np.isfinite(result).all()


def test_integers_and_slices_pass_uncompressed(rank, size):
    total = hvdc.allreduce(tf.constant([rank, 10]), compression="int8", op=hvd.Sum, name="integers")
    assert total.numpy().tolist() == [size * (size - 1) // 2, 10 * size]
    slices = tf.IndexedSlices(tf.fill([1, 2], float(rank + 1)), tf.constant([rank]), tf.constant([size, 2]))
    result = hvdc.allreduce(slices, compression="int8", op=hvd.Sum, name="slices")
    expected = np.repeat(np.arange(1.0, size + 1)[:, None], 2, axis=1)
    np.testing.assert_array_equal(tf.convert_to_tensor(result).numpy(), expected)


def test_grouped_is_each_for_itself(rank):
    shapes = [(40, 50), (7,), (3, 3, 4, 8)]
    tensors = [tf.constant(data(rank, shape, seed=i)) for i, shape in enumerate(shapes)]
    tensors.insert(1, tf.constant([rank + 1, 2]))
    for spec in ("none", "int8", "topk:ratio=0.1", "randomk:ratio=0.1"):
        together = hvdc.grouped_allreduce(tensors, compression=spec, op=hvd.Sum, name=f"group_{spec[:4]}")
        assert [t.shape for t in together] == [t.shape for t in tensors]
        assert together[1].numpy().tolist() == [sum(r + 1 for r in range(hvd.size())), 2 * hvd.size()]
        if spec.startswith("randomk"):
            continue  # each tensor of a group draws its own choice
        for i in (0, 2, 3):
            alone = hvdc.allreduce(tensors[i], compression=spec, op=hvd.Sum, name=f"alone_{i}_{spec[:4]}")
            np.testing.assert_allclose(together[i].numpy(), alone.numpy(), rtol=1e-5, atol=1e-6)


def test_other_ops(rank):
    x = tf.constant([float(rank), 1.0])
    assert hvdc.allreduce(x, op=hvd.Max, compression="none", name="max").numpy()[0] == hvd.size() - 1
    with pytest.raises(ValueError, match="supports op Average and Sum only"):
        hvdc.allreduce(x, op=hvd.Max, compression="int8", name="max8")
    with pytest.raises(TypeError, match="complex"):
        hvdc.allreduce(tf.complex(x, x), compression="int8", name="complex")


def test_unknown_shape_is_refused_clearly():
    @tf.function(input_signature=[tf.TensorSpec([None, 3])])
    def reduce(x):
        return hvdc.allreduce(x, compression="int8", name="unknown")

    with pytest.raises(ValueError, match=r"int8 needs a tensor of static shape.*tf.ensure_shape"):
        reduce(tf.zeros([4, 3]))


def test_inside_xla_is_refused_clearly():
    @tf.function(jit_compile=True)
    def reduce(x):
        return hvdc.allreduce(x, compression="int8", name="xla")

    with pytest.raises(RuntimeError, match="jit_compile=False"):
        reduce(tf.zeros([4, 3]))


@pytest.mark.parametrize("compression", ["none", "fp16", "bf16", "randomk:ratio=0.25"])
def test_summable_compressors_work_in_stock_horovod(compression, rank, size):
    compressor = hvdc.Compression.parse(compression)
    x = data(rank)
    for reduce in (hvd.allreduce, tf.function(hvd.allreduce)):
        result = reduce(tf.constant(x), compression=compressor, op=hvd.Average, name=None).numpy()
        mean = all_data(size).mean(0)
        kept = result != 0 if compression.startswith("randomk") else np.ones(SHAPE, bool)
        assert kept.sum() == (x.size // 4 if compression.startswith("randomk") else x.size)
        np.testing.assert_allclose(result[kept], mean[kept], rtol=0.02, atol=0.02)


@pytest.mark.parametrize("compression", ["int8", "onebit", "topk:ratio=0.1", "hybrid:ratio=0.1,bits=4"])
def test_stock_horovod_refuses_packed_codes(compression, rank):
    compressor = hvdc.Compression.parse(compression)
    for reduce in (hvd.allreduce, tf.function(hvd.allreduce)):
        with pytest.raises(Exception, match="hvdc.allreduce") as caught:
            reduce(tf.constant(data(rank)), compression=compressor, op=hvd.Sum)
        assert isinstance(caught.value, (TypeError, ValueError))


@pytest.mark.parametrize("compression", ["none", "int8", "topk:ratio=0.1", "randomk:ratio=0.1"])
@pytest.mark.np4
def test_process_sets(compression, rank, size, process_sets):
    mine = process_sets[rank % 2]
    members = list(range(rank % 2, size, 2))
    result = hvdc.allreduce(
        tf.constant(data(rank)), compression=compression, process_set=mine, name=f"set_{rank % 2}"
    ).numpy()
    mean = np.mean([data(r) for r in members], axis=0)
    kept = np.ones(SHAPE, bool) if compression in ("none", "int8") else result != 0
    steps = [block_steps(data(r), 8) / 2 for r in members]
    bound = np.mean(steps, 0) * 1.001 if compression == "int8" else 1e-6 + 1e-5 * np.abs(mean)
    if compression == "topk:ratio=0.1":
        mean = np.mean([np_topk(data(r), -(-data(r).size // 10)) for r in members], axis=0)
    assert (np.abs(result - mean) <= bound)[kept].all()


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize(
    ("first", "others", "message"),
    [
        ({"compression": "int8"}, {"compression": "quantize:bits=7"}, "compression: rank 0 has int8, rank 1 has quan"),
        ({"op": hvd.Sum}, {}, "op: rank 0 has Sum, rank 1 has Average;"),
        ({"prescale_factor": 2.0}, {}, "prescale_factor: rank 0 has 2.0, rank 1 has 1.0;"),
        ({"postscale_factor": 2.0}, {}, "postscale_factor: rank 0 has 2.0, rank 1 has 1.0;"),
        (
            {"tensor": tf.zeros(SHAPE[::-1])},
            {},
            r"tensor 0: rank 0 has float32 \(48, 64\), rank 1 has float32 \(64, 48",
        ),
        ({"tensor": tf.zeros(SHAPE, tf.float16)}, {}, "tensor 0: rank 0 has float16 .* rank 1 has float32"),
    ],
)
def test_calls_that_differ_are_an_error_on_all_ranks(graph, first, others, message, rank):
    arguments = {"tensor": tf.zeros(SHAPE), "compression": "int8", "name": f"differ_{graph}"} | (
        others if rank else first
    )

    def call():
        return hvdc.allreduce(**arguments)

    with pytest.raises(ValueError, match=f"ranks disagree on {message}") as info:
        (tf.function(call) if graph else call)()
    assert len(set(hvd.allgather_object(str(info.value)))) == 1 and "\n" not in str(info.value)


def test_numbers_of_tensors_that_differ_are_an_error_on_all_ranks(rank):
    with pytest.raises(ValueError, match="the number of compressed tensors: rank 0 has 1, rank 1 has 2;"):
        hvdc.grouped_allreduce([tf.zeros(SHAPE)] * (2 if rank else 1), compression="int8", name="numbers")


def test_only_the_first_call_of_a_kind_is_compared(rank, monkeypatch):
    asked = []
    allgather = hvd.allgather
    monkeypatch.setattr(
        agreement.hvd, "allgather", lambda x, name=None, **options: asked.append(name) or allgather(x, name, **options)
    )

    @tf.function
    def in_graph(x):
        return hvdc.allreduce(x, compression="int8", name="one")

    for step in range(3):
        x = tf.constant(data(rank, seed=step))
        np.testing.assert_array_equal(hvdc.allreduce(x, compression="int8", name="one"), in_graph(x))
    hvdc.allreduce(tf.zeros([3, 5]), compression="none", name="one")  # Horovod compares it

    def compared():
        return [name for name in asked if name and name.startswith("hvdc_allreduce_")]

    assert compared() == ["hvdc_allreduce_one"]
    hvdc.allreduce(tf.zeros([3, 5]), compression="int8", name="one")
    assert compared() == ["hvdc_allreduce_one"] * 2
    monkeypatch.setattr(sys.modules["hvd_compress.frontends.allreduce"], "_MOST_COMPARED", 2)
    for step in range(3):
        hvdc.allreduce(tf.zeros([3, 5]), compression="int8", name=f"metric_{step}")
    assert compared() == ["hvdc_allreduce_one"] * 2
