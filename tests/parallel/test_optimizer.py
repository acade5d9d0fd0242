"""hvdc.DistributedOptimizer on every Keras that is installed, with different data on each rank."""

import copy

import horovod.tensorflow.keras as hvd
import introspect
import numpy as np
import pytest
import tensorflow as tf
from specs import TRAINED
from tensorflow import keras as tf_dot_keras

import hvd_compress as hvdc
from hvd_compress.frontends.keras.distribution import DistributedMixin

KERASES = {"keras": tf_dot_keras}
try:
    import tf_keras

    KERASES["tf_keras"] = tf_keras
except ImportError:  # TF 2.15: tf.keras is Keras 2
    pass
IS_KERAS3 = hasattr(tf_dot_keras.optimizers.Optimizer, "stateless_apply")


@pytest.fixture(params=sorted(KERASES))
def keras(request):
    return KERASES[request.param]


def make_model(keras, seed, dropout=False):
    keras.utils.set_random_seed(seed)
    # As in test_checkpoint: kernels are compiled for each shape.
    layers = [keras.layers.Dense(67, activation="relu"), keras.layers.Dense(33, activation="relu")]
    model = keras.Sequential([keras.Input((24,)), *layers, keras.layers.Dense(4)])
    return model


def make_data(seed, n=64):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, 24)).astype(np.float32)
    return x, (x[:, :4] + 0.1 * rng.standard_normal((n, 4))).astype(np.float32)


def flat_weights(model):
    return np.concatenate([w.ravel() for w in model.get_weights()])


class SameWeights:
    """A Keras callback: weights are the same on all ranks, to the bit, after every epoch."""

    def __new__(cls, keras, gather):
        class Callback(keras.callbacks.Callback):
            epochs = 0

            def on_epoch_end(self, epoch, logs=None):
                everyone = gather(flat_weights(self.model))
                assert (everyone == everyone[0]).all()
                Callback.epochs += 1

        return Callback()


FITTED = ["int8", "topk:ratio=0.05", "hybrid:ratio=0.05,bits=4", "powersgd:rank=2"]


@pytest.mark.parametrize(
    "spec, keras",
    # One of each kind, and those that keep no residual or draw by the step; `test_mass_is_conserved_every_step` has
    # the others. Another Keras has another adapter, which does not depend on the compressor.
    [
        *((spec, "keras") for spec in TRAINED if spec in FITTED or not hvdc.Compression.parse(spec).error_feedback),
        *(("hybrid:ratio=0.05,bits=4", name) for name in KERASES if name != "keras"),
    ],
    indirect=["keras"],
)
def test_weights_stay_the_same_on_all_ranks(spec, keras, rank, gather):
    model = make_model(keras, seed=rank)
    x, y = make_data(rank)
    optimizer = hvdc.DistributedOptimizer(keras.optimizers.Adam(0.01), compression=spec)
    model.compile(optimizer=optimizer, loss="mse")
    same = SameWeights(keras, gather)
    history = model.fit(
        x, y, batch_size=16, epochs=3, verbose=0, shuffle=False,
        callbacks=[hvdc.callbacks.BroadcastGlobalVariablesCallback(0), same],
    )  # fmt: skip
    assert same.epochs == 3
    assert history.history["loss"][-1] < history.history["loss"][0]


def test_none_is_one_process_on_all_the_data(keras, rank, size):
    momentum = 0.9
    shards = [make_data(r, n=32) for r in range(size)]
    weights = make_model(keras, seed=1).get_weights()

    together = make_model(keras, seed=1)
    together.compile(optimizer=keras.optimizers.SGD(0.05, momentum=momentum), loss="mse")
    # batches interleaved as the ranks see them: 8 of each shard per step
    order = np.concatenate([np.arange(i, i + 8) for i in range(0, 32, 8)]).reshape(4, 8)
    x = np.concatenate([np.concatenate([xs[o] for xs, _ in shards]) for o in order])
    y = np.concatenate([np.concatenate([ys[o] for _, ys in shards]) for o in order])
    together.fit(x, y, batch_size=8 * size, epochs=3, verbose=0, shuffle=False)

    model = make_model(keras, seed=1)
    np.testing.assert_array_equal(model.get_weights()[0], weights[0])
    optimizer = hvdc.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=momentum))
    model.compile(optimizer=optimizer, loss="mse")
    model.fit(*shards[rank], batch_size=8, epochs=3, verbose=0, shuffle=False)
    difference = np.linalg.norm(flat_weights(model) - flat_weights(together))
    assert difference <= 1e-6 * np.linalg.norm(flat_weights(together))


def descend(keras, optimizer, variables, gradients):
    """One step through whichever entry point this optimizer has."""
    optimizer.apply_gradients(zip(gradients, variables))


def quadratic(keras, rank, **options):
    """A 40 x 50 weight, and the gradient that this rank gives it at each step."""
    optimizer = hvdc.DistributedOptimizer(keras.optimizers.SGD(1.0), **options)
    weight = tf.Variable(np.zeros((40, 50), np.float32))
    gradients = np.random.default_rng(rank).standard_normal((6, 40, 50)).astype(np.float32)
    return optimizer, weight, gradients


WITH_RESIDUAL = [s for s in TRAINED if hvdc.Compression.parse(s).error_feedback]


@pytest.mark.parametrize(
    "spec, op",
    # The sum is taken by the collective: one compressor for each that there is.
    [
        *((s, hvd.Average) for s in WITH_RESIDUAL),
        *((s, hvd.Sum) for s in ("int8", "randomk:ratio=0.1", "powersgd:rank=2")),
    ],
)
def test_mass_is_conserved_every_step(spec, op, rank, size, gather):
    keras = KERASES["keras"]
    optimizer, weight, gradients = quadratic(keras, rank, compression=spec, op=op)
    old_residuals = np.zeros((size, 2048))
    for gradient in gradients:
        before = weight.numpy().astype(np.float64)
        descend(keras, optimizer, [weight], [tf.constant(gradient)])
        output = before - weight.numpy()
        everyone = gather(weight.numpy())
        assert (everyone == everyone[0]).all()
        (variable,) = introspect.residual_variables(introspect.plan_of(optimizer))
        flat = variable.numpy().ravel()  # of a chunk with padding, or of the whole tensor
        residuals = gather(np.pad(flat, (0, 2048 - flat.size))).astype(np.float64)
        padded = np.pad(gather(gradient.ravel()).astype(np.float64), [(0, 0), (0, 48)])
        came_in = (padded + old_residuals).sum(0)
        factor = size if op == hvd.Average else 1
        went_out = factor * np.pad(output.ravel(), (0, 48)) + residuals.sum(0)
        np.testing.assert_allclose(went_out[:2000], came_in[:2000], atol=2e-5)
        np.testing.assert_allclose(residuals[:, 2000:].sum(0), came_in[2000:], atol=2e-5) if spec != "onebit" else None
        assert np.abs(residuals).max() > 0
        old_residuals = residuals


def test_residual_decay_against_numpy(rank, size, gather):
    keras = KERASES["keras"]
    optimizer, weight, gradients = quadratic(
        keras, rank, compression="topk:ratio=0.1", residual_decay=0.5, min_compress_size=0
    )
    residual, expected = np.zeros((size, 2000)), np.zeros(2000)
    for gradient in gradients:
        descend(keras, optimizer, [weight], [tf.constant(gradient)])
        x = gather(gradient.ravel()) + np.float32(0.5) * residual.astype(np.float32)
        sent = np.zeros_like(x)
        for r in range(size):
            keep = np.argsort(-np.abs(x[r]), kind="stable")[:200]
            sent[r, keep] = x[r, keep]
        residual = x - sent
        expected -= sent.mean(0)
        np.testing.assert_allclose(weight.numpy().ravel(), expected, atol=1e-5)


def test_momentum_correction_against_numpy(rank, size, gather):
    """DGC: u = m u + g, v = v + u, send top-k of v, zero both where sent."""
    keras = KERASES["keras"]
    optimizer, weight, gradients = quadratic(keras, rank, compression="topk:ratio=0.1", momentum_correction=0.9)
    u, v, expected = np.zeros((size, 2000)), np.zeros((size, 2000)), np.zeros(2000)
    for gradient in gradients:
        descend(keras, optimizer, [weight], [tf.constant(gradient)])
        u = 0.9 * u + gather(gradient.ravel())
        v = v + u
        for r in range(size):
            keep = np.argsort(-np.abs(v[r]), kind="stable")[:200]
            expected[keep] -= v[r, keep] / size
            u[r, keep] = v[r, keep] = 0.0
        np.testing.assert_allclose(weight.numpy().ravel(), expected, atol=1e-4)


def test_without_error_feedback_there_is_no_residual(rank):
    keras = KERASES["keras"]
    optimizer, weight, gradients = quadratic(keras, rank, compression="topk:ratio=0.1", error_feedback=False)
    descend(keras, optimizer, [weight], [tf.constant(gradients[0])])
    first = weight.numpy()
    descend(keras, optimizer, [weight], [tf.constant(gradients[0])])
    np.testing.assert_allclose(weight.numpy(), 2 * first, rtol=1e-5)


@pytest.mark.parametrize(
    "spec, keras",
    # What a Keras calls does not depend on the compressor.
    [("topk:ratio=0.1", "keras"), *(("none", name) for name in sorted(KERASES))],
    indirect=["keras"],
)
def test_every_way_to_train_reduces_exactly_once_per_step(spec, keras, rank, size, gather):
    """With op Sum and lr 1, a second reduction would multiply the step by the size."""
    x, y = make_data(rank, n=16)

    def new():
        model = make_model(keras, seed=3)
        opt = hvdc.DistributedOptimizer(keras.optimizers.SGD(0.01), compression=spec, op=hvd.Sum)
        model.compile(optimizer=opt, loss="mse")
        return model, opt

    def fit(**options):
        model, _ = new()
        if options:
            model.compile(optimizer=model.optimizer, loss="mse", **options)
        model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
        return flat_weights(model)

    def loop(step_of):
        model, opt = new()
        step = step_of(model, opt)
        for _ in range(2):
            for i in (0, 8):
                step(tf.constant(x[i : i + 8]), tf.constant(y[i : i + 8]))
        return flat_weights(model)

    def gradients(model, a, b):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(a) - b))
        return tape.gradient(loss, model.trainable_variables)

    def pairs(model, opt):
        return lambda a, b: opt.apply_gradients(zip(gradients(model, a, b), model.trainable_variables))

    def apply(model, opt):
        opt.build(model.trainable_variables)
        return lambda a, b: opt.apply(gradients(model, a, b), model.trainable_variables)

    def in_function(model, opt):
        return tf.function(pairs(model, opt))

    expected = fit()
    ways = {
        "run_eagerly": fit(run_eagerly=True),
        "steps_per_execution": fit(steps_per_execution=2),
        "apply_gradients": loop(pairs),
        "tf.function": loop(in_function),
    }
    if hasattr(new()[1], "apply"):
        ways["apply"] = loop(apply)
    if spec == "none":
        mean_free = make_model(keras, seed=3)
        mean_free.compile(optimizer=keras.optimizers.SGD(0.01 * size), loss="mse")
        shards = [make_data(r, n=16) for r in range(size)]
        xs = np.concatenate([np.concatenate([s[0][i : i + 8] for s in shards]) for i in (0, 8)])
        ys = np.concatenate([np.concatenate([s[1][i : i + 8] for s in shards]) for i in (0, 8)])
        mean_free.fit(xs, ys, batch_size=8 * size, epochs=2, shuffle=False, verbose=0)
        ways["one process"] = flat_weights(mean_free)
    for way, weights in ways.items():
        np.testing.assert_allclose(weights, expected, rtol=1e-5, atol=1e-6, err_msg=way)


def test_backward_passes_per_step(keras, rank, size, gather):
    for average in (False, True):
        optimizer = hvdc.DistributedOptimizer(
            keras.optimizers.SGD(1.0), backward_passes_per_step=3, average_aggregated_gradients=average,
            compression="int8", min_compress_size=0,
        )  # fmt: skip
        weight = tf.Variable(np.zeros(4, np.float32))

        @tf.function
        def step(gradient, optimizer=optimizer, weight=weight):
            descend(keras, optimizer, [weight], [gradient])

        moved = np.zeros(4)
        for i in range(8):
            step(tf.constant([1.0, 2.0, 0.0, -1.0]) * float((rank + 1) * (i + 1)))
            if i % 3 == 2:
                passes = sum(range(i - 1, i + 2))
                mean = sum(range(1, size + 1)) / size
                moved -= np.array([1.0, 2.0, 0.0, -1.0]) * mean * passes / (3 if average else 1)
            np.testing.assert_allclose(weight.numpy(), moved, rtol=0.01, atol=0.1)
            assert int(optimizer.iterations) == i + 1
        assert optimizer._agg_helper.counter.numpy() == 8 % 3


@pytest.mark.parametrize("passes", [1, 3])
def test_a_step_without_data_is_no_step(keras, rank, gather, passes):
    """Keras learns the length of such data from a step that fails: what it counts could differ between ranks."""
    model = make_model(keras, seed=rank)
    x, y = make_data(rank, 7 * 16)
    batches = tf.data.Dataset.from_generator(
        lambda: ((x[i : i + 16], y[i : i + 16]) for i in range(0, len(x), 16)),
        output_signature=(tf.TensorSpec([16, 24]), tf.TensorSpec([16, 4])),
    )
    # The indices of randomk depend on the number of steps.
    optimizer = hvdc.DistributedOptimizer(
        keras.optimizers.SGD(0.01), compression="randomk:ratio=0.1", backward_passes_per_step=passes
    )
    model.compile(optimizer, "mse")
    broadcast = hvdc.callbacks.BroadcastGlobalVariablesCallback(0)  # once: later ones would copy `iterations`
    for fits in range(1, 4):
        model.fit(batches, verbose=0, callbacks=[broadcast])
        assert int(optimizer.iterations) == 7 * fits
        assert introspect.steps_made(introspect.plan_of(optimizer)) == 7 * fits // passes
        if passes > 1:
            assert optimizer._agg_helper.counter.numpy() == 7 * fits % passes
    everyone = gather(flat_weights(model))
    assert (everyone == everyone[0]).all()


@pytest.mark.skipif(not IS_KERAS3, reason="an argument of Keras 3's optimizers")
def test_keras3_gradient_accumulation_sends_no_micro_batch(rank, size):
    from tensorflow import keras

    optimizer = hvdc.DistributedOptimizer(keras.optimizers.SGD(1.0, gradient_accumulation_steps=3), compression="int8")
    weight = keras.Variable(np.zeros((40, 50), np.float32))

    @tf.function
    def step(gradient):
        optimizer.apply([gradient], [weight])

    for i in range(6):
        step(tf.fill((40, 50), float((rank + 1) * (i + 1))))
        assert introspect.steps_made(introspect.plan_of(optimizer)) == (i + 1) // 3
    mean = sum(range(1, size + 1)) / size
    np.testing.assert_allclose(np.asarray(weight), -mean * (2.0 + 5.0), rtol=1e-4)


def test_clipping_sees_the_averaged_gradient(keras, rank, size):
    optimizer = hvdc.DistributedOptimizer(keras.optimizers.SGD(1.0, clipvalue=1.0))
    weight = tf.Variable([0.0, 0.0])
    # Rank 0 pulls by 2 * size, the others not at all: clipped first, the average would be 1 / size.
    pull = 1.5 * size if rank == 0 else 0.0
    descend(keras, optimizer, [weight], [tf.constant([pull, pull / 3])])
    np.testing.assert_allclose(weight.numpy(), [-1.0, -0.5], rtol=1e-6)


def test_gradient_predivide_factor(keras, rank, size):
    weights = []
    for factor in (1.0, 4.0):
        optimizer, weight, gradients = quadratic(keras, rank, gradient_predivide_factor=factor)
        compressed, other, _ = quadratic(keras, rank, gradient_predivide_factor=factor, compression="int8")
        for opt, w in ((optimizer, weight), (compressed, other)):
            descend(keras, opt, [w], [tf.constant(gradients[0])])
        weights.append((weight.numpy(), other.numpy()))
    np.testing.assert_allclose(weights[0][0], weights[1][0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(weights[0][1], weights[1][1], rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="gradient_predivide_factor not supported with op != Average"):
        hvdc.DistributedOptimizer(keras.optimizers.SGD(1.0), gradient_predivide_factor=2.0, op=hvd.Sum)


@pytest.mark.parametrize("groups", [2, "lists"])
def test_groups(groups, keras, rank):
    model = make_model(keras, seed=0)
    variables = model.trainable_variables
    chosen = [[variables[0], variables[4]]] if groups == "lists" else groups
    results, start = [], model.get_weights()
    for g in (None, chosen):
        model.set_weights(start)
        opt = hvdc.DistributedOptimizer(keras.optimizers.SGD(0.1), compression="none", groups=g, min_compress_size=0)
        rng = np.random.default_rng(rank)
        descend(keras, opt, variables, [tf.constant(rng.standard_normal(v.shape), tf.float32) for v in variables])
        results.append(flat_weights(model))
    np.testing.assert_allclose(results[0], results[1], rtol=1e-6, atol=1e-7)
    uncompressed = introspect.uncompressed_buckets(introspect.plan_of(opt))
    assert len(uncompressed) == (2 if groups == 2 else 5)


def test_slices_dense_and_sparse(keras, rank, size):
    for sparse_as_dense in (False, True):
        opt = hvdc.DistributedOptimizer(
            keras.optimizers.SGD(1.0),
            sparse_as_dense=sparse_as_dense,
            compression="int8",
            min_compress_size=0,
        )
        table = tf.Variable(np.zeros((size + 1, 3), np.float32))
        slices = tf.IndexedSlices(
            tf.ones([2, 3]) * float(rank + 1), tf.constant([rank, rank]), tf.constant([size + 1, 3])
        )
        opt.apply_gradients([(slices, table)])
        expected = np.zeros((size + 1, 3))
        for r in range(size):
            expected[r] = -2.0 * (r + 1) / size
        np.testing.assert_allclose(table.numpy(), expected, atol=0.03)


def test_none_gradients_and_frozen_layers(keras, rank, gather):
    model = make_model(keras, seed=0)
    model.layers[0].trainable = False
    frozen = model.layers[0].get_weights()[0].copy()
    opt = hvdc.DistributedOptimizer(keras.optimizers.Adam(0.01), compression="hybrid:ratio=0.1,bits=4")
    model.compile(optimizer=opt, loss="mse")
    x, y = make_data(rank)
    model.fit(x, y, batch_size=16, epochs=2, verbose=0)
    np.testing.assert_array_equal(model.layers[0].get_weights()[0], frozen)
    everyone = gather(flat_weights(model))
    assert (everyone == everyone[0]).all()

    opt = hvdc.DistributedOptimizer(keras.optimizers.SGD(1.0))
    used, unused = tf.Variable([0.0]), tf.Variable([5.0])
    with pytest.warns(UserWarning) if IS_KERAS3 and keras is tf_dot_keras else _nothing():
        opt.apply_gradients([(tf.constant([1.0]), used), (None, unused)])
    assert used.numpy() == [-1.0] and unused.numpy() == [5.0]


class _nothing:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        return False


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float64])
@pytest.mark.parametrize("spec", ["none", "int8"])
def test_gradients_of_other_dtypes(spec, dtype, rank, size):
    if spec == "none" and dtype == tf.bfloat16:
        pytest.skip("Horovod has no bfloat16 allreduce")
    reducer = introspect.new_reducer(spec)
    x = np.linspace(-1, 1, 2000).reshape(40, 50) * (rank + 1)
    (result,) = reducer([tf.cast(x, dtype)], [tf.Variable(tf.zeros([40, 50], dtype))])
    assert result.dtype == dtype
    mean = np.linspace(-1, 1, 2000).reshape(40, 50) * (size + 1) / 2
    np.testing.assert_allclose(tf.cast(result, tf.float64), mean, atol=0.02)


@pytest.mark.parametrize("small", [None, 0, 10**6])
def test_what_is_small_is_not_compressed(small, rank, size):
    keras = KERASES["keras"]
    options = {} if small is None else {"min_compress_size": small}
    opt = hvdc.DistributedOptimizer(keras.optimizers.SGD(1.0), compression="onebit", **options)
    matrix, vector = tf.Variable(np.zeros((40, 50), np.float32)), tf.Variable(np.zeros(3000, np.float32))
    rng = np.random.default_rng(rank)
    gradients = [rng.standard_normal(v.shape).astype(np.float32) for v in (matrix, vector)]
    opt.apply_gradients([(tf.constant(gradients[0]), matrix), (tf.constant(gradients[1]), vector)])
    means = []
    for shape_index in (0, 1):
        rngs = [np.random.default_rng(r) for r in range(size)]
        draws = [[g.standard_normal((40, 50)), g.standard_normal(3000)] for g in rngs]
        means.append(np.mean([d[shape_index] for d in draws], axis=0))
    exact = [np.allclose(-v.numpy(), m, atol=1e-5) for v, m in zip((matrix, vector), means)]
    assert exact == {None: [False, True], 0: [False, False], 10**6: [True, True]}[small]


def test_a_bad_gradient_leaves_the_residuals_alone(rank, size, gather):
    keras = KERASES["keras"]
    for spec in ("int8", "topk:ratio=0.1", "randomk:ratio=0.1", "hybrid:ratio=0.1,bits=4"):
        optimizer, weight, gradients = quadratic(keras, rank, compression=spec)
        descend(keras, optimizer, [weight], [tf.constant(gradients[0])])
        (residual,) = introspect.residual_variables(introspect.plan_of(optimizer))
        before = residual.numpy()
        bad = gradients[1].copy()
        if rank == size - 1:
            bad[7, 7] = np.nan
        descend(keras, optimizer, [weight], [tf.constant(bad)])
        assert not np.isfinite(weight.numpy()).all()
        np.testing.assert_array_equal(residual.numpy(), before)


@pytest.fixture(scope="module", params=sorted(KERASES))
def trained(request, rank):
    """A Keras and a model that was trained with residuals."""
    keras = KERASES[request.param]
    model = make_model(keras, seed=0)
    opt = hvdc.DistributedOptimizer(keras.optimizers.Adam(0.01), compression="int8")
    # not "mse": Keras 3 cannot load that name from an h5 file, whoever wrapped the optimizer
    model.compile(optimizer=opt, loss=keras.losses.MeanSquaredError())
    model.fit(*make_data(rank), verbose=0)
    return keras, model


def test_residuals_are_not_among_the_variables(trained):
    keras, model = trained
    assert any(v.numpy().any() for v in introspect.residual_variables(introspect.plan_of(model.optimizer)))
    plain = keras.optimizers.Adam(0.01)
    plain.build(model.trainable_variables)
    shapes = [[tuple(v.shape) for v in optimizer.variables] for optimizer in (model.optimizer, plain)]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("extension", ["keras", "h5"])
def test_a_saved_model_loads_without_this_package(trained, extension, rank, tmp_path):
    keras, model = trained
    x, y = make_data(rank)
    assert type(model.optimizer).__name__ == "Adam"
    path = tmp_path / f"model.{extension}"
    model.save(path)
    loaded = keras.models.load_model(path)
    assert type(loaded.optimizer) is keras.optimizers.Adam or type(loaded.optimizer).__mro__[0].__name__ == "Adam"
    assert not isinstance(loaded.optimizer, DistributedMixin)
    assert int(loaded.optimizer.iterations) == int(model.optimizer.iterations)
    if extension == "h5" and IS_KERAS3 and keras is tf_dot_keras:
        return  # Keras 3 cannot train on with an optimizer from an h5 file, whoever wrapped it
    # wrapped again, its state goes on
    again = hvdc.DistributedOptimizer(loaded.optimizer, compression="int8")
    assert int(again.iterations) == int(model.optimizer.iterations)
    loaded.compile(optimizer=again, loss="mse")
    loaded.fit(x, y, verbose=0)
    assert int(again.iterations) == 2 * int(model.optimizer.iterations)


def test_from_config(keras):
    opt = hvdc.DistributedOptimizer(keras.optimizers.Adam(), compression="int8")
    config = opt.get_config()
    assert opt.from_config(config).get_config() == config
    assert opt.__class__.from_config(config).get_config() == config


def test_local_variables(keras, rank, size):
    for scale in (True, False):
        opt = hvdc.DistributedOptimizer(keras.optimizers.SGD(1.0), scale_local_gradients=scale)
        local, shared = tf.Variable([0.0]), tf.Variable([0.0])
        opt.register_local_var(local)
        opt.apply_gradients([(tf.constant([rank + 1.0]), v) for v in (local, shared)])
        assert local.numpy() == [-(rank + 1.0) / (size if scale else 1)]
        assert shared.numpy() == [-(size + 1) / 2]


@pytest.mark.parametrize("kind", ["new", "legacy"])
def test_local_variables_have_a_clip_norm_of_their_own(keras, kind, rank, size):
    if kind == "legacy" and IS_KERAS3 and keras is KERASES["keras"]:
        return
    sgd = keras.optimizers.legacy.SGD if kind == "legacy" else keras.optimizers.SGD
    opt = hvdc.DistributedOptimizer(sgd(1.0, global_clipnorm=1.0), scale_local_gradients=False)
    local, shared, other = tf.Variable([0.0]), tf.Variable([0.0, 0.0]), tf.Variable([0.0])
    opt.register_local_var(local)
    opt.apply_gradients(
        [(tf.constant([3.0 * rank + 0.5]), local), (tf.constant([2.0, 4.0]), shared), (tf.constant([4.0]), other)]
    )
    np.testing.assert_allclose([*shared.numpy(), *other.numpy()], [-1 / 3, -2 / 3, -2 / 3], rtol=1e-6)
    np.testing.assert_allclose(local.numpy(), [-min(1.0, 3.0 * rank + 0.5)], rtol=1e-6)


@pytest.mark.skipif(not IS_KERAS3, reason="Keras 3 puts its steps into XLA on request")
def test_jit_compile_gets_a_clear_error():
    from tensorflow import keras

    model = make_model(keras, seed=0)
    model.compile(optimizer=hvdc.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse", jit_compile=True)
    with pytest.raises(RuntimeError, match="jit_compile=False"):
        model.fit(*make_data(0), verbose=0)


def test_wrong_arguments(keras):
    sgd = keras.optimizers.SGD(0.1)
    cases = [
        ({"compression": "int9"}, "unknown compressor 'int9': did you mean 'int8'"),
        ({"op": hvd.Min if hasattr(hvd, "Min") else 99}, "Average and Sum"),
        ({"backward_passes_per_step": 0}, "backward_passes_per_step must be > 0"),
        ({"groups": 0}, "groups should be a non-negative integer or a list of list"),
        ({"min_compress_size": -1}, "min_compress_size must be a whole number from 0 on"),
        ({"bucket_bytes": 0}, "bucket_bytes must be a whole number from 1 on"),
        ({"residual_decay": 1.5}, "residual_decay must be a number from 0.0 to 1.0"),
        ({"residual_dtype": "int8"}, "residual_dtype must be 'float32' or 'bfloat16', got 'int8'"),
        ({"compression": "int8", "momentum_correction": 0.9}, "needs a sparse compressor"),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            hvdc.DistributedOptimizer(sgd, **options)
    for wrong in ("adam", keras.optimizers.SGD, None):
        with pytest.raises(TypeError, match="instance of a Keras optimizer"):
            hvdc.DistributedOptimizer(wrong)
    with pytest.raises(TypeError, match="wrap it only once"):
        hvdc.DistributedOptimizer(hvdc.DistributedOptimizer(sgd))


def test_what_is_excluded_from_weight_decay_stays_excluded(keras):
    optimizer = keras.optimizers.AdamW(0.1)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    optimizer = hvdc.DistributedOptimizer(optimizer)
    kernel, bias = (tf.Variable(tf.zeros([4]), name=name) for name in ("kernel", "bias"))
    assert optimizer._use_weight_decay(kernel) and not optimizer._use_weight_decay(bias)


def test_a_learning_rate_schedule_without_a_configuration(keras, rank, size):
    class Halving(keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step):
            return 0.5 ** (tf.cast(step, tf.float32) + 1.0)

    optimizer = hvdc.DistributedOptimizer(keras.optimizers.SGD(Halving()))
    weight = tf.Variable(tf.zeros([40, 50]))
    for _ in range(3):
        descend(keras, optimizer, [weight], [tf.fill([40, 50], float(rank))])
    np.testing.assert_allclose(weight.numpy(), -(size - 1) / 2 * (0.5 + 0.25 + 0.125), rtol=1e-6)


def test_bytes_sent(rank, size):
    keras = KERASES["keras"]
    opt, weight, gradients = quadratic(keras, rank, compression="int4")
    with pytest.raises(RuntimeError, match="after the first step"):
        opt.bytes_sent()
    descend(keras, opt, [weight], [tf.constant(gradients[0])])
    sent, plain = opt.bytes_sent()
    assert plain == 2 * (size - 1) / size * 8000
    assert sent == (size - 1) * (8 * (128 + 8) + 1)


def test_bytes_sent_by_auto_without_compression_are_those_of_horovod(fixed_costs, rank, size):
    """2,023 elements: as chunks, they would be padded."""
    optimizer = hvdc.DistributedOptimizer(KERASES["keras"].optimizers.SGD(1.0), compression="auto:candidates=(none)")
    descend(KERASES["keras"], optimizer, [tf.Variable(tf.zeros([17, 119]))], [tf.fill([17, 119], float(rank))])
    assert optimizer.bytes_sent() == (2 * (size - 1) * 8092 // size,) * 2


@pytest.mark.parametrize("spec", ["none", "int8"])
@pytest.mark.np4
def test_process_set(spec, rank, size, process_sets, recwarn):
    keras = KERASES["keras"]
    even = process_sets[0]
    opt, weight, gradients = quadratic(keras, rank, compression=spec, process_set=even)
    descend(keras, opt, [weight], [tf.constant(gradients[0])])
    all_gradients = [np.random.default_rng(r).standard_normal((6, 40, 50))[0] for r in range(size)]
    expected = np.mean(all_gradients[::2], 0) if rank % 2 == 0 else all_gradients[rank]
    np.testing.assert_allclose(-weight.numpy(), expected, atol=1e-5 if spec == "none" else 0.02)
    warned = [str(w.message) for w in recwarn if "is not in the process set" in str(w.message)]
    assert len(warned) == rank % 2 and all(text.startswith(f"rank {rank} is not in") for text in warned)


@pytest.mark.parametrize("name", [n for n, k in KERASES.items() if n == "tf_keras" or not IS_KERAS3])
def test_legacy_optimizers(name, rank, size, gather):
    keras = KERASES[name]
    opt = hvdc.DistributedOptimizer(keras.optimizers.legacy.SGD(1.0, clipvalue=1.0))
    weight = tf.Variable([0.0, 0.0])
    pull = 1.5 * size if rank == 0 else 0.0
    opt.apply_gradients([(tf.constant([pull, pull / 3]), weight)])
    np.testing.assert_allclose(weight.numpy(), [-1.0, -0.5], rtol=1e-6)

    model = make_model(keras, seed=0)
    opt = hvdc.DistributedOptimizer(keras.optimizers.legacy.Adam(0.01), compression="int8")
    model.compile(optimizer=opt, loss="mse")
    same = SameWeights(keras, gather)
    model.fit(*make_data(rank), epochs=2, verbose=0, callbacks=[same])
    assert same.epochs == 2


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy], ids=["copy", "deepcopy"])
def test_a_copy_is_distributed_too(keras, copied, rank, size):
    def step(optimizer, variable):
        optimizer.apply_gradients([(tf.fill([40, 50], float(rank)), variable)])
        return variable.numpy()

    try:
        copied(keras.optimizers.SGD(1.0))
    except RuntimeError:
        pytest.skip("this Keras cannot copy its own optimizers")
    optimizer = hvdc.DistributedOptimizer(keras.optimizers.SGD(1.0), compression="int8")
    other = copied(optimizer)
    variables = [tf.Variable(tf.zeros([40, 50])) for _ in range(2)]
    for one, variable in zip((optimizer, other), variables):
        np.testing.assert_allclose(step(one, variable), -(size - 1) / 2, atol=0.02)
    assert other._hvdc.reducer is not optimizer._hvdc.reducer
    assert type(copied(optimizer)) is type(optimizer)  # after a step
    np.testing.assert_allclose(step(optimizer, variables[0]), -(size - 1), atol=0.02)


def float8_model(keras, dtype=None):
    keras.utils.set_random_seed(0)
    layer = keras.layers.Dense(8, name="first", dtype=dtype)
    model = keras.Sequential([keras.Input((24,)), layer, keras.layers.Dense(4)])
    layer.quantize("float8")
    return model, layer


FLOAT8 = {
    "plain": {}, "on_nonfinite": {"on_nonfinite": "skip"}, "LossScaleOptimizer": {}, "gradient_accumulation_steps": {},
    "OneBitAdam": {}, "OneBitAdam, on_nonfinite": {"on_nonfinite": "skip"},
    "local_steps": {"local_steps": 2}, "fragments": {"local_steps": 2, "fragments": "stream"},
}  # fmt: skip


@pytest.mark.skipif(not IS_KERAS3, reason="Keras 2 has no float8")
@pytest.mark.parametrize("way", FLOAT8)
def test_all_ranks_have_the_statistics_of_float8(way, rank, size, gather):
    keras = tf_dot_keras
    model, layer = float8_model(keras)
    inner = keras.optimizers.SGD(0.01, gradient_accumulation_steps=2 if way == "gradient_accumulation_steps" else None)
    if way.startswith("OneBitAdam"):
        optimizer = hvdc.optimizers.OneBitAdam(0.01, freeze_step=2, min_compress_size=100, **FLOAT8[way])
    else:
        optimizer = hvdc.DistributedOptimizer(inner, compression="int8", min_compress_size=100, **FLOAT8[way])
    if way == "LossScaleOptimizer":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    model.compile(optimizer, "mse", jit_compile=False)
    batches = [[make_data(10 * r + b, 16) for b in range(4)] for r in range(size)]
    for x, y in batches[rank]:
        model.train_on_batch(x, y)
    # Keras keeps the largest value of an update's passes. The newest stands first, and the others stand at the end.
    passes = 2 if way == "gradient_accumulation_steps" else 1
    largest = np.reshape([max(np.abs(of_rank[b][0]).max() for of_rank in batches) for b in range(4)], [-1, passes])
    *before, newest = largest.max(1)
    history = np.asarray(layer.inputs_amax_history)
    np.testing.assert_allclose(history[[0, *range(-len(before), 0)]], [newest, *before], rtol=1e-6)
    if way == "fragments":
        optimizer.synchronize()
    everyone = gather(flat_weights(model))
    assert (everyone == everyone[0]).all()


@pytest.mark.skipif(not IS_KERAS3, reason="Keras 2 has no float8")
def test_float8_is_not_summed_over_passes(rank):
    model, _ = float8_model(tf_dot_keras)
    optimizer = hvdc.DistributedOptimizer(tf_dot_keras.optimizers.SGD(0.01), backward_passes_per_step=2)
    model.compile(optimizer, "mse", jit_compile=False)
    with pytest.raises(ValueError, match="is overwritten with its gradient, and backward_passes_per_step > 1"):
        model.train_on_batch(*make_data(rank, 16))


@pytest.mark.skipif(not IS_KERAS3, reason="Keras 2 has no float8")
def test_ranks_with_other_float8_layers_are_told_so(rank):
    keras = tf_dot_keras
    model, _ = float8_model(keras)
    if rank == 1:
        model.layers[-1].quantize("float8")
    model.compile(hvdc.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse", jit_compile=False)
    with pytest.raises(ValueError, match="ranks disagree on the number of gradients"):
        model.train_on_batch(*make_data(rank, 16))


@pytest.mark.parametrize("name, normalized", [("Adam", False), ("SGD", False), ("Lamb", True)])
@pytest.mark.skipif(not IS_KERAS3, reason="Keras 2 has no Lamb")
def test_what_auto_knows_of_the_optimizer(name, normalized):
    optimizers = tf_dot_keras.optimizers
    kind = getattr(optimizers, name)
    for optimizer in (kind(0.01), type("Own", (kind,), {})(0.01), optimizers.LossScaleOptimizer(kind(0.01))):
        settings = introspect.reducer_of(hvdc.DistributedOptimizer(optimizer, compression="auto")).settings
        assert (settings.adaptive, settings.normalized) == (name != "SGD", normalized)
