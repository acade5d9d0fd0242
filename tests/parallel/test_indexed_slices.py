"""Gradients that are IndexedSlices, against a simulation of all ranks in NumPy."""

import horovod.tensorflow as hvd
import introspect
import numpy as np
import pytest
import tensorflow as tf

import hvd_compress as hvdc
from hvd_compress.kernels import native

ROWS, COLUMNS = 50, 24


def draw(rank, step, rows=ROWS, columns=COLUMNS):
    """A rank's slices of a step: other numbers of them on each rank, rows twice within ranks and between them."""
    rng = np.random.default_rng([7, rank, step])
    count = int(rng.integers(0, 40))
    indices = np.minimum(rng.zipf(1.3, count) - 1, rows - 1)
    return indices, rng.standard_normal((count, columns)).astype(np.float32)


class Training:
    """Reduces the slices of one table, of any numbers of rows, in one traced function."""

    def __init__(self, spec, rows=ROWS, columns=COLUMNS, dtype=tf.float32, index=tf.int64, **settings):
        settings.setdefault("min_compress_size", 0)
        self.reducer = introspect.new_reducer(spec, **settings)
        self.table = tf.Variable(tf.zeros([rows, columns], dtype))
        self.traces = 0

        @tf.function(input_signature=[tf.TensorSpec([None], index), tf.TensorSpec([None, columns], dtype)])
        def reduce(indices, values):
            self.traces += 1
            gradient = tf.IndexedSlices(values, indices, tf.constant([rows, columns], index))
            (reduced,) = self.reducer([gradient], [self.table])
            return reduced.indices, reduced.values

        self._reduce, self._dtype, self._index = reduce, dtype, index

    def __call__(self, indices, values):
        """The reduced gradient as a dense array, once its rows are checked."""
        found = self._reduce(tf.cast(indices, self._index), tf.cast(values, self._dtype))
        indices, values = (t.numpy() for t in found)
        assert len(set(indices.tolist())) == len(indices)
        dense = np.zeros(self.table.shape, values.dtype)
        dense[indices] = values
        self.rows = len(indices)
        return dense

    @property
    def plan(self):
        return introspect.plan_of(self.reducer)

    @property
    def residual(self):
        (variable,) = introspect.row_residual_variables(self.plan)
        return variable.numpy().astype(np.float64)


def dense_of(indices, values, rows=ROWS):
    total = np.zeros((rows, values.shape[1]), np.float64)
    np.add.at(total, indices, values)
    return total


def quantized(x, bits):
    """Rows of float64 on their grids, and where rounding is too close to tell from float32."""
    low, high = x.min(1, keepdims=True), x.max(1, keepdims=True)
    step = (high - low) / (2**bits - 1)
    safe = np.where(step > 0, step, 1.0)
    first = np.round(low / safe)
    position = x / safe
    code = np.clip(np.round(position) - first, 0, 2**bits - 1)
    unsure = np.abs(np.abs(position % 1.0) - 0.5) < 1e-3
    unsure |= (np.abs(np.abs(low / safe % 1.0) - 0.5) < 1e-3) & ((code == 0) | (code == 2**bits - 1))
    return np.where(step > 0, (code + first) * safe, x), unsure, step


def use(kernels, monkeypatch):
    """Lets new plans use these kernels."""
    if kernels == "native" and native.library() is None:
        pytest.skip("the native kernels are not built")
    monkeypatch.setenv(native.VARIABLE, kernels)


@pytest.mark.parametrize("bits, op", [(8, hvd.Average), pytest.param(4, hvd.Sum, marks=pytest.mark.slow)])
def test_fifty_steps_as_simulated(bits, op, rank, size, gather):
    training = Training(f"quantize:bits={bits}", op=op)
    residuals = np.zeros((size, ROWS, COLUMNS))
    close = 0
    for step in range(50):
        found = training(*draw(rank, step))
        everyone = gather(found)
        assert (everyone == everyone[0]).all()
        actual = gather(training.residual)
        total, doubtful = np.zeros((ROWS, COLUMNS)), np.zeros((ROWS, COLUMNS), bool)
        for r in range(size):
            indices, values = draw(r, step)
            touched = np.unique(indices)
            if not len(touched):
                continue
            x = dense_of(indices, values)[touched] + residuals[r, touched]
            sent, unsure, grid = quantized(x, bits)
            total[touched] += sent
            left = x - sent
            mine = actual[r, touched]
            np.testing.assert_allclose(mine[~unsure], left[~unsure], atol=1e-5)
            assert (np.abs(mine - left) <= grid + 1e-5).all()
            # Where a hair's breadth decides, the simulation goes on with what was done.
            residuals[r, touched] = np.where(unsure, mine, left)
            doubtful[touched] |= unsure
            close += unsure.sum()
        np.testing.assert_array_equal(actual[residuals == 0.0], 0.0)
        expected = total / (size if op == hvd.Average else 1)
        np.testing.assert_allclose(found[~doubtful], expected[~doubtful], atol=1e-5)
    assert close < 0.01 * 50 * size * 20 * COLUMNS
    assert training.traces == 1


@pytest.mark.parametrize("settings", [{}, {"op": hvd.Sum}, {"gradient_predivide_factor": 2.0}], ids=str)
def test_uncompressed_rows_are_summed(settings, rank, size, gather):
    training = Training("none", **settings)
    for step in range(10):
        found = training(*draw(rank, step))
        everyone = gather(found)
        assert (everyone == everyone[0]).all()
        expected = sum(dense_of(*draw(r, step)) for r in range(size)) / (1 if "op" in settings else size)
        np.testing.assert_allclose(found, expected, atol=1e-5)
        assert training.rows == len(set(np.concatenate([draw(r, step)[0] for r in range(size)]).tolist()))
    assert not introspect.row_residual_variables(training.plan)


@pytest.mark.parametrize(
    "spec, settings",
    [
        ("int8", {}), ("hybrid:ratio=0.1,bits=4", {"op": hvd.Sum}), ("onebit", {}), ("hadamard", {}),
        ("int4", {"gradient_predivide_factor": 4.0}), ("quantize:bits=4,clip=90", {"residual_dtype": "bfloat16"}),
        ("fp16", {"error_feedback": True}), ("auto", {}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kernels", native.KINDS)
def test_mass_of_every_row_is_conserved(kernels, spec, settings, rank, size, gather, monkeypatch):
    use(kernels, monkeypatch)
    training = Training(spec, **settings)
    factor = settings.get("gradient_predivide_factor", 1.0)
    times = 1 if "op" in settings else size / factor
    old, before = np.zeros((ROWS, COLUMNS)), np.zeros((ROWS, COLUMNS))
    for step in range(8):
        found = training(*draw(rank, step)).astype(np.float64)
        residuals = gather(training.residual)
        untouched = np.setdiff1d(np.arange(ROWS), draw(rank, step)[0])
        np.testing.assert_array_equal(training.residual[untouched], before[untouched])
        before = training.residual
        came = sum(dense_of(*draw(r, step)) for r in range(size)) / factor
        tolerance = 2e-2 if "residual_dtype" in settings else 2e-5
        np.testing.assert_allclose(found * times + residuals.sum(0), came + old, atol=tolerance)
        old = residuals.sum(0)
    assert np.abs(old).max() > 0


@pytest.mark.parametrize("spec, kernels", [("none", "native"), ("int8", "native"), ("int8", "xla")])
def test_ranks_without_rows(spec, kernels, rank, size, monkeypatch):
    use(kernels, monkeypatch)
    training = Training(spec)
    empty = np.zeros(0, np.int64), np.zeros((0, COLUMNS), np.float32)
    some = np.array([3, 3, 9]), np.ones((3, COLUMNS), np.float32)
    assert (training(*empty) == 0.0).all() and training.rows == 0
    found = training(*(some if rank == size - 1 else empty))
    np.testing.assert_allclose(found[3], 2 / size, rtol=1e-6)
    np.testing.assert_allclose(found[9], 1 / size, rtol=1e-6)
    assert training.rows == 2 and np.count_nonzero(found) == 2 * COLUMNS
    assert (training(*empty) == 0.0).all()


@pytest.mark.parametrize("spec", ["none", "int8", "onebit", "hadamard"])
def test_dense_where_that_sends_less(spec, rank, size, gather):
    """To and fro in one traced function; ranks of different numbers of rows choose alike."""
    rows = 40
    training, old = Training(spec, rows=rows), np.zeros((rows, COLUMNS))
    rng = np.random.default_rng(rank)
    dense = []
    for step in range(8):
        count = rows if step % 4 in (1, 2) else 3 * rank
        indices = np.tile(rng.permutation(rows)[:count], 2)
        values = rng.standard_normal((len(indices), COLUMNS)).astype(np.float32)
        found = training(indices, values)
        seen = gather(introspect.rows_of_last_step(training.plan)[0])
        assert (seen[:, :2] == seen[0, :2]).all() and seen[rank, 2] == len(indices)
        assert seen[0, 0] == (rows * size if count == rows else 3 * sum(range(size)))
        dense.append(bool(seen[0, 1]))
        everyone = gather(found)
        assert (everyone == everyone[0]).all()
        came = gather(dense_of(indices, values, rows)).sum(0)
        left = gather(training.residual).sum(0) if spec != "none" else 0.0
        np.testing.assert_allclose(size * found + left, came + old, atol=3e-5)
        old = left
        assert (training.rows == rows) == dense[-1]
    assert dense == [False, True, True, False, False, True, True, False]
    assert training.traces == 1


@pytest.mark.parametrize("spec, index", [("none", tf.int32), ("int8", tf.int64)])
@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float64, tf.int32])
def test_dtypes(spec, dtype, index, rank, size):
    training = Training(spec, dtype=dtype, index=index, op=hvd.Sum)
    found = training(np.array([rank, rank, size]), np.full((3, COLUMNS), 2.0 * (rank + 1)))
    assert tf.as_dtype(found.dtype) == dtype
    for r in range(size):
        np.testing.assert_allclose(found[r].astype(np.float64), 4.0 * (r + 1), rtol=1e-2)
    np.testing.assert_allclose(found[size].astype(np.float64), size * (size + 1), rtol=1e-2)


@pytest.mark.parametrize("spec", ["none", "int8"])
def test_not_finite_on_one_rank_is_so_on_all(spec, rank, size, gather):
    training = Training(spec)
    training(*draw(rank, 0))
    before = training.residual if spec == "int8" else None
    values = np.ones((2, COLUMNS), np.float32)
    values[0, 3] = np.nan if rank == size - 1 else 1.0
    found = training(np.array([1, 2]), values)
    assert np.isnan(found[1, 3]) and np.isfinite(found[2]).all()
    if spec == "int8":
        np.testing.assert_array_equal(training.residual, before)
    assert np.isfinite(training(*draw(rank, 1))).all()


def test_rows_that_are_not_there_stay_so(rank):
    training = Training("none", rows=255)
    indices, _ = training._reduce(tf.constant([-3, 255, 10**9, 4], tf.int64), tf.ones([4, COLUMNS]))
    assert sorted(indices.numpy().tolist()) == [4, 255]


# Bytes


def payloads_of(training, steps, monkeypatch):
    """The sizes of all that this rank hands to an allgather, by step."""
    sizes, original = [], hvd.grouped_allgather

    def watched(tensors, **options):
        tf.py_function(lambda *found: sizes.append(sum(int(tf.size(t)) for t in found)), tensors, [])
        return original(tensors, **options)

    monkeypatch.setattr(hvd, "grouped_allgather", watched)
    for indices, values in steps:
        training(indices, values)
    return sizes


@pytest.mark.parametrize(
    "spec, row", [("none", 3 + 256), ("int8", 3 + 8 + 64), ("int4", 3 + 8 + 32), ("hadamard", 3 + 18)]
)
def test_bytes_on_the_wire(spec, row, rank, size, monkeypatch):
    rows, columns, tokens = 100_000, 64, 2048
    rng = np.random.default_rng(rank)
    indices = np.minimum(rng.zipf(1.2, tokens) - 1, rows - 1)
    training = Training(spec, rows=rows, columns=columns)
    values = rng.standard_normal((tokens, columns)).astype(np.float32)
    distinct = len(np.unique(indices))
    assert payloads_of(training, [(indices, values)], monkeypatch) == [distinct * row]
    sent, stock = introspect.bytes_sent(training.plan)
    everyone = int(hvd.allreduce(tf.constant(distinct), op=hvd.Sum, name="distinct"))
    assert sent == everyone * row * (size - 1) // size
    assert stock == tokens * (256 + 8) * (size - 1)
    assert sent < stock * distinct / tokens * row / 256 * 1.05
    dense = 2 * (size - 1) / size * rows * columns * 4
    assert sent < dense / 10
    (report,) = introspect.report_of(training.reducer).buckets
    assert report.nbytes == rows * columns * 4 and report.chosen == hvdc.Compression.parse(spec).spec


def test_several_tables_cross_at_once(rank, size, monkeypatch):
    """Of other sizes, types and compressors, and one of them dense."""
    shapes = {"words": (500, 16), "places": (10, 16), "pairs": (300, 4, 4), "counts": (40,)}
    variables = [tf.Variable(tf.zeros(shape), name=name) for name, shape in shapes.items()]
    policy = (("pairs*", hvdc.Compression.int4), ("places*", hvdc.Compression.none))
    reducer = introspect.new_reducer("int8", op=hvd.Sum, min_compress_size=100, policy=policy)
    calls, original = [], hvd.grouped_allgather
    monkeypatch.setattr(hvd, "grouped_allgather", lambda t, **k: calls.append(len(t)) or original(t, **k))

    def gradients(rank):
        rng = np.random.default_rng(rank)
        picked = {name: rng.integers(0, shape[0], 60) for name, shape in shapes.items()}
        picked["places"] = np.tile(np.arange(10), 6)
        return [(i, rng.standard_normal((60, *shapes[name][1:])).astype(np.float32)) for name, i in picked.items()]

    slices = [tf.IndexedSlices(tf.constant(v), tf.constant(i)) for i, v in gradients(rank)]
    found = reducer(slices, variables)
    assert calls == [4]
    plan = introspect.plan_of(reducer)
    assert introspect.row_compressors(plan) == ["int8", "none", "int4", "none"]
    assert introspect.rows_of_last_step(plan)[:, 1].tolist() == [0, 1, 0, 0]
    for k, (result, shape) in enumerate(zip(found, shapes.values())):
        dense = np.zeros(shape)
        np.add.at(dense, result.indices.numpy(), result.values.numpy())
        expected = np.zeros(shape)
        for r in range(size):
            np.add.at(expected, *gradients(r)[k])
        np.testing.assert_allclose(dense, expected, atol=[0.1, 1e-5, 1.5, 1e-5][k])


@pytest.mark.np4
@pytest.mark.parametrize("spec", ["none", "int8"])
def test_four_ranks_conserve_mass_and_choose_alike(spec, rank, size, gather, monkeypatch):
    """Dense gradients are scatter-reduced there, with a loss of the second encoding."""
    introspect.prefer_scatter_reduce(monkeypatch)
    rows, columns = 512, 64
    training, old, dense = Training(spec, rows=rows, columns=columns), 0.0, []
    for step in range(6):
        rng = np.random.default_rng([rank, step])
        count = rows if step in (1, 4) else 20 * rank
        indices = np.concatenate([rng.permutation(rows)[:count], rng.integers(0, rows, 5)])
        values = rng.standard_normal((len(indices), columns)).astype(np.float32)
        found = training(indices, values)
        everyone = gather(found)
        assert (everyone == everyone[0]).all()
        left = gather(training.residual).sum(0) if spec == "int8" else 0.0
        came = gather(dense_of(indices, values, rows)).sum(0)
        np.testing.assert_allclose(size * found + left, came + old, atol=5e-5)
        old = left
        dense.append(int(introspect.rows_of_last_step(training.plan)[0, 1]))
    assert dense == [0, 1, 0, 0, 1, 0]


def test_other_ranks_are_not_asked(rank, size, process_sets):
    mine = process_sets[rank % 2]
    training = Training("int8", process_set=mine)
    indices, values = draw(rank, 3)
    found = training._reduce(tf.constant(indices, tf.int64), tf.constant(values))
    if mine.size() == 1:
        np.testing.assert_array_equal(found[1], values)


def test_rows_of_another_length_are_refused(rank):
    reducer = introspect.new_reducer("int8")
    slices = tf.IndexedSlices(tf.ones([2, 8]), tf.constant([1, 2]))
    with pytest.raises(ValueError, match=r"the gradient of table has shape \(None, 8\), the variable \(40, 16\)"):
        reducer([slices], [tf.Variable(tf.zeros([40, 16]), name="table")])


class Mixed:
    """Reduces a dense gradient and slices with `auto`, whose steps are traced with one candidate at first."""

    def __init__(self, rank, monkeypatch):
        introspect.trace_all_candidates(monkeypatch, False)
        self.reducer = introspect.new_reducer("auto:candidates=(none|int8)", min_compress_size=0)
        self.table, self.dense = tf.Variable(tf.zeros([ROWS, COLUMNS])), tf.Variable(tf.zeros([100, 30]))
        self.steps, self.traces = 0, 0
        self._rank = rank

        slices = tf.TensorSpec([None], tf.int64), tf.TensorSpec([None, COLUMNS])

        @tf.function(input_signature=[*slices, tf.TensorSpec([100, 30])], autograph=False)
        def reduce(indices, values, dense):
            self.traces += 1
            gradient = tf.IndexedSlices(values, indices, tf.constant([ROWS, COLUMNS], tf.int64))
            rows, _ = self.reducer([gradient, dense], [self.table, self.dense])
            return rows.indices, rows.values

        self._reduce = reduce

    def step(self):
        """The reduced gradient of the table as a dense array."""
        indices, values = draw(self._rank, self.steps)
        dense = np.random.default_rng([self._rank, self.steps]).standard_normal((100, 30)).astype(np.float32)
        self.steps += 1
        rows, values = (t.numpy() for t in self._reduce(tf.constant(indices, tf.int64), values, dense))
        return dense_of(rows, values)

    @property
    def plan(self):
        return introspect.plan_of(self.reducer)

    @property
    def residual(self):
        (variable,) = introspect.row_residual_variables(self.plan)
        return variable.numpy().astype(np.float64)


def mean_of(step, size):
    return sum(dense_of(*draw(r, step)) for r in range(size)) / size


@pytest.mark.usefixtures("fixed_costs")
def test_auto_compresses_rows_once_that_is_worth_it(rank, size, gather, monkeypatch):
    training = Mixed(rank, monkeypatch)
    for step in range(8):
        np.testing.assert_allclose(training.step(), mean_of(step, size), atol=1e-6)
    assert introspect.row_compressors(training.plan) == ["none"] and training.traces == 1
    assert training.reducer.report().buckets[-1].chosen == "none"
    sent = introspect.row_bytes_sent(training.plan, 0)
    counts = introspect.rows_of_last_step(training.plan)[0]
    assert sent == (size - 1) * counts[0] * (4 * COLUMNS + 1) // size  # a row's number takes one byte
    if rank == 0:  # which decides
        introspect.want_traced(training.plan, [2])
    for step in range(8, 10):
        np.testing.assert_allclose(training.step(), mean_of(step, size), atol=1e-6)
        assert not training.residual.any()
    assert introspect.row_compressors(training.plan) == ["int8"]
    old = np.zeros((ROWS, COLUMNS))
    for step in range(10, 15):
        found, left = training.step(), gather(training.residual).mean(0)
        np.testing.assert_allclose(found + left, mean_of(step, size) + old, atol=2e-5)
        old = left
    assert np.abs(old).max() > 0.0 and training.traces == 2
    assert training.reducer.report().buckets[-1].chosen == "int8"


@pytest.mark.usefixtures("fixed_costs")
def test_restored_residuals_of_rows_are_sent(rank, size, gather, monkeypatch):
    first = Mixed(rank, monkeypatch)
    first.step()
    introspect.compress_rows(first.plan)
    introspect.row_residual_variables(first.plan)[0].assign(tf.fill([ROWS, COLUMNS], 1.0 + rank))
    second = Mixed(rank, monkeypatch)
    introspect.set_pending(second.reducer, [introspect.saved_state(first.plan)])
    second.steps = first.steps
    found = second.step()
    assert introspect.row_compressors(second.plan) == ["int8"]
    touched = np.unique(draw(rank, 1)[0])
    expected = mean_of(1, size) + gather(np.full((ROWS, COLUMNS), 1.0 + rank)).mean(0)
    np.testing.assert_allclose(found + gather(second.residual).mean(0), expected, atol=2e-5)
    assert not np.allclose(second.residual[touched], 1.0 + rank)
