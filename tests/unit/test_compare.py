"""Compressors on a user's own gradients, against NumPy and theory."""

import dataclasses
import inspect
import json
import math

import numpy as np
import pytest
import reference
import tensorflow as tf
from tensorflow import keras

import hvd_compress as hvdc
from hvd_compress.analysis.comparison import ComparedCompressor, Comparison
from hvd_compress.common import gradient_file

SHAPES = {"first/kernel": (60, 40), "first/bias": (40,), "second/kernel": (40, 5, 10)}
COMPRESSED = 60 * 40 + 40 * 5 * 10
BIAS_BYTES = 4 * 40


def recorded(steps, seed=0):
    """Gradients whose magnitude differs between variables; float32."""
    rng = np.random.default_rng(seed)
    scales = [1.0, 3.0, 0.1]
    return [
        {n: (s * rng.standard_t(4, shape)).astype(np.float32) for (n, shape), s in zip(SHAPES.items(), scales)}
        for _ in range(steps)
    ]


def flat(step):
    """What is compressed, in the order in which gradients are sent: the last one first."""
    return np.concatenate([step["second/kernel"].ravel(), step["first/kernel"].ravel()]).astype(np.float64)


def norm(x):
    return math.sqrt(np.sum(np.square(x, dtype=np.float64)))


def only(result):
    (row,) = result.rows
    return row


def sparse(x, ratio):
    """The largest of `x`; zeros elsewhere."""
    kept = np.zeros_like(x)
    largest = np.argsort(-np.abs(x), kind="stable")[: reference.num_kept(ratio, x.size)]
    kept[largest] = x[largest]
    return kept


def without_times(result):
    return [dataclasses.replace(row, encode_ms=0.0, decode_ms=0.0) for row in result.rows]


def test_top_k_with_residuals_over_the_recorded_steps():
    steps, ratio = recorded(3), 0.05
    row = only(hvdc.compare(steps, f"topk:ratio={ratio}", steps=5))
    first = flat(steps[0])
    lost = first - sparse(first, ratio)
    assert row.mse == pytest.approx(np.mean(lost**2), rel=1e-4)
    assert row.relative_error == pytest.approx(norm(lost) / norm(first), rel=1e-4)
    assert row.bias == pytest.approx(row.relative_error, rel=1e-3)  # no randomness
    residual, total = np.zeros(COMPRESSED), np.zeros(COMPRESSED)
    for t in range(5):
        total += flat(steps[t % 3])
        x = residual + flat(steps[t % 3])
        residual = x - sparse(x, ratio)
    assert row.error_with_residual == pytest.approx(norm(residual) / norm(total), rel=1e-4)
    k = reference.num_kept(ratio, COMPRESSED)
    assert row.bytes == 4 * k + reference.index_bytes(COMPRESSED, k) + BIAS_BYTES
    assert row.ratio == pytest.approx((4 * COMPRESSED + BIAS_BYTES) / row.bytes)
    assert row.encode_ms > 0.0 and row.decode_ms > 0.0


def test_a_quantizer_rounds_to_its_levels():
    (step,) = recorded(1)
    row = only(hvdc.compare(step, "int4"))
    x = flat(step)
    # Chunks end with zeros for whole blocks: they lie between the extremes of the last block, and change no level.
    lost = reference.nearest_levels(x.astype(np.float32), 4)[0] - x
    assert row.relative_error == pytest.approx(norm(lost) / norm(x), rel=1e-3)
    assert row.error_with_residual < row.relative_error / 4  # of 8 steps: the last residual / 8, and a little


def test_momentum_of_dgc():
    """What was sent is compared with the velocities of plain momentum."""
    steps, ratio, m = recorded(4), 0.1, 0.9
    row = only(hvdc.compare(steps, f"dgc:ratio={ratio},momentum={m},warmup_epochs=0"))
    u, v, plain, wanted, sent = (np.zeros(COMPRESSED) for _ in range(5))
    for step in steps:
        plain = m * plain + flat(step)
        wanted += plain
        u = m * u + flat(step)
        v += u
        out = sparse(v, ratio)
        sent += out
        u[out != 0], v[out != 0] = 0.0, 0.0
    assert row.error_with_residual == pytest.approx(norm(wanted - sent) / norm(wanted), rel=1e-3)
    # A warm-up is left out.
    assert only(hvdc.compare(steps, f"dgc:ratio={ratio},momentum={m}")).bytes == row.bytes


def test_bias_and_variance_of_random_compressors():
    """Random-k of a share r: E[C(x)] = r x and ||x - C(x)||^2 = (1 - r) ||x||^2; divided by r, 0 and 1 / r - 1."""
    gradient = np.random.default_rng(0).standard_normal((300, 400)).astype(np.float32)
    r, k = 0.25, 9
    specs = [f"randomk:ratio={r}", f"randomk:ratio={r},unbiased=true", "quantize:bits=2,rounding=stochastic"]
    result = hvdc.compare([gradient], specs, steps=k)
    biased, unbiased, quantized = result.rows
    assert biased.relative_error == pytest.approx(math.sqrt(1 - r), rel=0.02)
    assert biased.bias == pytest.approx(1 - r, rel=0.02)
    assert unbiased.relative_error == pytest.approx(math.sqrt(1 / r - 1), rel=0.02)
    assert unbiased.bias < 0.1 * unbiased.relative_error
    assert unbiased.error_with_residual == pytest.approx(unbiased.relative_error / math.sqrt(k), rel=0.05)
    assert quantized.bias < 0.1 * quantized.relative_error
    assert quantized.error_with_residual == pytest.approx(quantized.relative_error / math.sqrt(k), rel=0.05)


def test_factors_of_a_matrix_of_low_rank():
    rng = np.random.default_rng(0)
    exact = (rng.standard_normal((50, 2)) @ rng.standard_normal((2, 60))).astype(np.float32)
    row = only(hvdc.compare([exact], "powersgd:rank=2"))
    assert row.bytes == 4 * 2 * (50 + 60)
    assert row.relative_error < 1e-4 and row.error_with_residual < 1e-4
    # With a warm start, factors approach the largest singular vectors: better than any random start.
    noisy = exact + 0.5 * rng.standard_normal((50, 60)).astype(np.float32)
    one, many = (only(hvdc.compare([noisy], "powersgd:rank=2", steps=steps)) for steps in (1, 12))
    smallest = math.sqrt(np.sum(np.linalg.svd(noisy, compute_uv=False)[2:] ** 2)) / norm(noisy)
    assert one.error_with_residual > smallest
    assert many.error_with_residual < smallest


def test_forms_of_gradients(tmp_path):
    steps = recorded(2)
    path = tmp_path / "gradients.npz"
    for number, step in zip((3, 12), steps):
        gradient_file.append(path, number, list(step), list(step.values()))
    expected = hvdc.compare(steps, ["int4", "topk:ratio=0.1"])
    assert (expected.steps, expected.recorded_steps) == (2, 2)
    assert (expected.elements, expected.compressed_elements) == (COMPRESSED + 40, COMPRESSED)
    lists = [[tf.constant(x) for x in step.values()] + [None] for step in steps]
    for same in (str(path), path, lists, iter(lists)):
        assert without_times(hvdc.compare(same, ["int4", "topk:ratio=0.1"])) == without_times(expected)
    np.savez(tmp_path / "one.npz", **{name.replace("/", "."): x for name, x in steps[0].items()})
    one = hvdc.compare(steps[0], "int4")
    assert (one.steps, one.recorded_steps) == (8, 1)
    for same in (tmp_path / "one.npz", list(steps[0].values()), [steps[0]]):
        assert without_times(hvdc.compare(same, "int4")) == without_times(one)
    rows = tf.IndexedSlices(tf.ones([2, 40]), tf.constant([1, 1]), tf.constant([60, 40]))
    dense = np.zeros((60, 40), np.float32)
    dense[1] = 2.0
    assert without_times(hvdc.compare(rows, "int4")) == without_times(hvdc.compare(dense, "int4"))
    assert without_times(hvdc.compare([dense.ravel()], "int4", min_compress_size=0)) == without_times(
        hvdc.compare(dense, "int4")
    )


def test_all_built_in_compressors_by_default():
    from hvd_compress.formats.registry import FORMATS

    seen = []
    result = hvdc.compare(recorded(1)[0], steps=2, watch=seen.append)
    assert [row.compressor for row in result.rows] == seen
    assert {hvdc.Compression.parse(spec).name for spec in seen} == set(FORMATS.classes)
    none = result.rows[0]
    assert none == ComparedCompressor("none", 4 * COMPRESSED + BIAS_BYTES, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def test_gradients_that_are_zero_and_a_compressor_of_ones_own():
    @dataclasses.dataclass(frozen=True)
    class Half(hvdc.Compressor):
        def compress(self, tensor):
            return 0.5 * tensor, None

        def decompress(self, payload, ctx):
            return payload

    zero = hvdc.compare(np.zeros((40, 40), np.float32), ["int8", "topk:ratio=0.1"])
    assert [(r.relative_error, r.bias, r.error_with_residual) for r in zero.rows] == [(0.0, 0.0, 0.0)] * 2
    row = only(hvdc.compare(recorded(1)[0], Half(), steps=3))
    assert (row.compressor, row.relative_error) == ("Half", pytest.approx(0.5))
    # What is left of x, x, x: 1/2, then half of 3/2, then half of 7/4; of three.
    assert row.error_with_residual == pytest.approx(7 / 8 / 3)


def row(spec, nbytes, error):
    return ComparedCompressor(spec, nbytes, 1000 / nbytes, 1.5, 0.5, 1e-3, 2 * error, 0.0, error)


RESULT = Comparison((row("none", 1000, 0.0), row("a", 100, 0.1), row("b", 50, 0.3), row("c", 60, 0.2)), 250, 200, 8, 1)


def test_the_best():
    assert RESULT.best(max_error=0.05) == "none"
    assert RESULT.best(max_error=0.25) == "c"
    assert RESULT.best(min_ratio=5) == "a"
    assert RESULT.best(max_error=0.25, min_ratio=5) == "c"
    for limits, message in [
        ({}, "best: give max_error, min_ratio or both"),
        ({"max_error": -1}, "best: max_error must be a number from 0.0 to inf, got -1"),
        ({"min_ratio": "5"}, "best: min_ratio must be a number from 0.0 to inf, got '5'"),
        ({"max_error": 0.15, "min_ratio": 15}, "best: no compressor has an error of at most 0.15 and a ratio of at "
         "least 15: the largest ratio is 10"),
        ({"min_ratio": 50}, "best: no compressor has a ratio of at least 50: the largest ratio is 20"),
    ]:  # fmt: skip
        with pytest.raises(ValueError) as caught:
            RESULT.best(**limits)
        assert str(caught.value) == message


def test_table_json_and_plot(tmp_path):
    lines = str(RESULT).splitlines()
    assert lines[0] == "250 elements (80.0% of them large enough to be compressed), 1 recorded step"
    assert lines[1].split("  ")[-1] == "error of 8 steps" and len(lines) == 2 + 4
    assert len({len(line) for line in lines[1:]}) == 1
    assert lines[3].split() == ["a", "100", "10", "1.5", "0.5", "0.001", "0.2", "0", "0.1"]
    RESULT.to_json(tmp_path / "result.json")
    found = json.loads((tmp_path / "result.json").read_text())
    assert found["rows"][1]["error_with_residual"] == 0.1 and found["steps"] == 8
    RESULT.plot(tmp_path / "result.png")
    assert (tmp_path / "result.png").read_bytes()[:4] == b"\x89PNG"


WRONG = [
    (3, {}, "compare: gradients must be arrays, a list"),
    ([], {}, "compare: gradients is empty"),
    ({}, {}, "compare: there are no gradients"),
    ([None, None], {}, "compare: gradients must be arrays"),
    ([np.zeros((40, 40)), 3.0], {}, "compare: the gradient '1' must be an array, got 3.0"),
    ({"a": np.zeros((40, 40), int)}, {}, "compare: the gradient 'a' must hold floating point numbers, not int64"),
    ({"a": np.full((40, 40), np.nan)}, {}, "compare: the gradient 'a' holds infinities or NaN"),
    ([{"a": np.ones((40, 40))}, {"a": np.full((40, 40), np.inf)}], {}, "compare: the gradient 'a' of step 1 holds"),
    ([{"a": np.ones((40, 40))}, {"b": np.ones((40, 40))}], {}, "compare: all steps must have the same arrays, and 'a'"),
    (np.ones(5000), {}, "compare: no array is compressed, as none has two dimensions"),
    (np.ones((40, 40)), {"specs": "int9"}, "unknown compressor 'int9': did you mean 'int8'?"),
    (np.ones((40, 40)), {"specs": []}, "compare: specs is an empty list"),
    (np.ones((40, 40)), {"specs": ["int8", 3]}, "compression must be a hvdc.Compressor"),
    (np.ones((40, 40)), {"specs": "auto"}, "compare: auto chooses among compressors in training"),
    (np.ones((40, 40)), {"steps": 0}, "compare: steps must be a whole number from 1 on, got 0"),
    (np.ones((40, 40)), {"min_compress_size": -1}, "compare: min_compress_size must be a whole number from 0 on"),
]


@pytest.mark.parametrize("gradients,arguments,message", WRONG)
def test_what_is_wrong_is_said_in_one_line(gradients, arguments, message):
    with pytest.raises((TypeError, ValueError)) as caught:
        hvdc.compare(gradients, **arguments)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "text.npz").write_text("no gradients")
    (tmp_path / "empty.npz").write_bytes(b"")
    np.savez(tmp_path / "nothing.npz")
    np.savez(tmp_path / "objects.npz", a=np.array([None]))
    np.save(tmp_path / "one.npy", np.ones((40, 40)))
    np.savez(tmp_path / "whole.npz", a=np.random.default_rng(0).random((40, 40)))
    (tmp_path / "cut.npz").write_bytes((tmp_path / "whole.npz").read_bytes()[:5000])
    no_file = "cannot be read: No such file or directory"
    for name, message in [("missing.npz", no_file), ("nothing.npz", "holds no gradients")]:
        with pytest.raises(ValueError, match=message):
            hvdc.compare(tmp_path / name)
    for name in ("text.npz", "empty.npz", "objects.npz", "one.npy", "cut.npz"):
        with pytest.raises(ValueError) as caught:
            hvdc.compare(tmp_path / name)
        assert str(caught.value) == f"{tmp_path / name} cannot be read: it is no .npz file of arrays, or it is damaged"


# Recording


def test_the_gradients_of_a_model(tmp_path):
    """y = x @ w + b with a mean squared error: its gradient is in every textbook."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Input([30]), keras.layers.Dense(40, name="only")])
    model.compile("sgd", "mse")
    rng = np.random.default_rng(0)
    batches = [(rng.random((16, 30), np.float32), rng.random((16, 40), np.float32)) for _ in range(3)]
    path = tmp_path / "gradients.npz"
    path.write_text("an old file")
    hvdc.record_gradients(path, model, batches, steps=2)
    (w, b) = (v.numpy() for v in model.trainable_variables)
    read = gradient_file.read(path)
    assert len(read) == 2
    for (x, y), step in zip(batches, read):
        error = 2 * (x @ w + b - y) / y.size
        kernel, bias = step.values()
        assert [name.rpartition("/")[2] for name in step] == ["kernel", "bias"]
        assert kernel.dtype == np.float32
        np.testing.assert_allclose(kernel, x.T @ error, rtol=1e-4, atol=1e-7)
        np.testing.assert_allclose(bias, error.sum(0), rtol=1e-4, atol=1e-7)
    assert hvdc.compare(path, "int8").recorded_steps == 2


def test_recording_runs_in_training_mode_and_leaves_the_model_alone(tmp_path):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.layers.Input([30]), keras.layers.BatchNormalization(), keras.layers.Dropout(0.9), keras.layers.Dense(40)]
    )
    model.compile("sgd", "mse")
    before = [v.numpy() for v in model.weights]
    x = np.random.default_rng(0).random((64, 30), np.float32)
    hvdc.record_gradients(tmp_path / "g.npz", model, (x, x @ np.ones((30, 40), np.float32)), steps=1, batch_size=4)
    for v, value in zip(model.weights, before):
        np.testing.assert_array_equal(v.numpy(), value)
    (step,) = gradient_file.read(tmp_path / "g.npz")
    kernel = next(array for array in step.values() if array.shape == (30, 40))
    assert (np.abs(kernel).max(1) == 0.0).any()  # inputs that all samples dropped


def test_wrong_recordings(tmp_path):
    model = keras.Sequential([keras.layers.Input([3]), keras.layers.Dense(4)])
    batches = [(np.ones((2, 3), np.float32), np.ones((2, 4), np.float32))]
    path = tmp_path / "g.npz"
    for arguments, message in [
        ((3, model, batches), "record_gradients: path must be the path of a file, got int"),
        ((tmp_path / "g.txt", model, batches), "does not end in .npz"),
        ((path, model, batches), "record_gradients: the model is not compiled"),
        ((path, model, [], "mse"), "record_gradients: data is empty"),
        ((path, model, 3, "mse"), "record_gradients: data must be batches"),
    ]:
        with pytest.raises((TypeError, ValueError), match=message):
            hvdc.record_gradients(*arguments)
    with pytest.raises(ValueError, match="record_gradients: steps must be a whole number from 1 on"):
        hvdc.record_gradients(path, model, batches, "mse", steps=0)


def test_variables_of_the_same_path(tmp_path):
    path = tmp_path / "g.npz"
    gradient_file.append(path, 7, ["w", "w", "w_1"], [np.full((2, 2), i) for i in range(3)])
    (step,) = gradient_file.read(path)
    assert {name: int(array[0, 0]) for name, array in step.items()} == {"w": 0, "w_1": 1, "w_1_1": 2}


@pytest.mark.parametrize("wrong", [0, 1.5, True, "10"])
def test_how_often_gradients_are_recorded_is_checked(wrong, tmp_path):
    for make in (hvdc.callbacks.CompressionMonitor, hvdc.profile):
        with pytest.raises(ValueError, match="gradients must be a whole number from 1 on"):
            make(tmp_path, gradients=wrong)
    with pytest.raises(ValueError, match="profile: gradients are written to a file in log_dir"):
        hvdc.profile(gradients=10)


# The command


def invoke(*arguments):
    from click.testing import CliRunner

    from hvd_compress.tools.cli import main

    # Click 8.1 keeps standard error apart only where it is asked to, and 8.2 always does.
    apart = {"mix_stderr": False} if "mix_stderr" in inspect.signature(CliRunner).parameters else {}
    return CliRunner(**apart).invoke(main, ["compare", *map(str, arguments)])


def test_the_command(tmp_path):
    path, plot, output = (tmp_path / name for name in ("g.npz", "g.png", "g.json"))
    np.savez(path, **{name.replace("/", "."): x for name, x in recorded(1)[0].items()})
    specs = ["-c", "int8", "-c", "topk:ratio=0.1"]
    result = invoke(path, *specs, "--steps", 3, "--max-error", 0.5, "--plot", plot, "-o", output)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines[2:4]] == ["int8", "topk:ratio=0.1"]
    assert lines[4:] == [f"plot: {plot}", "best: topk:ratio=0.1"]
    assert plot.read_bytes()[:4] == b"\x89PNG"
    as_json = json.loads(invoke(path, *specs, "--steps", 3, "--json", "--min-ratio", 2).stdout)
    assert as_json.pop("best") == "int8"
    for found in (as_json, json.loads(output.read_text())):
        assert [row["compressor"] for row in found["rows"]] == ["int8", "topk:ratio=0.1"] and found["steps"] == 3
    result = invoke(path, "-c", "int8", "--max-error", 0)
    assert result.exit_code == 1 and "Error: best: no compressor has an error of at most 0.0" in result.stderr


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["missing.npz"], "Invalid value for 'FILE': missing.npz cannot be read: No such file or directory"),
        (["missing.npz", "-c", "int9"], "unknown compressor 'int9'"),
        (["missing.npz", "-o", "no/where.json"], "there is no directory no"),
        (["missing.npz", "--plot", "p.doc"], "does not end in one of"),
    ],
)
def test_wrong_usage(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = invoke(*arguments)
    assert result.exit_code == 2 and message in " ".join(result.stderr.split())
