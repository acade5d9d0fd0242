"""Loss scaling: one rank overflows, all ranks skip the step, and nobody waits for ever."""

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
from test_optimizer import IS_KERAS3, KERASES, make_data, make_model

import hvd_compress as hvdc

pytestmark = pytest.mark.timeout(120)


@pytest.mark.skipif(not IS_KERAS3, reason="Keras 3's LossScaleOptimizer")
@pytest.mark.parametrize("spec", ["none", "int8", "topk:ratio=0.1"])
def test_all_ranks_skip_where_one_overflows(spec, rank, size, gather):
    keras = KERASES["keras"]
    inner = keras.optimizers.SGD(1.0)
    opt = hvdc.DistributedOptimizer(
        keras.optimizers.LossScaleOptimizer(inner, initial_scale=1024.0, dynamic_growth_steps=2),
        compression=spec,
    )
    weight = keras.Variable(np.zeros((40, 50), np.float32))
    opt.build([weight])

    @tf.function
    def step(gradient):
        opt.apply([gradient * tf.convert_to_tensor(opt.dynamic_scale)], [weight])

    rng = np.random.default_rng(rank)
    total, scales = np.zeros((40, 50)), []
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
        everyone = gather(np.array(weight))
        assert (everyone == everyone[0]).all()
    assert scales == [1024.0, 2048.0, 1024.0, 1024.0, 2048.0]
    missing = np.zeros((40, 50))
    if spec != "none":
        ((state,),) = [plan.states for plan in opt._hvdc.reducer.plans.values()]
        missing = gather(state.residuals[0].numpy()[:2000]).mean(0).reshape(40, 50)
    # Nothing is lost, and the residual has the gradient's scale, whatever the loss was scaled by.
    np.testing.assert_allclose(-np.array(weight) + missing, total, atol=1e-4)


@pytest.mark.skipif(not IS_KERAS3, reason="Keras 3's compile wraps the optimizer")
def test_wrapped_by_compile_is_refused_instead_of_a_hang():
    keras = KERASES["keras"]
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        model = make_model(keras, seed=0)
        model.compile(optimizer=hvdc.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
        with pytest.raises(RuntimeError, match="wrap the other way round"):
            model.fit(*make_data(0), verbose=0)
        model = make_model(keras, seed=0)
        opt = hvdc.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)))
        model.compile(optimizer=opt, loss="mse")
        assert model.optimizer is opt
        history = model.fit(*make_data(hvd.rank()), epochs=3, verbose=0)
        assert history.history["loss"][-1] < history.history["loss"][0]
    finally:
        keras.mixed_precision.set_global_policy("float32")


@pytest.mark.parametrize("name", [name for name in sorted(KERASES) if name == "tf_keras" or not IS_KERAS3])
def test_keras2_reduces_once_and_decides_alike(name, rank, size, gather):
    keras = KERASES[name]
    inner = hvdc.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hvd.Sum)
    opt = keras.mixed_precision.LossScaleOptimizer(inner, initial_scale=4.0)
    weight = tf.Variable(np.zeros(3, np.float32))

    @tf.function
    def step(pull):
        opt.minimize(lambda: tf.reduce_sum(weight * pull), [weight])

    total = size * (size + 1) / 2
    step(tf.constant([1.0, 2.0, 3.0]) * float(rank + 1))
    np.testing.assert_allclose(weight.numpy(), -np.array([1.0, 2.0, 3.0]) * total)
    step(tf.constant([1.0, np.inf if rank == 0 else 1.0, 1.0]))
    np.testing.assert_allclose(weight.numpy(), -np.array([1.0, 2.0, 3.0]) * total)
    assert float(opt.loss_scale) == 2.0
