"""Loss scaling: one rank overflows, all ranks skip the step, and nobody waits for ever."""

import copy

import horovod.tensorflow as hvd
import introspect
import numpy as np
import pytest
import tensorflow as tf
from test_optimizer import IS_KERAS3, KERASES, flat_weights, make_data, make_model
from test_tape import np_topk

import hvd_compress as hvdc

keras3 = pytest.mark.skipif(not IS_KERAS3, reason="Keras 3's LossScaleOptimizer")
KERAS2 = [name for name in sorted(KERASES) if name == "tf_keras" or not IS_KERAS3]
WAYS = ["inside", "around"]  # where the LossScaleOptimizer is


@pytest.fixture
def mixed_float16():
    keras = KERASES["keras"]
    keras.mixed_precision.set_global_policy("mixed_float16")
    yield keras
    keras.mixed_precision.set_global_policy("float32")


def scaled(way, scaler, optimizer, scaling, **options):
    """A LossScaleOptimizer in or around a DistributedOptimizer: the optimizer, and the distributed one."""
    if way == "inside":
        opt = hvdc.DistributedOptimizer(scaler(optimizer, **scaling), **options)
        return opt, opt
    inner = hvdc.DistributedOptimizer(optimizer, **options)
    return scaler(inner, **scaling), inner


def residual_of(distributed):
    """That of the weight; an unused variable has none."""
    return max(introspect.residuals(introspect.plan_of(distributed)), key=np.size).ravel()


@keras3
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("spec", ["none", "int8", "topk:ratio=0.1"])
def test_all_ranks_skip_where_one_overflows(spec, way, rank, size, gather):
    keras = KERASES["keras"]
    opt, distributed = scaled(
        way, keras.optimizers.LossScaleOptimizer, keras.optimizers.SGD(1.0),
        {"initial_scale": 1024.0, "dynamic_growth_steps": 2}, compression=spec,
    )  # fmt: skip
    weight = keras.Variable(np.zeros((40, 50), np.float32))
    opt.build([weight])

    @tf.function
    def step(gradient):
        opt.apply([gradient * tf.convert_to_tensor(opt.dynamic_scale)], [weight])

    rng = np.random.default_rng(rank)
    total, scales, residual = np.zeros((40, 50)), [], np.zeros(2000, np.float32)
    for i in range(5):
        gradient = rng.standard_normal((40, 50)).astype(np.float32)
        if i == 2 and rank == size - 1:
            gradient[3, 3] = np.inf
        before = np.array(weight)
        step(tf.constant(gradient))
        scales.append(float(opt.dynamic_scale))
        if i == 2:
            np.testing.assert_array_equal(np.array(weight), before)
        else:
            total += gather(gradient).mean(0)
            residual += gradient.ravel()
            residual -= np_topk(residual, 200)
        everyone = gather(np.array(weight))
        assert (everyone == everyone[0]).all()
        if spec.startswith("topk"):  # kept in the gradient's units, whatever the loss was scaled by
            np.testing.assert_allclose(residual_of(distributed), residual, atol=1e-5)
    assert scales == [1024.0, 2048.0, 1024.0, 1024.0, 2048.0]
    assert int(opt.iterations) == 4
    missing = 0.0 if spec == "none" else gather(residual_of(distributed)).mean(0).reshape(40, 50)
    np.testing.assert_allclose(-np.array(weight) + missing, total, atol=1e-4)


@keras3
def test_compile_may_wrap(mixed_float16, rank, size, gather):
    keras = mixed_float16
    model = make_model(keras, seed=0)
    opt = hvdc.DistributedOptimizer(keras.optimizers.Adam(0.01), compression="int8")
    model.compile(optimizer=opt, loss="mse")
    assert type(model.optimizer) is keras.optimizers.LossScaleOptimizer
    seen = []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            scaler = self.model.optimizer
            seen.append((float(scaler.dynamic_scale), int(scaler.iterations), flat_weights(self.model)))

    x, y = make_data(rank, n=80)
    if rank == size - 1:
        x[35] = np.inf  # in the third batch
    model.fit(x, y, batch_size=16, verbose=0, shuffle=False, callbacks=[Watch()])
    scales, iterations, weights = (gather(np.array(values)) for values in zip(*seen))
    assert (scales == [32768.0] * 2 + [16384.0] * 3).all()
    assert (iterations == [1, 2, 2, 3, 4]).all()
    assert (weights == weights[0]).all() and np.isfinite(weights).all()
    np.testing.assert_array_equal(weights[0][1], weights[0][2])
    assert (weights[0][2] != weights[0][3]).any()
    x[35] = 0.0
    history = model.fit(x, y, batch_size=16, epochs=4, verbose=0)
    assert history.history["loss"][-1] < history.history["loss"][0]
    assert opt.bytes_sent()[1] > 0


@keras3
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy], ids=["copy", "deepcopy"])
@pytest.mark.parametrize("way", WAYS)
def test_a_copy_is_distributed_too(way, copied, rank, size):
    keras = KERASES["keras"]
    scaler = keras.optimizers.LossScaleOptimizer
    optimizer, _ = scaled(way, scaler, keras.optimizers.SGD(1.0), {"initial_scale": 4.0}, compression="int8")
    weights = [keras.Variable(np.zeros((40, 50), np.float32)) for _ in range(3)]

    def step(one, weight):
        one.apply([tf.fill([40, 50], 4.0 * rank)], [weight])
        return np.array(weight)

    early, _ = copied(optimizer), step(optimizer, weights[0])
    for one, weight in zip((early, copied(optimizer)), weights[1:]):
        one.build([weight])
        np.testing.assert_allclose(step(one, weight), -(size - 1) / 2, atol=0.02)
    np.testing.assert_allclose(step(optimizer, weights[0]), -(size - 1), atol=0.02)
    plain = copied(scaler(keras.optimizers.SGD(1.0)))
    assert type(plain) is scaler and type(plain.inner_optimizer) is keras.optimizers.SGD


@keras3
def test_what_compile_wrapped_is_saved_as_keras_own(mixed_float16, rank, tmp_path):
    keras = mixed_float16
    model = make_model(keras, seed=0)
    model.compile(
        hvdc.DistributedOptimizer(keras.optimizers.Adam(0.01), compression="int8"),
        loss=keras.losses.MeanSquaredError(),
    )
    model.fit(*make_data(rank), verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer) is keras.optimizers.LossScaleOptimizer
    assert type(loaded.optimizer.inner_optimizer) is keras.optimizers.Adam
    assert float(loaded.optimizer.dynamic_scale) == float(model.optimizer.dynamic_scale)
    assert int(loaded.optimizer.iterations) == int(model.optimizer.iterations) == 2
    again = hvdc.DistributedOptimizer(loaded.optimizer, compression="int8")
    loaded.compile(optimizer=again, loss="mse")
    loaded.fit(*make_data(rank), verbose=0)
    assert int(again.iterations) == 4


@keras3
def test_another_loss_scale_optimizer_is_left_alone(rank):
    """Keras's class is taught about distributed optimizers only."""
    keras = KERASES["keras"]
    hvdc.DistributedOptimizer(keras.optimizers.SGD(1.0))
    opt = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=4.0)
    weight = keras.Variable(np.zeros(3, np.float32))
    opt.apply([tf.constant([4.0, 8.0, 12.0]) * (rank + 1)], [weight])
    np.testing.assert_allclose(np.array(weight), -np.array([1.0, 2.0, 3.0]) * (rank + 1))


@keras3
def test_an_apply_of_ones_own_gets_an_error_instead_of_a_hang():
    keras = KERASES["keras"]

    class Scaler(keras.optimizers.LossScaleOptimizer):
        def apply(self, grads, trainable_variables=None):
            self.built or self.build(trainable_variables)
            self._common_apply(grads, trainable_variables)

    opt = Scaler(hvdc.DistributedOptimizer(keras.optimizers.SGD(1.0)))
    with pytest.raises(RuntimeError, match="wrap the other way round"):
        opt.apply([tf.ones(3)], [keras.Variable(np.zeros(3, np.float32))])


@keras3
def test_wrapped_twice():
    keras = KERASES["keras"]
    opt = keras.optimizers.LossScaleOptimizer(hvdc.DistributedOptimizer(keras.optimizers.SGD(1.0)))
    with pytest.raises(TypeError, match="wrap it only once"):
        hvdc.DistributedOptimizer(opt)


@keras3
@pytest.mark.parametrize("way", WAYS)
def test_backward_passes_per_step(way, rank, size, gather):
    """An overflow in any pass of any rank skips the whole step, and nothing of it is left in the sums."""
    keras = KERASES["keras"]
    opt, _ = scaled(
        way, keras.optimizers.LossScaleOptimizer, keras.optimizers.SGD(1.0), {"initial_scale": 8.0},
        backward_passes_per_step=2,
    )  # fmt: skip
    weight = keras.Variable(np.zeros(3, np.float32))
    opt.build([weight])

    @tf.function
    def step(gradient):
        opt.apply([gradient * tf.convert_to_tensor(opt.dynamic_scale)], [weight])

    scales, weights = [], []
    for i in range(6):
        step(tf.constant([np.inf if i == 2 and rank == 0 else i + 1.0, 0.0, rank], tf.float32))
        scales.append(float(opt.dynamic_scale))
        weights.append(np.array(weight))
    assert (gather(np.array(scales)) == [8.0, 8.0, 8.0, 4.0, 4.0, 4.0]).all()
    mean = (size - 1) / 2
    moved = np.array([[0.0, 0, 0], [3, 0, 2 * mean], [3, 0, 2 * mean], [3, 0, 2 * mean], [3, 0, 2 * mean]])
    np.testing.assert_allclose(weights[:5], -moved)
    np.testing.assert_allclose(weights[5], [-14.0, 0.0, -4 * mean])


@keras3
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("passes", [1, 2])
def test_all_ranks_skip_where_a_local_gradient_overflows(passes, way, rank):
    keras = KERASES["keras"]
    opt, distributed = scaled(
        way, keras.optimizers.LossScaleOptimizer, keras.optimizers.SGD(1.0), {"initial_scale": 4.0},
        backward_passes_per_step=passes, scale_local_gradients=False,
    )  # fmt: skip
    local, shared = (keras.Variable(np.zeros(2, np.float32)) for _ in range(2))
    distributed.register_local_var(local)
    opt.build([local, shared])

    @tf.function
    def step(own):
        scale = tf.convert_to_tensor(opt.dynamic_scale)
        opt.apply([own * scale, tf.constant([1.0, 2.0]) * scale], [local, shared])

    for i in range(3 * passes):
        is_bad = i == 2 * passes - 1 and rank == 0
        step(tf.constant([np.inf if is_bad else rank + 1.0, 1.0]))
    assert float(opt.dynamic_scale) == 2.0
    np.testing.assert_allclose(np.array(shared), [-2.0 * passes, -4.0 * passes])
    np.testing.assert_allclose(np.array(local), [-2.0 * passes * (rank + 1.0), -2.0 * passes])


@keras3
@pytest.mark.parametrize("way", WAYS)
def test_only_one_rank_has_a_local_variable(way, rank):
    keras = KERASES["keras"]
    opt, distributed = scaled(
        way, keras.optimizers.LossScaleOptimizer, keras.optimizers.SGD(1.0), {"initial_scale": 4.0}
    )
    shared, local = (keras.Variable(np.zeros(2, np.float32)) for _ in range(2))
    variables = [shared]
    if rank == 0:
        distributed.register_local_var(local)
        variables.append(local)
    opt.build(variables)

    @tf.function
    def step(own):
        scale = tf.convert_to_tensor(opt.dynamic_scale)
        opt.apply([tf.constant([1.0, 2.0]) * scale, own * scale][: len(variables)], variables)

    for bad in (False, True, False):
        step(tf.constant([np.inf if bad else 1.0, 1.0]))
    assert float(opt.dynamic_scale) == 2.0
    np.testing.assert_allclose(np.array(shared), [-2.0, -4.0])


@pytest.mark.parametrize("name", KERAS2)
@pytest.mark.parametrize("way", WAYS)
def test_keras2_skips_where_a_local_gradient_overflows(name, way, rank):
    keras = KERASES[name]
    scaler = keras.mixed_precision.LossScaleOptimizer
    opt, distributed = scaled(
        way, scaler, keras.optimizers.SGD(1.0), {"initial_scale": 4.0}, scale_local_gradients=False
    )
    local, shared = tf.Variable([0.0]), tf.Variable([0.0])
    distributed.register_local_var(local)

    @tf.function
    def step(pull):
        opt.minimize(lambda: tf.reduce_sum(local * pull) + tf.reduce_sum(shared), [local, shared])

    for i in range(3):
        step(tf.constant([np.inf if i == 1 and rank == 0 else rank + 1.0]))
    assert float(opt.loss_scale) == 2.0
    assert shared.numpy() == [-2.0] and local.numpy() == [-2.0 * (rank + 1.0)]


@keras3
def test_a_norm_that_ranks_would_not_share_is_refused():
    keras = KERASES["keras"]
    opt = hvdc.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0, global_clipnorm=1.0)))
    with pytest.raises(ValueError, match="wrap the other way round"):
        opt.register_local_var(tf.Variable(0.0))


@keras3
@pytest.mark.parametrize("way", WAYS)
def test_accumulation_behind_the_loss_scale_is_refused(way):
    keras = KERASES["keras"]
    sgd = keras.optimizers.SGD(1.0, gradient_accumulation_steps=4)
    opt, _ = scaled(way, keras.optimizers.LossScaleOptimizer, sgd, {})
    with pytest.raises(ValueError, match="backward_passes_per_step=4, average_aggregated_gradients=True"):
        opt.apply([tf.ones(3)], [keras.Variable(np.zeros(3, np.float32))])


@keras3
def test_onebit_adam_behind_the_loss_scale_accumulates_nothing():
    keras = KERASES["keras"]
    opt = keras.optimizers.LossScaleOptimizer(hvdc.optimizers.OneBitAdam(0.1, gradient_accumulation_steps=2))
    with pytest.raises(ValueError, match="leave it out, or use mixed_bfloat16"):
        opt.apply([tf.ones(3)], [keras.Variable(np.zeros(3, np.float32))])


@keras3
@pytest.mark.parametrize("way", WAYS)
def test_slices_stay_slices(way, rank, size):
    keras = KERASES["keras"]
    opt, _ = scaled(way, keras.optimizers.LossScaleOptimizer, keras.optimizers.SGD(1.0), {"initial_scale": 8.0})
    table = keras.Variable(np.zeros((size + 1, 3), np.float32))
    opt.build([table])
    slices = tf.IndexedSlices(8.0 * tf.ones([1, 3]), tf.constant([rank]), tf.constant([size + 1, 3]))
    opt.apply([slices], [table])
    np.testing.assert_allclose(np.array(table), [[-1 / size] * 3] * size + [[0.0] * 3])


@keras3
def test_bfloat16_needs_no_scaling(rank, gather):
    keras = KERASES["keras"]
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    try:
        model = make_model(keras, seed=0)
        opt = hvdc.DistributedOptimizer(keras.optimizers.Adam(0.01), compression="int8")
        model.compile(optimizer=opt, loss="mse")
        assert model.optimizer is opt
        history = model.fit(*make_data(rank), epochs=3, verbose=0)
    finally:
        keras.mixed_precision.set_global_policy("float32")
    assert history.history["loss"][-1] < history.history["loss"][0]
    everyone = gather(flat_weights(model))
    assert (everyone == everyone[0]).all()


@pytest.mark.parametrize("name", KERAS2)
@pytest.mark.parametrize("kind", ["new", "legacy"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("loop", ["minimize", "apply_gradients"])
def test_keras2_reduces_once_and_decides_alike(name, kind, way, loop, rank, size, gather):
    keras = KERASES[name]
    sgd = keras.optimizers.SGD(1.0) if kind == "new" else keras.optimizers.legacy.SGD(1.0)
    opt, distributed = scaled(
        way, keras.mixed_precision.LossScaleOptimizer, sgd,
        {"initial_scale": 4.0, "dynamic_growth_steps": 2}, op=hvd.Sum, compression="topk:ratio=0.1",
    )  # fmt: skip
    weight, unused = tf.Variable(np.zeros((40, 50), np.float32)), tf.Variable(0.0)

    @tf.function
    def minimize(pull):
        opt.minimize(lambda: tf.reduce_sum(weight * pull), [unused, weight])

    @tf.function
    def apply_gradients(pull):
        with tf.GradientTape() as tape:
            loss = opt.get_scaled_loss(tf.reduce_sum(weight * pull))
        gradients = opt.get_unscaled_gradients(tape.gradient(loss, [unused, weight]))
        opt.apply_gradients(zip(gradients, [unused, weight]))

    rng = np.random.default_rng(rank)
    residual, expected, scales = np.zeros(2000, np.float32), np.zeros(2000), []
    for i in range(5):
        gradient = rng.standard_normal((40, 50)).astype(np.float32)
        if i == 2 and rank == size - 1:
            gradient[3, 3] = np.inf
        {"minimize": minimize, "apply_gradients": apply_gradients}[loop](tf.constant(gradient))
        scales.append(float(opt.loss_scale))
        if i != 2:
            residual += gradient.ravel()
            sent = np_topk(residual, 200)
            residual -= sent
            expected -= gather(sent).sum(0)
        np.testing.assert_allclose(weight.numpy().ravel(), expected, atol=1e-4)
        np.testing.assert_allclose(residual_of(distributed), residual, atol=1e-4)
    assert scales == [4.0, 8.0, 4.0, 4.0, 8.0]


@pytest.mark.parametrize("name", KERAS2)
def test_keras2_backward_passes_per_step(name, rank, size, gather):
    keras = KERASES[name]
    scaler = keras.mixed_precision.LossScaleOptimizer
    weight = tf.Variable(np.zeros(3, np.float32))
    opt, _ = scaled("around", scaler, keras.optimizers.SGD(1.0), {"initial_scale": 8.0}, backward_passes_per_step=2)
    with pytest.raises(RuntimeError, match="wrap the other way round"):
        opt.minimize(lambda: tf.reduce_sum(weight), [weight])
    opt, _ = scaled("inside", scaler, keras.optimizers.SGD(1.0), {"initial_scale": 8.0}, backward_passes_per_step=2)

    @tf.function
    def step(pull):
        opt.minimize(lambda: tf.reduce_sum(weight * pull), [weight])

    scales = []
    for i in range(6):
        step(tf.constant([np.inf if i == 2 and rank == 0 else i + 1.0, 0.0, rank], tf.float32))
        scales.append(float(opt.loss_scale))
    assert (gather(np.array(scales)) == [8.0, 8.0, 8.0, 4.0, 4.0, 4.0]).all()
    np.testing.assert_allclose(weight.numpy(), [-14.0, 0.0, -2.0 * (size - 1)])


@pytest.mark.parametrize("name", KERAS2)
def test_keras2_told_not_to_aggregate_gets_an_error_instead_of_a_hang(name):
    keras = KERASES[name]
    opt, _ = scaled("around", keras.mixed_precision.LossScaleOptimizer, keras.optimizers.SGD(1.0), {})
    with pytest.raises(RuntimeError, match="leave out skip_gradients_aggregation"):
        opt.apply_gradients([(tf.ones(3), tf.Variable(tf.zeros(3)))], skip_gradients_aggregation=True)


@pytest.mark.parametrize("name", KERAS2)
def test_keras2_compile_may_wrap(name, rank, size, gather):
    keras = KERASES[name]
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        model = make_model(keras, seed=0)
        model.compile(hvdc.DistributedOptimizer(keras.optimizers.Adam(0.01), compression="int8"), loss="mse")
        x, y = make_data(rank, n=80)
        if rank == size - 1:
            x[35] = np.inf
        model.fit(x, y, batch_size=16, verbose=0, shuffle=False)
    finally:
        keras.mixed_precision.set_global_policy("float32")
    assert float(model.optimizer.loss_scale) == 16384.0
    everyone = gather(flat_weights(model))
    assert (everyone == everyone[0]).all() and np.isfinite(everyone).all()
