"""What cannot be: each gets one error of one line that names it; nothing else is raised, and nothing is written."""

import decimal

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
from specs import INDEXED, PACKED

import hvd_compress as hvdc
from hvd_compress.common import checks
from hvd_compress.compressors.payload import split
from hvd_compress.compressors.resolve import resolve
from hvd_compress.engine.settings import Settings

Compression = hvdc.Compression
SHAPES = [(7,), (64, 32), (300, 400)]


def refused(match, function, *arguments, kind=(ValueError, TypeError), **keywords):
    with pytest.raises(kind, match=match) as error:
        function(*arguments, **keywords)
    assert "\n" not in str(error.value) and "0x" not in str(error.value) and len(str(error.value)) < 400


# Arguments of compressors


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("topk(0.01)", r"unknown compressor 'topk\(0.01\)': did you mean 'topk'"),
        ("topk=0.01", "did you mean 'topk'"),
        (" INT8 ", "did you mean 'int8'"),
        ("fp8", "did you mean 'fp16'"),
        ("top_k:ratio=0.1", "did you mean 'topk'"),
        ("int8\nint4", r"unknown compressor 'int8\\nint4': did you mean 'int8'"),
        ("x" * 5000, r"unknown compressor 'xxx.* \.\.\.: Known are"),
        ("topk:" + "x" * 5000 + "=1", "'topk' has no argument 'xxx"),
        ("topk:ratio=nan", "ratio must be a number above 0 and at most 1, got nan"),
        ("quantize:bits=8,foo=1", "'quantize' has no argument 'foo'.*it takes bits, rounding, clip, seed"),
        ("quantize:bits=" + "9" * 5000, "bits must be a whole number from 1 to 8"),
        ("auto:phases=5", "auto: phases must be a list, got 5"),
        ("auto:phases=none", "auto: phases must be a list, got None"),
        ("auto:candidates=5", "auto: candidates must be a list, got 5"),
        ("auto:candidates=(auto)", "auto itself is none"),
        ("auto:phases=(1:2:3)", "phases must be pairs of step and target, got '1:2:3'"),
    ],
)
def test_specs(spec, message):
    refused(message, Compression.parse, spec, kind=ValueError)


@pytest.mark.parametrize("spec", [None, 8, b"int8", ["int8"], Compression.int8])
def test_specs_that_are_no_strings(spec):
    refused("a spec must be a string such as 'topk:ratio=0.01', got", Compression.parse, spec, kind=TypeError)


NOT_NUMBERS = [np.array([0.1]), np.zeros([40, 50]), tf.constant(0.1), tf.Variable(0.1), np.bool_(True), 1j,
               decimal.Decimal("0.1"), np.float32("nan"), object(), [0.1] * 1000]  # fmt: skip


@pytest.mark.parametrize("value", NOT_NUMBERS, ids=lambda value: type(value).__name__)
def test_numbers_that_are_none(value):
    refused("ratio must be a number above 0 and at most 1, got ", Compression.topk, value, kind=ValueError)
    refused("bits must be a whole number from 1 to 8, got ", Compression.quantize, value, kind=ValueError)
    refused("clip must be None or a percentile", Compression.quantize, 4, clip=value, kind=ValueError)
    refused("seed must be a whole number", Compression.randomk, 0.1, seed=value, kind=ValueError)
    refused("auto: target must be a number from 0 to 1", Compression.auto, target=value, kind=ValueError)
    refused("rounding must be 'nearest' or 'stochastic'", Compression.quantize, 4, rounding=value, kind=ValueError)


@pytest.mark.parametrize(
    ("phases", "message"),
    [
        ([(float("inf"), 0.1)], "the step of a phase must be a whole number from 0 on, got inf"),
        ([(1.5, 0.1)], "the step of a phase must be a whole number from 0 on, got 1.5"),
        ([(1, float("nan"))], "the target of a phase must be a number from 0 to 1, got nan"),
        ([5], "phases must be pairs of step and target, got 5"),
        ([(5, 0.1), (3, 0.2)], "the steps of phases must increase"),
        (None, "phases must be a list, got None"),
        ("5:0.1", "phases must be a list, got '5:0.1'"),
    ],
)
def test_phases(phases, message):
    refused(message, Compression.auto, phases=phases, kind=ValueError)


def test_the_base_class_is_no_compressor():
    refused("compression must be a hvdc.Compressor, .*got <class", resolve, hvdc.Compressor, kind=TypeError)


# Settings of optimizer and tape


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        (
            "min_compress_size",
            [-1, "10", 1.5, None, True, float("nan")],
            "must be a whole number from 0 on, got",
        ),
        ("bucket_bytes", [0, "x", 1e6, None, True, float("inf")], "must be a whole number from 1 on, got"),
        (
            "residual_dtype",
            ["float16", None, 5, ["float32"], tf.float64],
            "must be 'float32' or 'bfloat16', got",
        ),
        ("on_nonfinite", ["ignore", None, 5, ["skip"], np.array(["skip"])], "must be one of .*, got"),
        ("process_set", [None, 5, "x", [0, 1]], "must be a hvd.ProcessSet, got"),
        (
            "groups",
            [-1, 0, 1.5, "x", [1], True, {"a": 1}],
            "groups should be a non-negative integer or a list of",
        ),
        ("groups", [[["a"]], [[None]]], "groups must hold variables, got"),
        ("op", ["Average", None, hvd.Adasum, 99, np.array([0, 1])], "only supports Average and Sum, got"),
        ("error_feedback", ["yes", 2, np.array([1])], "must be True or False, got"),
        ("sparse_as_dense", ["x", None, 0.5], "must be True or False, got"),
        ("scale_local_gradients", ["x", None], "must be True or False, got"),
        (
            "residual_decay",
            [-0.1, 1.1, float("nan"), "1", None, True],
            "must be a number from 0.0 to 1.0, got",
        ),
        (
            "gradient_predivide_factor",
            ["2", None, float("nan"), float("inf"), True],
            "must be a finite number",
        ),
        ("gradient_predivide_factor", [0, -1], "gradient_predivide_factor must be above 0, got"),
        ("device_dense", [5], "device_dense must be a string, got 5"),
        ("device_sparse", [5], "device_sparse must be a string, got 5"),
        ("name", [5], "name must be a string, got 5"),
    ],
)
def test_settings(name, values, message):
    for value in values:
        refused(message, Settings, Compression.int8, **{name: value})


def test_a_variable_in_two_groups_is_refused():
    variable = tf.Variable(tf.zeros([40, 50]), name="kernel")
    refused("stands in them twice", Settings, Compression.int8, groups=[[variable], [variable]])


def test_numpys_numbers_are_numbers():
    settings = Settings(
        Compression.int8, bucket_bytes=np.int64(1000), residual_decay=np.float32(0.5), groups=np.int64(2),
        error_feedback=np.bool_(True), residual_dtype=tf.bfloat16, gradient_predivide_factor=2,
    )  # fmt: skip
    kept = (settings.bucket_bytes, settings.residual_decay, settings.groups, settings.error_feedback)
    assert kept == (1000, 0.5, 2, True) and [type(v) for v in kept] == [int, float, int, bool]
    assert settings.residual_dtype == "bfloat16" and settings.gradient_predivide_factor == 2.0


def test_what_errors_show_is_the_same_on_every_rank():
    for value in (
        object(),
        lambda: None,
        tf.random.normal([3]),
        np.random.rand(2, 2),
        [object(), {"a": object()}],
    ):
        assert "0x" not in checks.error_text(value) and "numpy=" not in checks.error_text(value)
    assert checks.error_text(tf.zeros([3, 4])) == "a EagerTensor of float32 (3, 4)"
    assert len(checks.error_text("x" * 1000)) == 100


def test_errors_stay_in_one_line_inside_a_function():
    @checks.not_converted
    def complain():
        raise ValueError("this is wrong")

    @tf.function
    def step():
        complain()

    with pytest.raises(ValueError, match="^this is wrong$"):
        step()


# Tensors that cannot be compressed


@pytest.mark.parametrize("spec", PACKED)
def test_tensors(spec):
    compressor = Compression.parse(spec)
    for dtype in (tf.int32, tf.complex64, tf.bool):
        refused("compresses floating point tensors, got", compressor.compress, tf.zeros([3], dtype))
    traced = tf.function(checks.not_converted(compressor.compress), input_signature=[tf.TensorSpec([None, 3])])
    refused(r"needs a tensor of static shape, got \(None, 3\)", traced.get_concrete_function)


# Damaged payloads


@pytest.mark.parametrize("spec", PACKED)
def test_payloads_of_a_wrong_length(spec):
    compressor = Compression.parse(spec)
    packed, ctx = compressor.compress(tf.ones([64, 32]))
    data = packed.tensor
    for wrong in (data[:-1], tf.concat([data, data[:1]], 0), data[:0]):
        refused("bytes cannot be decoded: .* are expected", compressor.decompress, hvdc.Payload(wrong, spec), ctx)
    for wrong in (data[None], tf.cast(data, tf.int32), None, "bytes", data.numpy()):
        refused(r"must hold a vector of bytes \(uint8\), got", compressor.decompress, wrong, ctx)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.uint8)])
    def later(data):
        return compressor.decompress(data, ctx)

    np.testing.assert_array_equal(later(data), compressor.decompress(packed, ctx))
    with pytest.raises(tf.errors.InvalidArgumentError, match="is not compatible with expected shape"):
        later(data[:-1])


def damaged(compressor, shape, data, value):
    """The payload with every byte of its indices replaced; None where it holds none that can be wrong."""
    data, start = data.numpy().copy(), 0
    for spec in compressor.layout(shape):
        length = int(np.prod(spec.shape)) * spec.dtype.size
        if spec.dtype != tf.float32:
            data[start : start + length] = value
        start += length
    return tf.constant(data)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("spec", INDEXED)
def test_indices_out_of_range_are_refused(spec, shape):
    compressor = Compression.parse(spec)
    packed, ctx = compressor.compress(tf.random.stateless_normal(shape, [1, 2]))
    bad = damaged(compressor, shape, packed.tensor, 255)
    refused("its indices are not those of a tensor of shape", compressor.decompress, bad, ctx)
    # In a graph, and in the exchange, NaN everywhere; beside an intact payload, too.
    graph = tf.function(lambda data: compressor.decompress(data, ctx))
    assert np.isnan(graph(bad)).all() and np.isfinite(graph(packed.tensor)).all()


@pytest.mark.parametrize("spec", INDEXED)
def test_one_damaged_payload_spoils_the_sum_of_all(spec):
    compressor, shape = Compression.parse(spec), (64, 32)
    packed, (ctx, *_) = compressor.compress(tf.random.stateless_normal(shape, [1, 2]))
    good = split(packed.tensor, compressor.layout(shape))
    bad = split(damaged(compressor, shape, packed.tensor, 255), compressor.layout(shape))
    assert np.isnan(compressor.decode_sum([good, bad], ctx, tf.constant(0.5))).all()
    assert np.isfinite(compressor.decode_sum([good, good], ctx, tf.constant(0.5))).all()


def test_a_row_of_the_padding_is_out_of_range():
    """7 elements in 4 strided blocks: the last has one row only."""
    compressor = Compression.block_topk(0.5)
    packed, ctx = compressor.compress(tf.range(1.0, 8.0))
    data = packed.tensor.numpy().copy()
    assert data[-1] == 0
    data[-1] = 1
    refused("its indices are not those", compressor.decompress, tf.constant(data), ctx)
