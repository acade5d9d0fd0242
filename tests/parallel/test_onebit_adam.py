"""1-bit Adam (Tang et al. 2021, Algorithm 1) against NumPy, step by step; different gradients on each rank."""

import horovod.tensorflow as hvd
import introspect
import numpy as np
import pytest
import tensorflow as tf
from tensorflow import keras

import hvd_compress as hvdc
from hvd_compress.frontends.keras import variance

IS_KERAS3 = hasattr(keras.optimizers.Optimizer, "stateless_apply")
pytestmark = pytest.mark.skipif(not IS_KERAS3, reason="a Keras 3 optimizer")
STEPS, RATE, BLOCK = 50, 0.01, 1024
F = np.float32


@pytest.fixture
def shared(tmp_path):
    """A directory that all ranks see."""
    return hvd.broadcast_object(str(tmp_path), 0)


def gradients_of(rank, shapes):
    """A rank's gradients of each step: noise of the rank's own around what all have in common."""
    own, common = np.random.default_rng([rank, 1]), np.random.default_rng(5)
    centre = [common.standard_normal(shape) for shape in shapes]
    return [[(c * np.cos(i / 9) + own.standard_normal(c.shape)).astype(F) for c in centre] for i in range(STEPS)]


def signs(x):
    """Signs times the mean magnitude of each block, float32 [n], n a multiple of the block."""
    blocks = x.reshape(-1, BLOCK)
    means = np.abs(blocks).mean(1, dtype=np.float64).astype(F)[:, None]
    return np.where(blocks < 0, -means, means).ravel()


class Gathered:
    """The exchange of compressed momenta in which every rank gets every rank's: one residual per rank."""

    def __init__(self, ranks, n):
        self.residuals = np.zeros((ranks, n), F)

    def __call__(self, x):
        x = x + self.residuals
        sent = np.stack([signs(row) for row in x])
        self.residuals = x - sent
        return sent.astype(np.float64).mean(0)


class Scattered:
    """That in which each rank sums a part, and encodes the sum again: its residual there is that of the sum."""

    def __init__(self, ranks, n):
        self.ranks, self.residuals = ranks, np.zeros((ranks, n), F)

    def __call__(self, x):
        x = x + self.residuals
        result = np.zeros(x.shape[1])
        for owner, part in enumerate(np.split(np.arange(x.shape[1]), self.ranks)):
            total = x[owner, part].copy()
            for r in range(self.ranks):
                if r != owner:
                    sent = signs(x[r, part])
                    self.residuals[r, part] = x[r, part] - sent
                    total = total + sent
            again = signs(total)
            self.residuals[owner, part] = total - again
            result[part] = again.astype(np.float64) / self.ranks
        return result


def simulate(ranks, shapes, freeze_step, exchange, b1=0.9, b2=0.999, epsilon=1e-7):
    """The weights after each step. `shapes`: one that is compressed, and small ones that are not."""
    sources = [gradients_of(r, shapes) for r in range(ranks)]
    w, m, v = ([np.zeros(np.prod(shape)) for shape in shapes] for _ in range(3))
    cross = exchange(ranks, w[0].size)
    history = []
    for t in range(1, STEPS + 1):
        until = min(t, freeze_step)
        for i in range(len(shapes)):
            g = np.stack([source[t - 1][i].ravel() for source in sources])
            if t <= freeze_step:
                mean = g.astype(np.float64).mean(0)
                m[i] = b1 * m[i] + (1 - b1) * mean
                v[i] = b2 * v[i] + (1 - b2) * mean**2
            else:
                local = (F(b1) * m[i].astype(F) + F(1 - b1) * g).astype(F)
                m[i] = cross(local) if i == 0 else local.astype(np.float64).mean(0)
            rate = RATE * np.sqrt(1 - b2**until) / (1 - b1**t)
            w[i] = w[i] - rate * m[i] / (np.sqrt(v[i]) + epsilon)
        history.append([x.copy() for x in w])
    return history


def follows(optimizer, rank, shapes, expected, gather):
    """Trains in a tf.function that is traced once, and compares all the way."""
    weights = [keras.Variable(np.zeros(shape, F)) for shape in shapes]
    optimizer.build(weights)

    @tf.function
    def step(gradients):
        optimizer.apply(gradients, weights)

    for gradients, theirs in zip(gradients_of(rank, shapes), expected):
        step([tf.constant(g) for g in gradients])
        for weight, other in zip(weights, theirs):
            np.testing.assert_allclose(np.ravel(weight.numpy()), other, atol=1e-5)
    everyone = gather(np.concatenate([np.ravel(w.numpy()) for w in weights]))
    assert (everyone == everyone[0]).all()
    assert step.experimental_get_tracing_count() == 1


SHAPES = [(32, 64), (50,)]


def test_fifty_steps_against_numpy(rank, size, gather):
    optimizer = hvdc.optimizers.OneBitAdam(RATE, freeze_step=20)
    expected = simulate(size, SHAPES, 20, Gathered)
    follows(optimizer, rank, SHAPES, expected, gather)
    assert optimizer.frozen_at == 20
    assert [bucket.chosen for bucket in optimizer.compression_report().buckets] == ["onebit"]
    # Without the freeze it goes elsewhere: the comparison means something.
    adam = simulate(size, SHAPES, STEPS, Gathered)
    assert max(np.abs(a - b).max() for a, b in zip(adam[-1], expected[-1])) > 0.01


@pytest.mark.np4
def test_fifty_steps_on_four_ranks_against_numpy(rank, size, gather):
    optimizer = hvdc.optimizers.OneBitAdam(RATE, beta_1=0.8, freeze_step=15)
    expected = simulate(size, SHAPES, 15, Gathered, b1=0.8)
    follows(optimizer, rank, SHAPES, expected, gather)


@pytest.mark.np4
def test_the_owners_loss_is_compensated_too(rank, size, gather, monkeypatch):
    introspect.prefer_scatter_reduce(monkeypatch)  # as if the buckets were large
    shapes = [(64, 256), (50,)]
    optimizer = hvdc.optimizers.OneBitAdam(RATE, freeze_step=10)
    follows(optimizer, rank, shapes, simulate(size, shapes, 10, Scattered), gather)


def test_until_it_freezes_it_is_adam(rank, size):
    """Averaged, with Keras's numbers; weight decay as AdamW's."""
    for options in ({}, {"weight_decay": 0.1}):
        ours, theirs = (keras.Variable(np.ones((32, 64), F)) for _ in range(2))
        optimizer = hvdc.optimizers.OneBitAdam(RATE, **options)
        adam = keras.optimizers.AdamW(RATE, **options) if options else keras.optimizers.Adam(RATE)
        for i in range(5):
            everyone = [gradients_of(r, SHAPES)[i][0] for r in range(size)]
            optimizer.apply([tf.constant(everyone[rank])], [ours])
            adam.apply([tf.constant(np.mean(everyone, 0))], [theirs])
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), atol=1e-6)
        assert optimizer.frozen_at == 0
        assert optimizer.bytes_sent()[0] == pytest.approx(optimizer.bytes_sent()[1], rel=0.01)


def test_the_variance_freezes_when_it_is_stable(rank, size, gather, capfd):
    """Gradients whose size falls for a while: looked at every 10 steps, as beta_2 is 0.9."""
    optimizer = hvdc.optimizers.OneBitAdam(RATE, beta_2=0.9)
    weight = keras.Variable(np.zeros((32, 64), F))
    optimizer.build([weight])
    rng = np.random.default_rng(rank)
    direction = rng.standard_normal((32, 64)).astype(F)
    scales = [2.0 ** (-i / 10) if i < 35 else 2.0**-3.5 for i in range(100)]

    @tf.function
    def step(gradient):
        optimizer.apply([gradient], [weight])

    mean = gather(direction).astype(np.float64).mean(0)
    v, norms, expected = np.zeros((32, 64)), [], 0
    for t, scale in enumerate(scales, 1):
        step(tf.constant(F(scale) * direction))
        v = 0.9 * v + 0.1 * (scale * mean) ** 2
        if t % 10 == 0 and not expected:
            norms.append(v.sum() / (1 - 0.9**t))
            if len(norms) > 1 and min(norms[-2:]) >= 0.96 * max(norms[-2:]):
                expected = t
        assert optimizer.frozen_at == expected
    assert 40 < expected < 100
    said = [line for line in capfd.readouterr().err.splitlines() if "freezes" in line]
    line = f"hvd_compress: OneBitAdam freezes the variance after step {expected} and sends the momentum, "
    assert said == ([line + "one bit per value, from now on"] if rank == 0 else [])


def test_a_small_variance_is_told_by_its_block():
    """Blocks of 1024, the last one of 76."""
    roots = np.random.default_rng(0).uniform(0.5, 1.5, 1100)
    roots[1024:] *= 1e-3
    expected = roots**2
    for small in (3, 700, 1030):
        roots[small] *= 0.05
        expected[small] = 0.0
    found = variance.without_small(tf.constant((roots**2).astype(F).reshape(10, 110)))
    np.testing.assert_allclose(np.ravel(found), expected, rtol=1e-6)


@pytest.mark.parametrize("scale", [0.0, 1e-6])
def test_elements_with_little_variance_are_left_alone(scale, rank, size):
    """One bit cannot say zero, and the block's magnitude over a tiny variance would be a huge step."""
    optimizer = hvdc.optimizers.OneBitAdam(RATE, freeze_step=5)
    weight = keras.Variable(np.zeros((32, 64), F))
    for gradients in gradients_of(rank, SHAPES)[:20]:
        gradient = gradients[0].copy()
        gradient[:, :10] *= scale
        optimizer.apply([tf.constant(gradient)], [weight])
        if int(optimizer.iterations) == 5:
            before = weight.numpy()[:, :10]
    assert (weight.numpy()[:, :10] == before).all()
    assert 0.01 < np.abs(weight.numpy()[:, 10:]).max() < 1.0


# With Keras


def make_model(**options):
    keras.utils.set_random_seed(7)
    layers = [keras.layers.Dense(67, activation="relu"), keras.layers.Dense(33, activation="relu")]
    model = keras.Sequential([keras.Input((24,)), *layers, keras.layers.Dense(4)])
    model.compile(optimizer=hvdc.optimizers.OneBitAdam(0.01, **options), loss="mse")
    return model


def data(rank):
    rng = np.random.default_rng(rank)
    x = rng.standard_normal((32, 24)).astype(F)
    return x, (x[:, :4] + 0.1 * rng.standard_normal((32, 4))).astype(F)


def fit(model, rank, epochs, start=0, callbacks=()):
    options = {"batch_size": 8, "verbose": 0, "shuffle": False, "callbacks": list(callbacks)}
    return model.fit(*data(rank), epochs=epochs, initial_epoch=start, **options)


def flat_weights(model):
    return np.concatenate([w.ravel() for w in model.get_weights()])


# Saved after 4 steps: the freeze is before or behind.
@pytest.mark.parametrize("at", [pytest.param(2, marks=pytest.mark.slow), 6])
def test_a_resumed_run_continues_bit_identically(at, rank, shared):
    first = make_model(freeze_step=at)
    fit(first, rank, 1, callbacks=[hvdc.callbacks.ResidualCheckpoint(shared)])
    path = f"{shared}/model_{rank}.keras"
    first.save(path)
    residuals = introspect.residual_variables(introspect.plan_of(first.optimizer))
    assert any(residual.numpy().any() for residual in residuals) == (at == 2)
    second = keras.models.load_model(path)
    assert type(second.optimizer) is hvdc.optimizers.OneBitAdam and second.optimizer.freeze_step == at
    fit(second, rank, 4, 1, [hvdc.callbacks.ResidualCheckpoint(shared)])
    fit(first, rank, 4, 1)
    np.testing.assert_array_equal(flat_weights(second), flat_weights(first))
    assert second.optimizer.frozen_at == first.optimizer.frozen_at == at


def test_with_callbacks_and_a_monitor(rank, size, gather, tmp_path):
    model = make_model(freeze_step=6, min_compress_size=0)
    callbacks = [
        hvdc.callbacks.BroadcastGlobalVariablesCallback(0), hvdc.callbacks.MetricAverageCallback(),
        hvdc.callbacks.CompressionMonitor(tmp_path),
    ]  # fmt: skip
    history = fit(model, rank, 6, callbacks=callbacks).history
    everyone = gather(flat_weights(model))
    assert (everyone == everyone[0]).all()
    assert history["loss"][-1] < history["loss"][0]
    assert history["ratio"][0] < 1.1 < 5.0 < history["ratio"][-1]  # uncompressed, then one bit


def test_mixed_precision(rank, size, gather):
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        model = make_model(freeze_step=6)
    finally:
        keras.mixed_precision.set_global_policy("float32")
    assert type(model.optimizer) is keras.optimizers.LossScaleOptimizer
    history = fit(model, rank, 6).history
    everyone = gather(flat_weights(model))
    assert (everyone == everyone[0]).all() and np.isfinite(everyone).all()
    assert history["loss"][-1] < history["loss"][0]
    assert model.optimizer.inner_optimizer.frozen_at == 6


def test_gradient_accumulation_and_skipped_steps(rank, size, gather):
    weight = keras.Variable(np.zeros((32, 64), F))
    optimizer = hvdc.optimizers.OneBitAdam(RATE, freeze_step=2, gradient_accumulation_steps=2)
    for gradients in gradients_of(rank, SHAPES)[:8]:
        optimizer.apply([tf.constant(gradients[0])], [weight])
    assert introspect.steps_made(introspect.plan_of(optimizer)) == 4 and optimizer.frozen_at == 2

    weight = keras.Variable(np.zeros((32, 64), F))
    optimizer = hvdc.optimizers.OneBitAdam(RATE, freeze_step=2, on_nonfinite="skip")
    for i, gradients in enumerate(gradients_of(rank, SHAPES)[:8]):
        if i in (1, 5) and rank == 0:
            gradients[0][3, 3] = np.inf
        optimizer.apply([tf.constant(gradients[0])], [weight])
    assert int(optimizer.iterations) == 6 and optimizer.frozen_at == 2
    everyone = gather(weight.numpy())
    assert np.isfinite(everyone).all() and (everyone == everyone[0]).all()


@pytest.mark.parametrize("on_nonfinite", ["propagate", "skip"])
def test_a_fixed_loss_scale_changes_nothing(on_nonfinite, rank):
    """The momentum that crosses once the variance is frozen is that of gradients without the scale."""
    weights = []
    for scale in (None, 1024.0):
        weight = keras.Variable(np.zeros((32, 64), F))
        optimizer = hvdc.optimizers.OneBitAdam(RATE, freeze_step=2, loss_scale_factor=scale, on_nonfinite=on_nonfinite)
        for gradients in gradients_of(rank, SHAPES)[:8]:
            optimizer.apply([tf.constant(gradients[0] * F(scale or 1.0))], [weight])
        assert optimizer.frozen_at == 2
        weights.append(weight.numpy())
    np.testing.assert_array_equal(*weights)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"clipnorm": 1.0}, ValueError, "OneBitAdam: clipnorm means nothing once"),
        ({"global_clipnorm": 1.0}, ValueError, "OneBitAdam: global_clipnorm means nothing once"),
        ({"amsgrad": True}, ValueError, "OneBitAdam: amsgrad"),
        ({"freeze_step": 0}, ValueError, "freeze_step must be a whole number from 1 on, got 0"),
        ({"beta_2": 1.0}, ValueError, "beta_2 must be below 1"),
        ({"compression": "int8"}, ValueError, "not recognized"),
        ({"on_nonfinite": "skip", "gradient_accumulation_steps": 2}, ValueError, "use only one"),
    ],
)
def test_what_is_refused(options, error, match):
    with pytest.raises(error, match=match) as raised:
        hvdc.optimizers.OneBitAdam(**options)
    assert "\n" not in str(raised.value)


def test_it_is_not_wrapped(rank):
    with pytest.raises(TypeError, match="OneBitAdam is distributed by itself: use it as it is, unwrapped"):
        hvdc.DistributedOptimizer(hvdc.optimizers.OneBitAdam())


def test_on_one_rank_it_is_adam_and_then_momentum_with_that_variance(rank, process_sets):
    """In a process set of one rank nothing crosses, and nothing is lost."""
    alone = process_sets[rank % 2]
    if alone.size() > 1:
        pytest.skip("more than two ranks")
    weight = keras.Variable(np.zeros((32, 64), F))
    optimizer = hvdc.optimizers.OneBitAdam(RATE, freeze_step=10, process_set=alone)
    w, m, v = (np.zeros((32, 64)) for _ in range(3))
    for t, gradients in enumerate(gradients_of(rank, SHAPES), 1):
        optimizer.apply([tf.constant(gradients[0])], [weight])
        m = 0.9 * m + 0.1 * gradients[0]
        v = 0.999 * v + 0.001 * gradients[0].astype(np.float64) ** 2 if t <= 10 else v
        w -= RATE * np.sqrt(1 - 0.999 ** min(t, 10)) / (1 - 0.9**t) * m / (np.sqrt(v) + 1e-7)
    np.testing.assert_allclose(weight.numpy(), w, atol=1e-5)


def test_others_join_one_that_froze_alone(rank, process_sets):
    """What has little variance is left alone from then on, as if it had been frozen by all."""
    alone = process_sets[rank % 2]
    if alone.size() > 1:
        pytest.skip("more than two ranks")
    first, second = (keras.Variable(np.zeros((32, 64), F)) for _ in range(2))
    one = hvdc.optimizers.OneBitAdam(RATE, freeze_step=5, process_set=alone)
    two = hvdc.optimizers.OneBitAdam(RATE, freeze_step=5)
    two.build([second])

    def gradient(source, i):
        found = gradients_of(source, SHAPES)[i][0].copy()
        found[:, :10] *= 1e-6
        return tf.constant(found)

    for i in range(8):
        one.apply([gradient(0, i)], [first])
    for theirs, ours in zip([*one.variables, first], [*two.variables, second]):
        ours.assign(theirs)
    for i in range(8, 20):
        two.apply([gradient(rank, i)], [second])
    assert (second.numpy()[:, :10] == first.numpy()[:, :10]).all()
    assert 0.01 < np.abs(second.numpy()[:, 10:] - first.numpy()[:, 10:]).max() < 1.0
