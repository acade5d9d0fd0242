"""Deep Gradient Compression (Lin et al. 2018) against NumPy, step by step; different gradients on each rank."""

import math

import horovod.tensorflow as hvd
import introspect
import numpy as np
import pytest
import tensorflow as tf
from marks import slow
from tensorflow import keras as tf_dot_keras

import hvd_compress as hvdc

KERASES = {"keras": tf_dot_keras}
try:
    import tf_keras

    KERASES["tf_keras"] = tf_keras
except ImportError:  # TF 2.15: tf.keras is Keras 2
    pass

STEPS, STEPS_PER_EPOCH, RATE = 50, 8, 0.01
SHAPES = [(40, 50), (50,), (30, 40)]  # the second one is not compressed
DENSITIES = [1 / 4, 1 / 16, 1 / 64, 1 / 256, 0.001]


@pytest.fixture
def shared(tmp_path):
    """A directory that all ranks see."""
    return hvd.broadcast_object(str(tmp_path), 0)


def gradients_of(rank, steps=STEPS):
    """A rank's gradients: [steps] lists of arrays, in some steps much larger."""
    rng = np.random.default_rng([rank, 7])
    scales = np.where(rng.random(steps) < 0.3, 4.0, 1.0)
    return [[(s * rng.standard_normal(shape)).astype(np.float32) for shape in SHAPES] for s in scales]


def simulate(ranks, momentum, clipnorm, steps_per_epoch):
    """Algorithm 4 of the paper's supplement on all ranks: the weights after each step, float64."""
    sources = [gradients_of(r) for r in range(ranks)]
    sizes = [math.prod(shape) for shape in SHAPES]
    weights = [np.zeros(size) for size in sizes]
    u, v = np.zeros((ranks, sizes[0] + sizes[2])), np.zeros((ranks, sizes[0] + sizes[2]))
    small = np.zeros(sizes[1])  # velocity of the uncompressed gradients' mean
    clipped, history = 0, []
    for step in range(STEPS):
        epoch = step // steps_per_epoch if steps_per_epoch else len(DENSITIES)
        density = DENSITIES[min(epoch, len(DENSITIES) - 1)]
        k = math.ceil(density * u.shape[1])
        moved, mean = np.zeros(u.shape[1]), np.zeros(sizes[1])
        for r in range(ranks):
            flat = [g.astype(np.float64).ravel() for g in sources[r][step]]
            norm = math.sqrt(sum(np.sum(g**2) for g in flat))
            factor = min(1.0, clipnorm * math.sqrt(ranks) / norm) if clipnorm else 1.0
            clipped += factor < 1.0
            u[r] = momentum * u[r] + factor * np.concatenate([flat[0], flat[2]])
            v[r] += u[r]
            keep = np.argsort(-np.abs(v[r]), kind="stable")[:k]
            moved[keep] += v[r, keep] / ranks
            u[r, keep] = v[r, keep] = 0.0
            mean += factor * flat[1] / ranks
        small = momentum * small + mean
        for weight, change in zip(weights, (moved[: sizes[0]], small, moved[sizes[0] :])):
            weight -= RATE * change
        history.append([w.copy() for w in weights])
    return history, clipped


def trained(optimizer, rank):
    """The weights after each step of a custom loop."""
    weights = [tf.Variable(np.zeros(shape, np.float32)) for shape in SHAPES]

    @tf.function
    def step(gradients):
        optimizer.apply_gradients(zip(gradients, weights))

    for gradients in gradients_of(rank):
        step([tf.constant(g) for g in gradients])
        yield [w.numpy().ravel() for w in weights]


def follows_the_simulation(keras, rank, size, compression, momentum, clipnorm, steps_per_epoch):
    optimizer = hvdc.DistributedOptimizer(keras.optimizers.SGD(RATE), compression=compression)
    expected, clipped = simulate(size, momentum, clipnorm, steps_per_epoch)
    assert not clipnorm or 0 < clipped < size * STEPS  # some are, some are not
    for ours, theirs in zip(trained(optimizer, rank), expected):
        for a, b in zip(ours, theirs):
            np.testing.assert_allclose(a, b, atol=1e-5)
    assert all(np.abs(w).max() > 0.1 for w in ours)  # 1e-5 is little
    return optimizer


@pytest.mark.parametrize("keras", sorted(KERASES))
def test_fifty_steps_with_warmup_clipping_and_masking_against_numpy(keras, rank, size):
    compression = hvdc.Compression.dgc(momentum=0.9, clipnorm=60.0, steps_per_epoch=STEPS_PER_EPOCH)
    args = (compression, 0.9, 60.0, STEPS_PER_EPOCH)
    optimizer = follows_the_simulation(KERASES[keras], rank, size, *args)
    # What holds now is what is told.
    (bucket,) = optimizer.compression_report().buckets
    assert bucket.chosen == "dgc:clipnorm=60,warmup_epochs=0"
    assert introspect.stage(introspect.plan_of(optimizer), compression) == 4


def test_without_warmup_and_clipping_against_numpy(rank, size):
    spec = "dgc:ratio=0.001,momentum=0.5,warmup_epochs=0"
    follows_the_simulation(KERASES["keras"], rank, size, spec, 0.5, None, None)


def test_embeddings_are_clipped_with_the_others(rank, size):
    """Of n ranks whose gradients are averaged, each one's norm is at most clipnorm * sqrt(n)."""
    reducer = introspect.new_reducer("dgc:ratio=0.5,momentum=0,clipnorm=1,warmup_epochs=0")
    kernel, table = tf.Variable(tf.zeros([40, 30])), tf.Variable(tf.zeros([6, 4]))
    values = np.full([2, 4], 3.0, np.float32)
    slices = tf.IndexedSlices(tf.constant(values), tf.constant([1, 4]), tf.constant([6, 4]))
    _, reduced = reducer([tf.zeros_like(kernel), slices], [kernel, table])
    factor = 1.0 * np.sqrt(size) / np.linalg.norm(values)  # that of the kernel is 0
    assert factor < 1.0
    expected = np.zeros([6, 4], np.float32)
    expected[[1, 4]] = factor * values
    np.testing.assert_allclose(tf.convert_to_tensor(reduced).numpy(), expected, rtol=1e-5)


@pytest.mark.np4
def test_fifty_steps_on_four_ranks_against_numpy(rank, size):
    args = (
        hvdc.Compression.dgc(clipnorm=37.5, steps_per_epoch=STEPS_PER_EPOCH),
        0.9,
        37.5,
        STEPS_PER_EPOCH,
    )
    follows_the_simulation(KERASES["keras"], rank, size, *args)


def test_a_tape_follows_the_simulation_too(rank, size):
    compression = hvdc.Compression.dgc(clipnorm=60.0, steps_per_epoch=STEPS_PER_EPOCH)
    weights = [tf.Variable(np.zeros(shape, np.float32)) for shape in SHAPES]

    @tf.function
    def step(gradients):
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(w * g) for w, g in zip(weights, gradients)])
        tape = hvdc.DistributedGradientTape(tape, compression=compression)
        for weight, gradient in zip(weights, tape.gradient(loss, weights)):
            weight.assign_sub(RATE * gradient)

    for gradients in gradients_of(rank):
        step([tf.constant(g) for g in gradients])
    expected = simulate(size, 0.9, 60.0, STEPS_PER_EPOCH)[0][-1]
    for weight, theirs in zip(weights, expected):
        np.testing.assert_allclose(weight.numpy().ravel(), theirs, atol=1e-5)


# Keras's epochs


def make_model(keras, compression="dgc", **options):
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((24,)), keras.layers.Dense(90, "relu"), keras.layers.Dense(70)])
    optimizer = hvdc.DistributedOptimizer(keras.optimizers.SGD(0.02), compression=compression, **options)
    model.compile(optimizer=optimizer, loss="mse")
    return model


def fit(model, rank, epochs, start=0, callbacks=(), tell=True):
    rng = np.random.default_rng(rank)
    x, y = (rng.standard_normal((16, n)).astype(np.float32) for n in (24, 70))
    told = [hvdc.callbacks.BroadcastGlobalVariablesCallback(0)] if tell else []
    model.fit(
        x,
        y,
        batch_size=8,
        epochs=epochs,
        initial_epoch=start,
        verbose=0,
        shuffle=False,
        callbacks=[*told, *callbacks],
    )


def densities_of(model):
    return [hvdc.Compression.parse(bucket.chosen).ratio for bucket in model.optimizer.compression_report().buckets]


class Seen:
    """A Keras callback that keeps the density and the bytes sent in the first step of each epoch."""

    def __new__(cls, keras):
        class Callback(keras.callbacks.Callback):
            densities, sent = [], []

            def on_train_batch_end(self, batch, logs=None):
                if batch == 0:
                    self.densities += densities_of(self.model)
                    self.sent.append(self.model.optimizer.bytes_sent()[0])

        return Callback()


@pytest.mark.parametrize("keras", sorted(KERASES))
def test_the_density_falls_from_epoch_to_epoch(keras, rank, size):
    keras = KERASES[keras]
    model, seen = make_model(keras), Seen(keras)
    fit(model, rank, 6, callbacks=[seen])
    assert seen.densities == [*DENSITIES, 0.001]
    sizes = [stage.wire_bytes((24 + 70) * 90) for stage in introspect.stages_of(model.optimizer)]
    assert len(sizes) == 5
    assert (np.diff(sizes) < 0).all() and (np.diff(seen.sent[:5]) < 0).all() and seen.sent[4] == seen.sent[5]
    np.testing.assert_allclose(np.diff(seen.sent[:5]), (size - 1) * np.diff(sizes), rtol=0.05)


def test_epochs_add_up_over_several_fits(rank):
    keras = KERASES["keras"]
    model, seen = make_model(keras), Seen(keras)
    for _ in range(3):
        fit(model, rank, 1, callbacks=[seen])
    fit(model, rank, 6, start=4, callbacks=[seen])
    assert seen.densities == [*DENSITIES[:3], 0.001, 0.001]


def test_rank_0_says_what_holds(rank, capfd):
    fit(make_model(KERASES["keras"]), rank, 1)
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("hvd_compress: dgc")]
    expected = (
        "hvd_compress: dgc sends 25%, 6.25%, 1.56%, 0.391% and then 0.1% of each gradient, an epoch each, as Keras "
        "counts them; now 25% (epoch 0)"
    )
    assert lines == ([expected] if rank == 0 else [])


def test_nobody_says_which_epoch_it_is(rank):
    model = make_model(KERASES["keras"])
    with pytest.raises(ValueError, match="dgc: nobody says which epoch it is") as error:
        fit(model, rank, 1, tell=False)
    text = str(error.value)
    assert "\n" not in text and "steps_per_epoch" in text and len(set(hvd.allgather_object(text))) == 1


@pytest.mark.parametrize("steps_per_epoch", [2, *slow(None)])
def test_a_resumed_run_goes_on_at_the_right_density(steps_per_epoch, rank, shared):
    keras, spec = KERASES["keras"], hvdc.Compression.dgc(steps_per_epoch=steps_per_epoch)
    first = make_model(keras, spec)
    fit(first, rank, 2, callbacks=[hvdc.callbacks.ResidualCheckpoint(shared)])
    second, seen = make_model(keras, spec), Seen(keras)
    second.set_weights(first.get_weights())
    second.optimizer.build(second.trainable_variables)
    second.optimizer.iterations.assign(int(first.optimizer.iterations.numpy()))
    fit(second, rank, 7, 2, [hvdc.callbacks.ResidualCheckpoint(shared), seen])
    assert seen.densities == [*DENSITIES[2:], 0.001, 0.001]
    fit(first, rank, 7, 2)
    for ours, theirs in zip(second.get_weights(), first.get_weights()):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("make", "own"),
    [
        (lambda o: o.SGD(0.1, momentum=0.9), "SGD has its own, momentum=0.9"),
        (lambda o: o.Adam(0.1), "Adam has its own, beta_1=0.9"),
        (lambda o: o.RMSprop(0.1, momentum=0.5), "RMSprop has its own, momentum=0.5"),
    ],
)
@pytest.mark.parametrize("keras", sorted(KERASES))
def test_an_optimizer_with_momentum_is_refused(make, own, keras, rank):
    optimizers = KERASES[keras].optimizers
    with pytest.raises(ValueError, match=own) as error:
        hvdc.DistributedOptimizer(make(optimizers), compression="dgc")
    assert "\n" not in str(error.value) and "SGD(learning_rate)" in str(error.value)
    hvdc.DistributedOptimizer(make(optimizers), compression="dgc:momentum=0")
    for plain in (optimizers.SGD(0.1), optimizers.RMSprop(0.1), optimizers.Adagrad(0.1)):
        hvdc.DistributedOptimizer(plain, compression="dgc")


def test_a_step_that_is_not_finite_changes_no_velocity(rank):
    keras = KERASES["keras"]
    optimizer = hvdc.DistributedOptimizer(
        keras.optimizers.SGD(1.0), compression="dgc:warmup_epochs=0,clipnorm=5", on_nonfinite="skip"
    )
    weights = [tf.Variable(np.zeros(shape, np.float32)) for shape in SHAPES]
    steps = gradients_of(rank, 3)
    if rank == 0:
        steps[1][1][3] = np.nan

    def state():
        plan = introspect.plan_of(optimizer)
        held = [*introspect.residual_variables(plan), *introspect.velocity_variables(plan)]
        return [v.numpy() for v in [*weights, *held]]

    for i, gradients in enumerate(steps):
        before = state() if i else None
        optimizer.apply_gradients(zip([tf.constant(g) for g in gradients], weights))
        if i:
            same = [(a == b).all() for a, b in zip(before, state())]
            assert all(same) if i == 1 else not any(same)
    assert all(np.isfinite(value).all() for value in state())
