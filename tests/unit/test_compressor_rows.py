"""Rows that are compressed one by one, against NumPy."""

import numpy as np
import pytest
import tensorflow as tf

import hvd_compress as hvdc
from hvd_compress.compressors import rows
from hvd_compress.compressors.base import Seeds
from hvd_compress.compressors.rows import Rows
from hvd_compress.kernels import native

SEEDS = Seeds(tf.constant(3), tf.constant(5))


@pytest.fixture(autouse=True, params=native.KINDS)
def kind(request, monkeypatch):
    """The kernels that are in use."""
    if request.param == "native" and native.library() is None:
        pytest.skip("the native kernels are not built")
    monkeypatch.setenv(native.VARIABLE, request.param)
    return request.param


def coder(spec, columns, table=1000, dtype=tf.float32):
    return Rows(hvdc.Compression.parse(spec), table, columns, dtype)


def draw(rows, columns, seed=0):
    """Rows of very different sizes, with a zero row and a constant one."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, columns)) * 10.0 ** rng.uniform(-6, 3, (rows, 1))
    x[1], x[2] = 0.0, x[2, 0]
    return x.astype(np.float32)


def round_trip(code, x, numbers=None, seeds=SEEDS):
    """What rows decode to, and what `encode` says that they leave out."""
    numbers = np.arange(len(x)) if numbers is None else numbers

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64), tf.TensorSpec([None, x.shape[1]], x.dtype)])
    def run(numbers, x):
        payload, left = code.encode(numbers, x, seeds)
        return payload, left, *code.decode(payload)

    payload, left, found, values = (t.numpy() for t in run(tf.constant(numbers, tf.int64), tf.constant(x)))
    assert payload.shape == (len(x), code.nbytes) and payload.dtype == np.uint8
    np.testing.assert_array_equal(found, numbers)
    assert values.shape == left.shape == x.shape
    return values, left


def own_blocks(x, largest):
    """Each row in as few blocks as possible, all of one size, a multiple of 8: the last may be shorter."""
    columns = x.shape[1]
    count = -(-columns // largest)
    size = 8 * -(-columns // (8 * count))
    return [x[:, i : i + size] for i in range(0, columns, size)]


@pytest.mark.parametrize("columns", [1, 8, 64, 300])
@pytest.mark.parametrize("bits", [8, 4, 3])
def test_quantized_rows(bits, columns):
    x = draw(70, columns)
    values, left = round_trip(coder(f"quantize:bits={bits}", columns), x)
    np.testing.assert_allclose(values + left, x, rtol=2e-6, atol=1e-12)
    start = 0
    for block in own_blocks(x.astype(np.float64), 256):
        low, high = block.min(1, keepdims=True), block.max(1, keepdims=True)
        step = (high - low) / (2**bits - 1)
        with np.errstate(invalid="ignore", divide="ignore"):
            expected = np.where(step > 0, np.round(block / step) * step, block)
            near = np.abs(np.abs(block / step % 1.0) - 0.5) < 1e-3
        near |= (block - low < step) | (high - block < step)  # where codes end
        found = values[:, start : start + block.shape[1]]
        np.testing.assert_allclose(found[~near], expected[~near], rtol=1e-5, atol=1e-12)
        assert (np.abs(found - block) <= step * 0.5001 + 1e-6 * np.abs(block)).all()
        start += block.shape[1]
    assert (values[1] == 0.0).all()
    np.testing.assert_allclose(values[2], x[2], rtol=1e-6)


@pytest.mark.parametrize("columns", [5, 64, 1500])
def test_signs_of_rows(columns):
    x = draw(9, columns)
    values, left = round_trip(coder("onebit", columns), x)
    expected = [np.where(b < 0, -1, 1) * np.abs(b).mean(1, keepdims=True) for b in own_blocks(x, 1024)]
    np.testing.assert_allclose(values, np.concatenate(expected, 1), rtol=1e-5)
    np.testing.assert_allclose(left, x - values, rtol=1e-6, atol=1e-12)


def rotation(size):
    """A Hadamard matrix with entries of one magnitude, from its definition."""
    quarter = np.full([4, 4], 0.5) - np.eye(4)
    return np.kron(np.kron(quarter, quarter), quarter) if size == 64 else np.kron(quarter, quarter)


@pytest.mark.parametrize(
    "columns, size", [(1, 16), (8, 16), (20, 16), (32, 16), (48, 64), (64, 64), (80, 16), (100, 64), (300, 64)]
)
def test_rotated_rows(columns, size):
    x = draw(70, columns)
    code = coder("hadamard", columns)
    values, left = round_trip(code, x)
    blocks = -(-columns // size)
    assert code.nbytes == 2 + blocks * (2 + size // 4)
    padded = np.pad(x.astype(np.float64), [(0, 0), (0, blocks * size - columns)]).reshape(70, blocks, size)
    rotated = padded @ rotation(size)
    scale = np.sqrt(np.pi / 2) * np.abs(rotated).mean(2, keepdims=True)
    scale = scale.astype(tf.bfloat16.as_numpy_dtype).astype(np.float64)
    level = np.where(np.abs(rotated) > 0.9815988 * scale, 1.5104176, 0.4527800)
    expected = (np.where(rotated < 0, -level, level) * scale @ rotation(size)).reshape(70, -1)[:, :columns]
    length = np.linalg.norm(x, axis=1, keepdims=True)
    same = np.abs(values - expected) <= 1e-5 * length
    assert same.all(1).mean() > 0.95  # the others have a value between two levels
    assert (np.abs(values + left - x) <= 2e-6 * length).all()
    assert (values[1] == 0.0).all()
    # The error of a contraction, and that of the Lloyd-Max quantizer for the normal rows (Max 1960, Table I).
    lost = (left.astype(np.float64)[3:] ** 2).sum(1) / length[3:, 0] ** 2
    assert (lost < 1.0).all()
    if columns % size == 0:
        assert 0.09 < lost.mean() < 0.14


def test_casts_and_plain_rows():
    x = draw(5, 7)
    values, left = round_trip(coder("none", 7), x)
    np.testing.assert_array_equal(values, x)
    assert (left == 0.0).all()
    values, left = round_trip(coder("fp16", 7), x)
    np.testing.assert_array_equal(values, x.astype(np.float16).astype(np.float32))
    np.testing.assert_array_equal(left, x - values)
    values, _ = round_trip(coder("bf16", 7), x)
    np.testing.assert_allclose(values, x, rtol=2**-8)
    doubles = x.astype(np.float64) * (1 + 1e-12)
    values, _ = round_trip(coder("none", 7, dtype=tf.float64), doubles)
    np.testing.assert_array_equal(values, doubles)


def test_stochastic_rounding_is_unbiased():
    x, times = draw(4, 16), 900
    values, _ = round_trip(coder("quantize:bits=2,rounding=stochastic", 16), np.repeat(x, times, 0))
    mean = values.astype(np.float64).reshape(4, times, 16).mean(1)
    step = (x.max(1) - x.min(1)) / 2
    # A rounding error's deviation is at most half a step.
    assert (np.abs(mean - x).max(1) <= 5 * 0.5 * step / np.sqrt(times) + 1e-6 * np.abs(x).max(1)).all()


def test_a_percentile_clips_each_row():
    x = draw(6, 200, seed=4)
    values, left = round_trip(coder("quantize:bits=8,clip=90", 200), x)
    limit = np.percentile(np.abs(x.astype(np.float64)), 90, axis=1, keepdims=True)
    clipped = np.clip(x, -limit, limit)
    assert (np.abs(values - clipped) <= limit / 255 * 1.001 + 1e-12).all()
    np.testing.assert_allclose(values + left, x, rtol=1e-5, atol=1e-6 * np.abs(x).max())


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("spec", ["none", "bf16", "int8", "quantize:bits=4,clip=90", "onebit", "hadamard"])
def test_only_rows_that_are_not_finite_are_not_finite(spec, bad):
    x = draw(5, 32)
    x[3, 17] = bad
    values, _ = round_trip(coder(spec, 32), x)
    assert not np.isfinite(values[3]).all()
    assert np.isfinite(np.delete(values, 3, 0)).all()


@pytest.mark.parametrize("table", [1, 2, 255, 256, 65535, 65536, 2**24, 2**32 + 7])
def test_numbers_of_rows(table):
    numbers = np.unique([0, table // 2, table - 1, table])  # the last stands for none
    x = draw(max(3, len(numbers)), 8)[: len(numbers)]
    round_trip(coder("int8", 8, table), x, numbers)
    assert 256 ** (coder("int8", 8, table).nbytes - 16) > table


@pytest.mark.parametrize("spec", ["none", "int8", "onebit", "hadamard"])
def test_no_rows(spec):
    values, _ = round_trip(coder(spec, 12), np.zeros((0, 12), np.float32))
    assert values.shape == (0, 12)


def test_bytes_of_a_row():
    def nbytes(spec, columns, table=100_000):
        return coder(spec, columns, table).nbytes

    assert nbytes("none", 64) == 3 + 256
    assert nbytes("fp16", 64) == 3 + 128
    assert nbytes("int8", 64) == 3 + 8 + 64
    assert nbytes("int4", 64) == 3 + 8 + 32
    assert nbytes("onebit", 64) == 3 + 4 + 8
    assert nbytes("hadamard", 64) == 3 + 2 + 16
    assert nbytes("hadamard", 32) == 3 + 2 * (2 + 4)
    assert nbytes("int8", 300) == 3 + 2 * (8 + 152)
    with pytest.raises(TypeError, match="no form for rows"):
        nbytes("topk:ratio=0.1", 64)


@pytest.mark.parametrize(
    "spec, expected",
    [
        ("none", "none"), ("fp16", "fp16"), ("int4", "quantize:bits=4"), ("onebit", "onebit"),
        ("hybrid:ratio=0.01,bits=3", "quantize:bits=3"), ("topk:ratio=0.01", "none"), ("randomk:ratio=0.1", "none"),
        ("block_sparse:ratio=0.1,block=4", "none"), ("hadamard", "hadamard"), ("auto", "hadamard"),
        ("auto:candidates=(none|topk:ratio=0.01)", "none"), ("auto:candidates=(bf16|hadamard|int8)", "hadamard"),
        ("auto:candidates=(quantize:bits=2|onebit|int8)", "int8"), ("auto:candidates=(none|bf16)", "bf16"),
        ("auto:candidates=(onebit|quantize:bits=2|none)", "quantize:bits=2"),
    ],
)  # fmt: skip
def test_what_rows_are_compressed_with(spec, expected):
    assert hvdc.Compression.parse(spec).for_rows() == hvdc.Compression.parse(expected)


def test_a_users_compressor_leaves_rows_as_they_are():
    class Half(hvdc.Compressor):
        def compress(self, tensor):
            return tensor / 2, None

        def decompress(self, payload, ctx):
            return payload

    assert Half().for_rows() == hvdc.Compression.none


def test_kernels_are_compiled_for_few_numbers_of_rows():
    sizes = {rows._pad_rows(tf.zeros([n, 2])).shape[0] for n in range(1, 1025)}
    assert sizes == {64, 128, 256, 512, 1024}
    assert rows._pad_rows(tf.zeros([0, 2])).shape == (64, 2)
