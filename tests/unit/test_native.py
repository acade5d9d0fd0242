"""Native operations against XLA's kernels, and what they refuse.

The kernels of XLA are themselves compared with NumPy, and all compressors run natively in the other tests. Both round
differently by an ulp, so values beside the middle of two levels may get either code.
"""

import numpy as np
import pytest
import tensorflow as tf

import hvd_compress as hvdc
from hvd_compress.common import devices
from hvd_compress.compressors import Seeds
from hvd_compress.compressors.payload import join, take
from hvd_compress.compressors.rows import Rows
from hvd_compress.exchange import coding
from hvd_compress.exchange.local_input import LocalInput
from hvd_compress.kernels import native

pytestmark = pytest.mark.skipif(native.library() is None, reason="the native kernels are not built")

SPECS = [
    "int8",
    "int4",
    "quantize:bits=7",
    "quantize:bits=1",
    "quantize:bits=4,rounding=stochastic,seed=5",
    "onebit",
    "block_topk:ratio=0.01",
    "hybrid:ratio=0.05,bits=3",
    "topk:ratio=0.01",
    "topk:ratio=0.3",
    "hadamard",
    "int2",
    "fp16",
    "bf16",
]
# A short chunk, and one of many blocks that is no multiple of their size; topk needs pages for its indices.
SIZES = [13, 70_001]
SEEDS = Seeds(tf.constant(3), tf.constant(11), 2)


def heavy_tailed(n: int, seed: int) -> tf.Tensor:
    return tf.constant(np.random.default_rng(seed).standard_t(3, n).astype(np.float32))


@pytest.fixture
def use(monkeypatch):
    return lambda kind: monkeypatch.setenv(native.VARIABLE, kind)


@pytest.mark.parametrize("spec", SPECS)
def test_native_and_xla_agree(spec, use):
    compressor = hvdc.Compression.parse(spec)
    for n in SIZES:
        gradient, residual = heavy_tailed(n, 0), 0.1 * heavy_tailed(n, 1)
        decoded, lost, parts = {}, {}, {}
        for kind in native.KINDS:
            use(kind)
            encoded = compressor.encode(gradient, SEEDS, residual, 0.9, True)
            assert bool(encoded.finite)
            parts[kind], lost[kind] = encoded.parts, encoded.residual.numpy()
            decoded[kind] = compressor.decode(encoded.parts, encoded.ctx).numpy()
        x = gradient.numpy() + np.float32(0.9) * residual.numpy()
        # Nearly all codes are equal, and the others differ by one level: then the error is about as large. A code of
        # `hadamard` changes the 64 values of its block.
        same = np.isclose(decoded["native"], decoded["xla"], rtol=1e-5, atol=1e-7)
        assert same.mean() > (0.98 if spec == "hadamard" else 0.999)
        for kind in native.KINDS:
            np.testing.assert_allclose(decoded[kind] + lost[kind], x, rtol=1e-5, atol=2e-6 * np.abs(x).max())
        assert np.linalg.norm(lost["native"]) == pytest.approx(np.linalg.norm(lost["xla"]), rel=1e-4)
        # Each kind decodes the other's payload, summed over the ranks.
        for payloads in ([parts["xla"], parts["native"]] * 5, [parts["native"]]):
            sums = []
            for kind in native.KINDS:
                use(kind)
                joined = [join([*payload, tf.zeros([1], tf.uint8)]) for payload in payloads]
                contexts = [encoded.ctx]
                sums.append(coding.decode(compressor, [(n,)], joined, contexts, tf.constant(0.3))[0].numpy())
            np.testing.assert_allclose(*sums, rtol=1e-5, atol=1e-6 * np.abs(sums[0]).max())


@pytest.mark.parametrize("spec", ["int4", "hybrid:ratio=0.05,bits=4", "topk:ratio=0.05"])
def test_a_bucket_of_chunks_is_that_of_each_chunk(spec, use):
    use("native")
    compressor, n = hvdc.Compression.parse(spec), 5000
    gradients = [heavy_tailed(n, seed) for seed in range(3)]
    residuals = [heavy_tailed(n, 10 + seed) for seed in range(3)]
    shard = coding.encode(compressor, LocalInput([[g] for g in gradients], residuals, 1.0, True, SEEDS, first_chunk=4))
    layout = compressor.layout((n,))
    for i, parts in enumerate(take(shard.payload, [layout] * 3)):
        alone = compressor.encode(gradients[i], SEEDS._replace(chunk=4 + i), residuals[i], 1.0, True)
        for part, expected in zip(parts, alone.parts):
            np.testing.assert_array_equal(part, expected)
        np.testing.assert_array_equal(shard.residuals[i], alone.residual)
    assert shard.payload[-1] == 0 and bool(shard.finite())


@pytest.mark.parametrize("spec", SPECS)
def test_pieces_are_read_where_they_are(spec, use):
    """Pieces of a chunk, some of them shorter than a block, give the bits of the whole chunk."""
    use("native")
    compressor, sizes = hvdc.Compression.parse(spec), [(70_001,), (1, 30, 700, 4096, 3, 33_000, 257), (13,)]
    chunks = [heavy_tailed(sum(of_chunk), seed) for seed, of_chunk in enumerate(sizes)]
    pieces = [tf.split(chunk, of_chunk) for chunk, of_chunk in zip(chunks, sizes)]
    for residuals in ([0.1 * heavy_tailed(len(chunk), 9) for chunk in chunks], [None] * 3):
        whole = coding.encode(compressor, LocalInput([[c] for c in chunks], residuals, 0.9, True, SEEDS))
        shard = coding.encode(compressor, LocalInput(pieces, residuals, 0.9, True, SEEDS))
        np.testing.assert_array_equal(shard.payload, whole.payload)
        for residual, expected in zip(shard.residuals, whole.residuals):
            np.testing.assert_array_equal(residual, expected)


@pytest.mark.parametrize("spec", SPECS)
def test_shares_are_decoded_by_one_operation(spec, use):
    use("native")
    compressor, shapes = hvdc.Compression.parse(spec), [(5000,)] * 6
    half = compressor.wire_bytes(5000) * 3
    rng = np.random.default_rng(0)
    payloads = []  # of two ranks for the first half of the chunks, then for the second half
    for _ in range(4):
        chunks = [[tf.constant(rng.normal(size=5000).astype(np.float32))] for _ in range(3)]
        payloads.append(coding.encode(compressor, LocalInput(chunks, [None] * 3, 1.0, False, SEEDS)).payload)
    assert payloads[0].shape[0] >= half
    expected = [
        chunk
        for share in (payloads[:2], payloads[2:])
        for chunk in coding.decode(compressor, shapes[:3], share, shapes[:3], tf.constant(0.5))
    ]
    apart = coding.decode(compressor, shapes, payloads, shapes, tf.constant(0.5), shares=2)
    (joined,) = coding.decode(compressor, shapes, payloads, shapes, tf.constant(0.5), shares=2, joined=True)
    np.testing.assert_array_equal(tf.stack(apart), tf.stack(expected))
    np.testing.assert_array_equal(joined, tf.concat(expected, 0))
    use("xla")
    of_xla = coding.decode(compressor, shapes, payloads, shapes, tf.constant(0.5), shares=2, joined=True)
    np.testing.assert_allclose(tf.concat(of_xla, 0), joined, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("spec", SPECS)
def test_both_ranks_decode_the_sum_of_their_payloads_to_the_same(spec, use):
    use("native")
    compressor, shapes = hvdc.Compression.parse(spec), [(5000,)] * 3
    chunks = [[[heavy_tailed(5000, 10 * rank + i)] for i in range(3)] for rank in range(2)]
    own, theirs = (
        coding.encode(compressor, LocalInput(of_rank, [None] * 3, 1.0, False, SEEDS)).payload for of_rank in chunks
    )
    expected = coding.decode(compressor, shapes, [own, theirs], shapes, tf.constant(0.5))
    total = tf.constant(own.numpy() + theirs.numpy())  # modulo 256
    for payload in (own, theirs):
        decoded = coding.decode(compressor, shapes, [payload, total], shapes, tf.constant(0.5), summed=True)
        np.testing.assert_array_equal(tf.stack(decoded), tf.stack(expected))


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_lowers_the_flag(spec, bad, use):
    use("native")
    for position in (0, 4999):
        values = heavy_tailed(5000, 0).numpy()
        values[position] = bad
        chunks = [heavy_tailed(5000, 1), tf.constant(values)]
        shard = coding.encode(
            hvdc.Compression.parse(spec), LocalInput([[chunk] for chunk in chunks], [None] * 2, 1.0, False, SEEDS)
        )
        assert shard.payload[-1] == 1 and not bool(shard.finite())


def test_threads_do_not_change_the_result(use, monkeypatch):
    use("native")
    chunks = [heavy_tailed(3000, seed) for seed in range(9)]
    local_input = LocalInput([[chunk] for chunk in chunks], [None] * 9, 1.0, True, SEEDS)
    compressor = hvdc.Compression.parse("int4")
    monkeypatch.setattr(devices, "intra_op_threads", lambda: 1)
    one = coding.encode(compressor, local_input)
    monkeypatch.setattr(devices, "intra_op_threads", lambda: 4)
    for _ in range(20):
        four = coding.encode(compressor, local_input)
        np.testing.assert_array_equal(one.payload, four.payload)
        decoded = coding.decode(compressor, local_input.shapes, [four.payload] * 2, four.contexts, tf.constant(0.5))
        for chunk, residual, original in zip(decoded, four.residuals, chunks):
            np.testing.assert_allclose(chunk + residual, original, atol=1e-5)


def test_payloads_of_another_length_are_refused(use):
    use("native")
    compressor = hvdc.Compression.int8
    with pytest.raises(tf.errors.InvalidArgumentError, match="payload is shorter than expected"):
        coding.decode(compressor, [(5000,)], [tf.zeros([5000], tf.uint8)], [(5000,)], tf.constant(1.0))


def test_damaged_payloads_write_nothing_out_of_bounds(use):
    use("native")
    rng = np.random.default_rng(0)
    for spec in SPECS:
        compressor, n = hvdc.Compression.parse(spec), 70_001
        for _ in range(5):
            payload = tf.constant(rng.integers(0, 256, compressor.wire_bytes(n) + 64, np.uint8))
            (decoded,) = coding.decode(compressor, [(n,)], [payload], [(n,)], tf.constant(1.0))
            assert decoded.shape == (n,)
            if spec.startswith("topk"):  # random indices are never valid
                assert np.isnan(decoded).all()


def test_the_environment_variable_chooses(use, monkeypatch):
    use("xla")
    assert native.in_use(hvdc.Compression.int8.native_format) is None
    use("native")
    assert native.in_use(hvdc.Compression.int8.native_format).method == "quantize"
    assert native.in_use(hvdc.Compression.parse("powersgd:rank=2").native_format) is None
    use("cuda")
    with pytest.raises(ValueError, match="HVD_COMPRESS_KERNELS must be 'native' or 'xla', got 'cuda'"):
        native.kind()
    monkeypatch.setattr(
        native, "_load", lambda: (None, "are not built: install hvd_compress where there is a C++ compiler")
    )
    native.library.cache_clear()
    use("native")
    with pytest.raises(ValueError, match="are not built: install hvd_compress where there is a C"):
        native.kind()
    monkeypatch.delenv(native.VARIABLE)
    assert native.kind() == "xla"
    native.library.cache_clear()


def test_no_kernel_is_compiled_for_a_bucket(use):
    use("native")

    @tf.function
    def step(gradient, residual):
        shard = coding.encode(hvdc.Compression.int4, LocalInput([[gradient]], [residual], 1.0, True, SEEDS))
        return coding.decode(hvdc.Compression.int4, [(5000,)], [shard.payload], shard.contexts, tf.constant(1.0))

    spec = tf.TensorSpec([5000])
    operations = [op.type for op in step.get_concrete_function(spec, spec).graph.get_operations()]
    assert operations.count("HvdCompressEncode") == operations.count("HvdCompressDecode") == 1
    assert not any("Call" in operation for operation in operations)


@pytest.mark.parametrize("columns", [1, 7, 64, 300, 1500])
@pytest.mark.parametrize(
    "spec", ["int8", "int4", "quantize:bits=3", "quantize:bits=2,rounding=stochastic,seed=5", "onebit", "hadamard"]
)
def test_rows_of_native_and_xla_agree(spec, columns, use):
    code = Rows(hvdc.Compression.parse(spec), 1000, columns)
    numbers = tf.constant(np.random.default_rng(2).permutation(1000)[:333], tf.int64)
    values = tf.reshape(heavy_tailed(333 * columns, 0), [333, columns])
    payloads, lost, decoded = {}, {}, {}
    for kind in native.KINDS:
        use(kind)
        payloads[kind], lost[kind] = code.encode(numbers, values, SEEDS)
    for kind in native.KINDS:
        use(kind)
        for made_by, payload in payloads.items():
            found, decoded[kind, made_by] = code.decode(payload)
            np.testing.assert_array_equal(found, numbers)
        np.testing.assert_allclose(
            decoded[kind, kind] + lost[kind], values, rtol=1e-5, atol=2e-6 * np.abs(values).max()
        )
    # Values that are rotated back are sums over a block, and round as those.
    atol = 1e-6 * np.abs(values).max(1, keepdims=True) if spec == "hadamard" else 1e-7

    def agree(a, b):
        return np.abs(a - b) <= atol + 1e-5 * np.abs(b)

    for made_by in native.KINDS:
        assert agree(decoded["native", made_by], decoded["xla", made_by]).all()
    assert agree(decoded["native", "native"], decoded["native", "xla"]).mean() > 0.999


def test_threads_do_not_change_rows(use, monkeypatch):
    use("native")
    code = Rows(hvdc.Compression.int4, 10_000, 1500)
    numbers, values = tf.range(500, dtype=tf.int64), tf.reshape(heavy_tailed(500 * 1500, 0), [500, 1500])
    monkeypatch.setattr(devices, "intra_op_threads", lambda: 1)
    one = code.encode(numbers, values, SEEDS)
    monkeypatch.setattr(devices, "intra_op_threads", lambda: 4)
    for _ in range(20):
        four = code.encode(numbers, values, SEEDS)
        for a, b in zip(one, four):
            np.testing.assert_array_equal(a, b)
        found, decoded = code.decode(four[0])
        np.testing.assert_array_equal(found, numbers)
        np.testing.assert_allclose(decoded + four[1], values, atol=1e-4)


def test_rows_of_another_length_are_refused(use):
    use("native")
    code = Rows(hvdc.Compression.int8, 1000, 64)
    with pytest.raises(tf.errors.InvalidArgumentError, match="the payload has another length than expected"):
        code.decode(tf.zeros([3, code.nbytes + 1], tf.uint8))
    with pytest.raises(tf.errors.InvalidArgumentError, match="not of equally many rows"):
        code.encode(tf.range(3, dtype=tf.int64), tf.zeros([4, 64]), SEEDS)
    rng = np.random.default_rng(0)
    for spec in ("int8", "quantize:bits=3", "onebit", "hadamard"):  # damaged ones write nothing out of bounds
        code = Rows(hvdc.Compression.parse(spec), 1000, 300)
        numbers, values = code.decode(tf.constant(rng.integers(0, 256, (50, code.nbytes), np.uint8)))
        assert numbers.shape == (50,) and values.shape == (50, 300)


@pytest.mark.parametrize("spec", ["int8", "quantize:bits=2,rounding=stochastic", "onebit", "hadamard"])
def test_no_kernel_is_compiled_for_rows(spec, use):
    use("native")
    code = Rows(hvdc.Compression.parse(spec), 1000, 64)
    assert not code.needs_xla

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64), tf.TensorSpec([None, 64])])
    def step(numbers, values):
        return code.decode(code.encode(numbers, values, SEEDS)[0])

    operations = [op.type for op in step.get_concrete_function().graph.get_operations()]
    assert operations.count("HvdCompressEncodeTableRows") == operations.count("HvdCompressDecodeTableRows") == 1
    assert not any("Call" in operation for operation in operations)
    use("xla")
    assert code.needs_xla and not Rows(hvdc.Compression.fp16, 1000, 64).needs_xla


def test_an_older_library_is_not_used(monkeypatch):
    monkeypatch.setattr(native, "NEWEST", "hvd_compress_of_tomorrow")
    operations, why = native._load.__wrapped__()
    assert operations is None and why == "are older than the package: install hvd_compress again"
