"""Each variable's suffering, against least squares in NumPy."""

import dataclasses
import fnmatch
import math

import numpy as np
import pytest
import reference
import tensorflow as tf
from tensorflow import keras

import hvd_compress as hvdc
from hvd_compress.analysis.sensitivity_report import Row, Sensitivity
from hvd_compress.common.names import path_of
from hvd_compress.compressors.resolve import policies
from hvd_compress.engine.settings import Settings

KERASES = {"keras": keras}
try:
    import tf_keras

    KERASES["tf_keras"] = tf_keras
except ImportError:
    pass
STEPS, SAMPLES = 5, 24


@dataclasses.dataclass(frozen=True)
class Half(hvdc.Compressor):
    """Sends half of everything."""

    error_feedback: bool

    def compress(self, tensor):
        return 0.5 * tensor, None

    def decompress(self, payload, ctx):
        return payload


def values_of(model):
    return [tf.convert_to_tensor(v).numpy() for v in model.variables]


def linear(loss="mse", library=keras):
    """y = a @ left + b @ right + bias."""
    library.utils.set_random_seed(0)
    a, b = library.Input((40,)), library.Input((50,))
    left = library.layers.Dense(32, use_bias=False, name="left")
    right = library.layers.Dense(32, bias_initializer="ones", name="right")
    model = library.Model([a, b], left(a) + right(b))
    if loss:
        model.compile("adam", loss)
    return model


def least_squares_data(count):
    """`count` batches ((a, b), y); some inputs are much larger than others."""
    rng = np.random.default_rng(0)
    scales = 10.0 ** rng.uniform(-1, 0.5, 90)
    solution = rng.standard_normal((90, 32))
    batches = []
    for _ in range(count):
        x = rng.standard_normal((SAMPLES, 90)) * scales
        y = x @ solution + rng.standard_normal((SAMPLES, 32))
        batches.append(((x[:, :40].astype(np.float32), x[:, 40:].astype(np.float32)), y.astype(np.float32)))
    return batches


class LeastSquares:
    """The same as `linear`, in float64: weights are [left, right, bias]."""

    def __init__(self, model, batches):
        by_path = {path_of(v): v.numpy().astype(np.float64) for v in model.trainable_variables}
        names = ("left/kernel", "right/kernel", "right/bias")
        self.weights = [next(v for path, v in by_path.items() if name in path) for name in names]
        self.training, self.held_out = batches[:STEPS], batches[STEPS:]

    def error(self, weights, batch):
        (a, b), y = batch
        return a @ weights[0] + b @ weights[1] + weights[2] - y

    def loss(self, weights):
        return np.mean([np.mean(self.error(weights, batch) ** 2) for batch in self.held_out])

    def gradients(self):
        found = []
        for batch in self.training:
            (a, b), y = batch
            error = 2 * self.error(self.weights, batch) / y.size
            found.append([a.T @ error, b.T @ error, error.sum(0)])
        return found

    def mean_gradient(self):
        return [np.mean(parts, 0) for parts in zip(*self.gradients())]

    def after(self, rate, gradient):
        return self.loss([w - rate * g for w, g in zip(self.weights, gradient)])


def top(x, ratio):
    """What is left of `x` when its largest are taken out."""
    flat = x.ravel().copy()
    flat[np.argsort(-np.abs(flat))[: reference.num_kept(ratio, x.size)]] = 0
    return flat.reshape(x.shape)


@pytest.mark.parametrize("library", KERASES.values(), ids=list(KERASES))
def test_as_in_numpy(library):
    """Residuals from step to step, the mean step, and the held-out loss after it."""
    model, batches = linear(library=library), least_squares_data(STEPS + 2)
    numpy, rate, ratio = LeastSquares(model, batches), 0.05, 0.05
    report = hvdc.sensitivity(model, batches, f"topk:ratio={ratio}", steps=STEPS, learning_rate=rate)
    mean = numpy.mean_gradient()
    before, after = numpy.loss(numpy.weights), numpy.after(rate, mean)
    assert (report.steps, report.learning_rate) == (STEPS, rate)
    assert report.loss == pytest.approx(before, rel=1e-5)
    assert report.decrease == pytest.approx(before - after, rel=1e-4)
    assert len(report.rows) == 2
    for i, name in enumerate(("left/kernel", "right/kernel")):
        (row,) = (row for row in report.rows if name in row.path)
        residual = np.zeros_like(mean[i])
        for gradient in numpy.gradients():
            residual = top(gradient[i] + residual, ratio)
        gradient = [g - residual / STEPS if i == j else g for j, g in enumerate(mean)]
        assert row.elements == mean[i].size
        assert row.wire_bytes == reference.wire_bytes(row.compressor, mean[i].shape)
        norms = np.linalg.norm(residual / STEPS), np.linalg.norm(mean[i])
        assert row.relative_error == pytest.approx(norms[0] / norms[1], rel=1e-3)
        increase = (numpy.after(rate, gradient) - after) / (before - after)
        assert row.loss_increase == pytest.approx(increase, rel=1e-2, abs=1e-4)
        assert increase > 0.01
    # Training looks its variables up under the same names.
    policy = policies(report.policy(tolerance=0.0))
    settings = Settings(hvdc.Compression.int8, policy=policy)
    for variable in model.trainable_variables:
        expected = hvdc.Compression.int8 if len(variable.shape) < 2 else hvdc.Compression.none
        assert settings.compressor_of(path_of(variable)) == expected


@pytest.mark.parametrize("feeds_back", [True, False])
def test_what_is_missing_after_many_steps(feeds_back):
    """Of the same gradient each time: with a residual g (1/2 + 1/4 + ...) in all, else g / 2 each time."""
    first, *held_out = least_squares_data(3)
    batches = [first] * STEPS + held_out
    report = hvdc.sensitivity(linear(), batches, Half(feeds_back), steps=STEPS, learning_rate=0.01)
    expected = (1 - 0.5**STEPS) / STEPS if feeds_back else 0.5
    assert [row.relative_error for row in report.rows] == pytest.approx([expected] * 2, rel=1e-5)


def test_randomness_differs_from_step_to_step():
    """Over T steps the variance of an unbiased choice of k of n, (n / k - 1) ||g||^2, falls to a T-th."""
    batches = [*least_squares_data(1) * 16, *least_squares_data(4)]
    report = hvdc.sensitivity(linear(), batches, "randomk:ratio=0.1,unbiased=true", steps=16, learning_rate=1e-3)
    for row in report.rows:
        assert row.relative_error == pytest.approx(math.sqrt(9 / 16), rel=0.15)


def test_the_learning_rate_that_is_found():
    model, batches = linear(), least_squares_data(STEPS + 2)
    numpy = LeastSquares(model, batches)
    report = hvdc.sensitivity(model, batches, steps=STEPS)
    mean, before = numpy.mean_gradient(), numpy.loss(numpy.weights)
    largest = 2 * before / sum(np.sum(g**2) for g in mean)
    rates = [largest / 2**k for k in range(24)]
    decreases = [before - numpy.after(rate, mean) for rate in rates]
    expected = min(rate for rate, decrease in zip(rates, decreases) if decrease >= max(decreases) / 2)
    assert report.learning_rate == pytest.approx(expected, rel=1e-4)
    assert report.decrease >= 0.499 * max(decreases) > 0.05 * before


def test_increases_are_shares_of_the_progress():
    """To first order: lr * <h, g - c> of lr * <h, g>, with h the held-out gradient; here h = g."""
    batch = least_squares_data(1)
    model = linear()
    numpy = LeastSquares(model, [*batch * STEPS, *batch])
    report = hvdc.sensitivity(model, batch * (STEPS + 2), Half(False), steps=STEPS, learning_rate=1e-3)
    energies = [np.sum(g**2) for g in numpy.mean_gradient()]
    for row in report.rows:
        share = energies[0 if "left" in row.path else 1] / sum(energies)
        assert row.loss_increase == pytest.approx(0.5 * share, rel=0.05)


def words():
    """A model of an embedding of which 8 of 2000 tokens occur, and a dense layer: topk loses only of the latter."""
    tokens, x = keras.Input((4,), dtype="int32"), keras.Input((64,))
    embedded = keras.layers.Flatten()(keras.layers.Embedding(2000, 8, name="tokens")(tokens))
    outputs = keras.layers.Dense(32, name="values")(x)
    model = keras.Model([tokens, x], keras.layers.Concatenate()([embedded, outputs]))
    model.compile("sgd", "mse")
    rng = np.random.default_rng(0)
    a = rng.integers(0, 8, (400, 4)) * 250
    b = rng.standard_normal((400, 64)).astype(np.float32)
    return model, ((a, b), rng.standard_normal((400, 64)).astype(np.float32))


def test_a_sensitive_layer_is_found():
    model, data = words()
    report = hvdc.sensitivity(model, data, "topk:ratio=0.01", steps=4)
    dense, embedding = report.rows
    assert "values" in dense.path and "tokens" in embedding.path
    assert dense.loss_increase > 0.3
    # 8 * 8 elements are not zero, and 160 are sent
    assert embedding.relative_error < 1e-6 and abs(embedding.loss_increase) < 1e-4
    assert report.policy() == {dense.path: "none", embedding.path: "topk:ratio=0.01"}
    candidates = ["int8", "topk:ratio=0.01", "int4"]
    policy = hvdc.sensitivity(model, data, candidates, steps=4).policy()
    assert policy == {dense.path: "int4", embedding.path: "topk:ratio=0.01"}


def test_same_again():
    model, data = words()
    assert str(hvdc.sensitivity(model, data, "int4")) == str(hvdc.sensitivity(model, data, "int4"))


def eventful(library=keras):
    """A model with moving statistics and dropout, trained for a step."""
    model = library.Sequential(
        [
            library.layers.Input((40,)),
            library.layers.Dense(40),
            library.layers.BatchNormalization(),
            library.layers.Dropout(0.5),
            library.layers.Dense(30),
        ]
    )
    model.compile("adam", "mse", metrics=["mae"])
    rng = np.random.default_rng(0)
    x = rng.standard_normal((200, 40)).astype(np.float32)
    y = (x @ rng.standard_normal((40, 30))).astype(np.float32)
    model.train_on_batch(x[:32], y[:32])
    return model, x, y


def state_of(model):
    optimizer = model.optimizer.variables
    optimizer = optimizer() if callable(optimizer) else optimizer
    metrics = [v for metric in model.metrics for v in metric.variables]
    return [tf.convert_to_tensor(v).numpy() for v in (*model.variables, *optimizer, *metrics)]


@pytest.mark.parametrize("library", KERASES.values(), ids=list(KERASES))
def test_nothing_is_changed(library):
    model, x, y = eventful(library)
    before = state_of(model)
    assert len(before) > 15
    hvdc.sensitivity(model, (x, y), steps=3)
    after = state_of(model)
    assert len(after) == len(before)
    for old, new in zip(before, after):
        np.testing.assert_array_equal(old, new)


def test_dropout_is_off():
    model, x, y = eventful()
    batches = [(x[i : i + 50], y[i : i + 50]) for i in range(0, 200, 50)]
    expected = np.mean((model.predict(x[150:], verbose=0) - y[150:]) ** 2)
    assert hvdc.sensitivity(model, batches, "int8").loss == pytest.approx(expected, rel=1e-5)


def test_nothing_is_changed_after_an_error():
    model, x, y = eventful()
    before = state_of(model)
    predicted = model(x[:32], training=False)

    def fails_later(y_true, y_pred):
        tf.debugging.assert_near(y_pred, predicted, message="the weights have moved")
        return tf.reduce_mean(tf.square(y_true - y_pred))

    with pytest.raises(tf.errors.InvalidArgumentError, match="the weights have moved"):
        hvdc.sensitivity(model, [(x[:32], y[:32])] * 2, loss=fails_later)
    after = state_of(model)
    assert len(after) == len(before)
    for old, new in zip(before, after):
        np.testing.assert_array_equal(old, new)


def test_losses_and_weights():
    """The compiled loss, its name, an object and a function say the same; weights count."""
    batches = least_squares_data(STEPS + 2)
    model = linear()
    uncompiled = keras.Model(model.inputs, model.outputs[0])
    expected = hvdc.sensitivity(model, batches, "onebit", steps=STEPS)

    def function(y, y_pred):
        return tf.reduce_mean(tf.square(y - y_pred), -1)

    for loss in ("mse", keras.losses.MeanSquaredError(), function):
        report = hvdc.sensitivity(uncompiled, batches, "onebit", loss, steps=STEPS)
        assert report.loss == pytest.approx(expected.loss, rel=1e-5)
        increases = [row.loss_increase for row in expected.rows]
        assert [row.loss_increase for row in report.rows] == pytest.approx(increases, rel=1e-3)
    keep = np.arange(SAMPLES) < SAMPLES // 3
    weighted = [(x, y, 3.0 * keep.astype(np.float32)) for x, y in batches]
    fewer = [(tuple(part[keep] for part in x), y[keep]) for x, y in batches]
    expected = hvdc.sensitivity(model, fewer, "onebit", steps=STEPS)
    for m, loss in ((model, None), (uncompiled, "mse"), (uncompiled, keras.losses.MeanSquaredError())):
        report = hvdc.sensitivity(m, weighted, "onebit", loss, steps=STEPS)
        assert report.loss == pytest.approx(expected.loss, rel=1e-5)
        assert report.rows[0].loss_increase == pytest.approx(expected.rows[0].loss_increase, rel=1e-3)


@pytest.mark.parametrize("loss", [None, "mse"])
def test_regularization_counts(loss):
    model = keras.Sequential(
        [keras.layers.Input((40,)), keras.layers.Dense(32, kernel_regularizer=keras.regularizers.L2(0.5))]
    )
    model.compile("sgd", "mse")
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((64, 40)).astype(np.float32), np.zeros((64, 32), np.float32)
    report = hvdc.sensitivity(model, (x, y), "int8", loss, steps=1, batch_size=32)
    kernel = model.trainable_variables[0].numpy()
    order = np.random.default_rng(0).permutation(64)
    expected = np.mean((x[order[32:]] @ kernel) ** 2) + 0.5 * np.sum(kernel**2)
    assert report.loss == pytest.approx(expected, rel=1e-5)


def test_forms_of_data():
    """A dataset that never ends, and a PyDataset, are read as a list of their batches."""
    model, batches = linear(), least_squares_data(STEPS + 2)
    expected = hvdc.sensitivity(model, batches, steps=STEPS)
    types = tf.nest.map_structure(lambda a: tf.TensorSpec(a.shape, tf.float32), batches[0])
    dataset = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=types)

    class Batches(keras.utils.Sequence if not hasattr(keras.utils, "PyDataset") else keras.utils.PyDataset):
        def __len__(self):
            return len(batches)

        def __getitem__(self, i):
            return batches[i]

    for data in (dataset.repeat(), Batches(), iter(batches)):
        assert hvdc.sensitivity(model, data, steps=STEPS) == expected
    assert hvdc.sensitivity(model, batches, steps=100).steps == 5  # of 7 batches the last fifth is held out


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "float64"])
def test_other_dtypes(policy):
    """As in float32, with gradients of the hidden activations around 5e-9, which float16 cannot hold."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((256, 64)).astype(np.float32)
    last = (1e-5 * rng.standard_normal((64, 64))).astype(np.float32)
    y = 1e2 * x @ rng.standard_normal((64, 64)).astype(np.float32) @ last
    reports = []
    for dtype in ("float32", policy):
        keras.utils.set_random_seed(0)
        hidden = keras.layers.Dense(64, dtype=dtype, name="hidden")
        fixed = keras.layers.Dense(64, dtype="float32", trainable=False)
        model = keras.Sequential([keras.layers.Input((64,)), hidden, fixed])
        fixed.kernel.assign(last)
        model.compile("sgd", "mse")
        reports.append(hvdc.sensitivity(model, (x, y), "topk:ratio=0.05", steps=4))
        assert hidden.kernel.dtype == ("float64" if dtype == "float64" else "float32")
    (expected,), (row,) = (report.rows for report in reports)
    assert row.relative_error == pytest.approx(expected.relative_error, rel=0.05)
    assert row.loss_increase == pytest.approx(expected.loss_increase, rel=0.1)
    assert expected.loss_increase > 0.2


def test_nested_models_and_shared_names():
    """Small and one-dimensional variables have no row; two variables of one path share theirs."""
    inner = keras.Sequential([keras.Input((40,)), keras.layers.Dense(40, name="same")], name="inner")
    twins = [keras.layers.Dense(40, name="twin") for _ in range(2)]
    for twin in twins:
        twin.build((None, 40))

    class Outer(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner, self.twins = inner, twins
            self.same, self.small = keras.layers.Dense(40, name="same"), keras.layers.Dense(2)

        def call(self, x):
            return self.small(self.twins[1](self.twins[0](self.same(self.inner(x)))))

    model = Outer()
    model.compile("sgd", "mse")
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((64, 40)), rng.standard_normal((64, 2))
    report = hvdc.sensitivity(model, (x.astype(np.float32), y.astype(np.float32)), "topk:ratio=0.1", steps=1)
    assert len(model.trainable_variables) == 10  # it was built on the way
    large = {path_of(v) for v in model.trainable_variables if v.shape[0] == 40 and len(v.shape) == 2}
    large -= {path_of(model.small.kernel)}
    assert {row.path for row in report.rows} == large
    assert {row.path: row.elements for row in report.rows}[path_of(twins[0].kernel)] == (
        3200 if path_of(twins[0].kernel) == path_of(twins[1].kernel) else 1600
    )
    for pattern in report.policy():
        assert len([path for path in large if fnmatch.fnmatchcase(path, pattern)]) == 1


def report_of(*rows):
    return Sensitivity(tuple(Row(*row) for row in rows), 4, 0.1, 2.0, 0.5)


def test_policy_takes_the_strongest_that_is_tolerated():
    parse = hvdc.Compression.parse
    strong, weak, own = parse("hybrid:ratio=0.01,bits=4"), parse("int8"), Half(True)
    useless = parse("topk:ratio=0.9")
    report = report_of(
        ("a/kernel", 1000, strong, 20, 0.9, 0.5),
        ("a/kernel", 1000, weak, 1031, 0.1, 0.02),
        ("b/kernel", 1000, strong, 20, 0.9, 0.02),
        ("b/kernel", 1000, weak, 1031, 0.1, -0.01),
        ("c[0]*?/kernel", 1000, strong, 20, 0.9, math.inf),
        ("d/kernel", 1000, own, 2000, 0.5, 0.03),
        ("e/kernel", 1000, useless, 4500, 0.0, 0.0),
        ("f/kernel", 1000, weak, 1031, 0.0, math.nan),
    )
    policy = report.policy()
    assert policy == {
        "a/kernel": "int8",
        "b/kernel": "hybrid:ratio=0.01,bits=4",
        "c[[]0][*][?]/kernel": "none",
        "d/kernel": own,
        "e/kernel": "none",
        "f/kernel": "none",
    }
    assert report.policy(tolerance=0.5)["a/kernel"] == "hybrid:ratio=0.01,bits=4"
    assert set(report.policy(tolerance=0).values()) == {"none", "int8"}
    paths = [row.path for row in report.rows]
    for pattern in policy:
        assert len({path for path in paths if fnmatch.fnmatchcase(path, pattern)}) == 1
    for wrong in (-0.1, math.nan, "0.1", True):
        with pytest.raises(ValueError, match="policy: tolerance must be a number from 0 on, got"):
            report.policy(wrong)


def test_table():
    int8 = hvdc.Compression.int8
    report = report_of(("dense/kernel", 12345, int8, 1031, 0.0123, 0.0345), ("b", 10, int8, 9, 0.5, -0.001))
    assert str(report).splitlines() == [
        "loss 2, lower by 0.5 after a step of learning rate 0.1; compressed over 4 steps",
        "variable      elements  compressor  bytes  gradient error  loss increase",
        "dense/kernel    12,345  int8        1,031           1.23%          3.45%",
        "b                   10  int8            9          50.00%         -0.10%",
    ]
    assert str(report_of()).endswith("(no variable is large enough to be compressed)")


def test_errors():
    batches = least_squares_data(4)
    frozen = linear()
    frozen.trainable = False
    nan = [((x[0] * np.float32("nan"), x[1]), y) for x, y in batches]
    cases = [
        (linear(loss=None), batches, {}, "the model is not compiled: call model.compile"),
        (frozen, batches, {}, "the model has no trainable weights: set trainable"),
        (linear(), [], {}, "data is empty: give two or more"),
        (linear(), batches[:1], {}, "data has only one batch: give two or more"),
        (linear(), (np.zeros((0, 40)), np.zeros((0, 32))), {}, "data is empty"),
        (linear(), (np.zeros((9, 40)), np.zeros((8, 32))), {}, "as many samples each, got"),
        (linear(), [x for (x, _), _ in batches], {}, "data must hold .x, y. or .x, y, sample_weight."),
        (linear(), 7, {}, "data must be batches or a tuple of arrays"),
        (linear(), nan, {}, "the gradient of .*kernel.* is not finite"),
        (linear(), batches, {"learning_rate": 1e6}, "is no decrease to compare with"),
        (linear(), batches, {"learning_rate": 0.0}, "learning_rate must be a number above 0, got 0.0"),
        (linear(), batches, {"steps": 0}, "steps must be a whole number from 1 on, got 0"),
        (linear(), batches, {"batch_size": 1.5}, "batch_size must be a whole number from 1 on, got 1.5"),
        (linear(), batches, {"compression": []}, "compression is an empty list"),
        (linear(), batches, {"loss": lambda y, _: tf.reduce_mean(y)}, "the loss does not depend on"),
    ]
    for model, data, arguments, message in cases:
        with pytest.raises(ValueError, match=message) as caught:
            hvdc.sensitivity(model, data, **arguments)
        assert str(caught.value).startswith("sensitivity: ") and "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="unknown compressor 'int9'"):
        hvdc.sensitivity(linear(), batches, ["int8", "int9"])
