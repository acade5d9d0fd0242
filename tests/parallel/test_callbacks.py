"""The callbacks against their formulas, on every Keras there is, with optimizers that know no Horovod.

So each rank trains alone here, and every agreement between ranks is the callbacks' doing.
"""

import math

import horovod.tensorflow as hvd
import keras as default_keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_compress
from hvd_compress import DistributedOptimizer
from hvd_compress import callbacks as hvdc

KERASES = [default_keras]
try:
    import tf_keras
except ImportError:
    pass
else:
    KERASES.append(tf_keras)


def version(keras):
    return int(keras.__version__.split(".")[0])


def optimizers(keras):
    """Name -> how to make an optimizer from the name of its class and its arguments."""

    def derived(name, **arguments):
        """As a distributed optimizer is made: a class of the same name, derived on the spot."""
        base = getattr(keras.optimizers, name)
        return type(name, (base,), {}).from_config(base(**arguments).get_config())

    home = keras.optimizers if version(keras) >= 3 else keras.mixed_precision
    makers = {
        "plain": lambda name, **arguments: getattr(keras.optimizers, name)(**arguments),
        "derived": derived,
        "scaled": lambda *args, **arguments: home.LossScaleOptimizer(makers["plain"](*args, **arguments)),
    }
    if version(keras) < 3:
        makers["legacy"] = lambda name, **arguments: getattr(keras.optimizers.legacy, name)(**arguments)
        makers["legacy-scaled"] = lambda *args, **arguments: home.LossScaleOptimizer(
            makers["legacy"](*args, **arguments)
        )
    return makers


def kind(keras):
    return f"keras{version(keras)}"


def each_optimizer(*names):
    """These kinds of optimizers on each Keras that has them."""
    cases = [
        pytest.param(keras, make, id=f"{kind(keras)}-{name}")
        for keras in KERASES
        for name, make in optimizers(keras).items()
        if name in names
    ]
    return pytest.mark.parametrize(("keras", "make"), cases)


each_keras = pytest.mark.parametrize("keras", KERASES, ids=kind)
PLAIN = ["plain", "legacy"]
WRAPPED = [*PLAIN, "scaled", "legacy-scaled"]

STEPS, BATCH = 3, 2


def data(seed):
    """STEPS batches for a linear model with two inputs."""
    random = np.random.default_rng(seed)
    return random.normal(size=(STEPS * BATCH, 2)), random.normal(size=(STEPS * BATCH, 1))


def batches(x, y, epochs=1):
    return [(x[i : i + BATCH], y[i : i + BATCH]) for i in range(0, len(x), BATCH)] * epochs


def gradient(w, x, y):
    """Of the mean squared error of x @ w."""
    return 2 / len(x) * x.T @ (x @ w - y)


def linear(keras, optimizer, start=1.0, shape=(2,), **compile_options):
    """A model x @ w, with all weights `start`; it is built at once only if it gets its input's shape."""
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer=keras.initializers.Constant(start))
    model = keras.Sequential(([keras.Input(shape)] if shape else []) + [layer])
    model.compile(optimizer=optimizer, loss="mse", **compile_options)
    return model


def weight(model):
    return model.get_weights()[0].astype(np.float64)


def rate_of(model):
    return float(np.asarray(model.optimizer.learning_rate))


def recorder(keras, read, *hooks):
    """A callback that keeps what `read(model, logs)` gives in these hooks."""

    def note(self, *args, logs=None):
        self.seen.append(read(self.model, logs or args[-1]))

    callback = type("Recorder", (keras.callbacks.Callback,), dict.fromkeys(hooks, note))()
    callback.seen = []
    return callback


def fit(model, x, y, callbacks, **options):
    return model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=callbacks, **options)


# Broadcast


@each_optimizer(*PLAIN)
def test_broadcast_comes_before_the_first_step_and_only_once(keras, make, rank, size):
    root = size - 1
    model = linear(keras, make("SGD", learning_rate=0.1 * (rank + 1)), start=rank + 1.0)
    x, y = data(rank)
    callback = hvdc.BroadcastGlobalVariablesCallback(root)
    fit(model, x, y, [callback])

    # The ranks' data differ, so this is not what a broadcast after any of the steps would leave.
    expected = np.full((2, 1), root + 1.0)
    for batch in batches(x, y):
        expected -= 0.1 * (root + 1) * gradient(expected, *batch)
    np.testing.assert_allclose(weight(model), expected, rtol=1e-5)

    model.set_weights([np.full((2, 1), rank + 1.0)])
    fit(model, x[:BATCH], y[:BATCH], [callback])
    start = np.full((2, 1), rank + 1.0)
    expected = start - 0.1 * (root + 1) * gradient(start, x[:BATCH], y[:BATCH])
    np.testing.assert_allclose(weight(model), expected, rtol=1e-5)


def state_of(optimizer):
    """The optimizer's variables, put together by another way than the callback's."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if hasattr(inner, "get_slot"):
        held = [inner.iterations, *(slot for slots in inner._slots.values() for slot in slots.values())]
    else:
        held = [inner.iterations, *inner.momentums]
    held.append(inner.learning_rate)
    if inner is not optimizer:
        scale = getattr(optimizer, "_loss_scale", None)
        held += (
            [scale.current_loss_scale, scale.counter] if scale else [optimizer.dynamic_scale, optimizer.step_counter]
        )
    return held


@each_optimizer(*WRAPPED)
def test_broadcast_covers_all_but_metrics_seeds_and_local_variables(keras, make, rank, size):
    root = size - 1
    layers = [
        keras.layers.Dense(2, name=f"first_{rank}"),  # names may differ between ranks
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.5, seed=rank),
        keras.layers.Dense(1, trainable=False),
        keras.layers.Dense(1),
        keras.layers.Dense(1),
    ]
    model = keras.Sequential([keras.Input((3,)), *layers])
    model.compile(optimizer=make("SGD", learning_rate=0.5, momentum=0.9), loss="mse", metrics=["mae"])
    model.train_on_batch(np.ones((4, 3)), np.full((4, 1), rank))  # creates whatever is created late
    metrics = [np.asarray(variable) for metric in model.metrics for variable in metric.variables]

    shared = [v for layer in layers[:-2] for v in layer.weights] + state_of(model.optimizer)
    local = [v for layer in layers[-2:] for v in layer.weights]
    assert len(shared) == 2 + 4 + 2 + len(state_of(model.optimizer))
    for number, variable in enumerate(shared + local):
        variable.assign(np.full(variable.shape, 100 * rank + number + 1, np.asarray(variable).dtype))
    seeds = [np.asarray(v) for v in getattr(layers[2], "variables", [])]

    callback = hvdc.BroadcastGlobalVariablesCallback(root, local_variables=layers[-2].weights)
    for variable in layers[-1].weights:
        callback.register_local_var(variable)
    callback.set_model(model)
    callback.on_train_begin()

    assert callback.broadcast_done
    for number, variable in enumerate(shared + local):
        owner = root if number < len(shared) else rank
        np.testing.assert_array_equal(np.asarray(variable), 100 * owner + number + 1, err_msg=str(number))
    for now, before in zip((np.asarray(v) for m in model.metrics for v in m.variables), metrics):
        np.testing.assert_array_equal(now, before)
    if version(keras) >= 3:
        assert seeds[0][0] == rank
    for now, before in zip(layers[2].variables, seeds):
        np.testing.assert_array_equal(np.asarray(now), before)


@each_keras
def test_broadcast_takes_bfloat16_and_a_model_without_optimizer(keras, rank, size):
    layer = keras.layers.Dense(3, dtype="bfloat16", bias_initializer=keras.initializers.Constant(rank + 0.5))
    model = keras.Sequential([keras.Input((2,)), layer])
    callback = hvdc.BroadcastGlobalVariablesCallback(size - 1, local_variables=layer.weights[0])
    kernel = np.asarray(layer.weights[0]).astype(np.float32)
    callback.set_model(model)
    callback.on_train_begin()
    np.testing.assert_array_equal(np.asarray(layer.weights[1]).astype(np.float32), np.full(3, size - 0.5))
    np.testing.assert_array_equal(np.asarray(layer.weights[0]).astype(np.float32), kernel)


@each_keras
@pytest.mark.parametrize("before", [None, "gradients", "local steps"])
def test_a_plain_optimizer_is_warned_of_once(keras, before, rank, recwarn):
    """Also after a model that was trained on all ranks was copied or loaded: its optimizer is plain then."""
    callback = hvdc.BroadcastGlobalVariablesCallback(0)
    model = linear(keras, keras.optimizers.SGD(0.1))
    if before is not None:
        distributed = DistributedOptimizer(
            keras.optimizers.SGD(0.1), local_steps=2 if before == "local steps" else None, compression="none"
        )
        model = linear(keras, distributed)
        fit(model, *data(rank), [callback])
        assert not alone(recwarn)
        model.compile(keras.optimizers.get({"class_name": "SGD", "config": distributed.get_config()}), "mse")
    for epochs in (2, 1):
        fit(model, *data(rank), [callback], epochs=epochs)
        assert len(alone(recwarn)) == (rank == 0)
    texts = alone(recwarn)
    assert all(text.startswith("the model's optimizer SGD is not distributed: ") for text in texts)


def alone(recwarn):
    return [str(w.message) for w in recwarn if "trains alone" in str(w.message)]


def averaging(keras, way):
    """A model with a plain optimizer that averages its gradients, or the movements of its weights, by itself."""

    class Averaging(keras.Sequential):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x) - tf.cast(y, tf.float32)) ** 2)
            if way == "tape":
                tape = hvd_compress.DistributedGradientTape(tape, compression="none")
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
            if way == "local steps":
                local()
            return {"loss": loss}

    model = Averaging([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1))
    local = hvd_compress.LocalSteps(model, local_steps=2 * STEPS) if way == "local steps" else None
    return model


@pytest.mark.parametrize("way", ["optimizer", "tape", "local steps"])
@each_keras
def test_who_averages_is_not_warned_of(keras, way, rank, recwarn):
    if way == "optimizer":
        model = linear(keras, DistributedOptimizer(keras.optimizers.SGD(0.1), compression="none"))
    else:
        model = averaging(keras, way)
    for _ in range(2):
        fit(model, *data(rank), [hvdc.BroadcastGlobalVariablesCallback(0)])
    assert not alone(recwarn)


@pytest.mark.parametrize("steps", [1, 2])
@each_keras
def test_a_model_that_is_built_late_is_broadcast_after_its_first_step(keras, steps, rank, size):
    root = size - 1
    model = linear(keras, keras.optimizers.SGD(0.1), start=rank + 1.0, shape=None)
    x, y = data(rank)
    validation = recorder(keras, lambda model, logs: weight(model), "on_test_begin")
    end = steps * BATCH
    callbacks = [hvdc.BroadcastGlobalVariablesCallback(root), validation]
    fit(model, x[:end], y[:end], callbacks, validation_data=(x, y))

    expected = np.full((2, 1), root + 1.0)
    for number, owner in enumerate([root, rank][:steps]):  # the root's first step, then one's own
        expected -= 0.1 * gradient(expected, *batches(*data(owner))[number])
    np.testing.assert_allclose(weight(model), expected, rtol=1e-5)
    np.testing.assert_allclose(validation.seen, [expected], rtol=1e-5)


@each_optimizer(*PLAIN, "scaled")
def test_a_model_restored_on_the_root_alone_goes_on_from_there_on_all(keras, make, rank, size):
    root = size - 1
    model = linear(keras, make("SGD", learning_rate=0.1, momentum=0.9), start=rank + 1.0)
    first, (x, y) = batches(*data(root))[0], data(rank)
    if rank == root:  # so only here the optimizer's velocity exists, and is not 0
        model.train_on_batch(*first)
    fit(model, x[:BATCH], y[:BATCH], [hvdc.BroadcastGlobalVariablesCallback(root)])

    velocity = -0.1 * gradient(np.full((2, 1), root + 1.0), *first)
    expected = np.full((2, 1), root + 1.0) + velocity
    expected += 0.9 * velocity - 0.1 * gradient(expected, x[:BATCH], y[:BATCH])
    np.testing.assert_allclose(weight(model), expected, rtol=1e-5)
    inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    assert int(np.asarray(inner.iterations)) == 2


@each_keras
def test_broadcast_of_different_models_is_an_error_on_all_ranks(keras, rank):
    model = linear(keras, "sgd", shape=(2 + rank,))
    with pytest.raises(ValueError, match="same shapes"):
        fit(model, np.ones((2, 2 + rank)), np.ones((2, 1)), [hvdc.BroadcastGlobalVariablesCallback(0)])


@pytest.mark.parametrize("wrong", ["kernel", [1.0], [tf.constant(1.0)]], ids=str)
def test_local_variables_must_be_variables(wrong):
    with pytest.raises(ValueError, match=r"must be of tf\.Variable"):
        hvdc.BroadcastGlobalVariablesCallback(0, local_variables=wrong)


@pytest.mark.parametrize("wrong", [-1, 1.0, "0", None])
def test_the_root_must_be_a_number(wrong):
    with pytest.raises(ValueError, match="root_rank must be a whole number from 0 on, got"):
        hvdc.BroadcastGlobalVariablesCallback(wrong)


@each_keras
def test_the_root_must_be_one_of_the_ranks(keras, size):
    model = linear(keras, "sgd")
    with pytest.raises(ValueError, match=rf"root_rank must be one of the {size} ranks, .* got {size}$"):
        fit(model, np.ones((2, 2)), np.ones((2, 1)), [hvdc.BroadcastGlobalVariablesCallback(size)])


# Metrics


@each_keras
def test_history_has_the_averages(keras, rank):
    model = linear(keras, keras.optimizers.SGD(0.1), metrics=["mae"])
    own = recorder(keras, lambda model, logs: dict(logs), "on_epoch_end")
    x, y = data(rank)
    callbacks = [own, hvdc.MetricAverageCallback()]
    history = fit(model, x, y, callbacks, epochs=2, validation_data=(x, y)).history

    everyones = hvd.allgather_object(own.seen)
    assert sorted(history) == ["loss", "mae", "val_loss", "val_mae"]
    for name, values in history.items():
        table = [[logs[name] for logs in seen] for seen in everyones]
        assert not np.allclose(table[0], table[1])
        np.testing.assert_allclose(values, np.mean(table, axis=0), rtol=1e-12)
    assert all(other == history for other in hvd.allgather_object(history))


def test_metrics_may_be_arrays_and_what_is_no_number_stays(rank, size):
    logs = {"b": rank, "a": np.arange(6).reshape(2, 3) * rank, "text": f"of {rank}", "none": None}
    logs["nan"] = math.nan if rank == 0 else 1.0
    logs["short"] = tf.constant(rank, tf.bfloat16).numpy()
    hvdc.MetricAverageCallback().on_epoch_end(0, logs)
    mean = (size - 1) / 2
    assert (logs["b"], logs["short"], logs["text"], logs["none"]) == (mean, mean, f"of {rank}", None)
    np.testing.assert_array_equal(logs["a"], np.arange(6).reshape(2, 3) * mean)
    assert math.isnan(logs["nan"])


def test_metrics_that_differ_between_ranks_are_an_error_on_all(rank):
    average = hvdc.MetricAverageCallback()
    one_name, nothing, one_shape = {"loss": 1.0, f"of_{rank}": 2.0}, {}, {"loss": np.ones(rank + 1)}
    for logs in (one_name, {"loss": 1.0} if rank == 0 else nothing, one_shape):
        with pytest.raises(ValueError, match="same names and shapes"):
            average.on_epoch_end(0, logs)
    logs = {"loss": float(rank)}  # and nothing is left behind that would spoil the next one
    average.on_epoch_end(1, logs)
    assert logs["loss"] == (hvd.size() - 1) / 2


# Learning rate


@each_optimizer(*WRAPPED)
def test_rates_follow_the_formulas(keras, make, size, rank, capsys):
    model = linear(keras, make("SGD", learning_rate=0.3))
    rates = recorder(keras, lambda model, logs: rate_of(model), "on_train_batch_end")
    callbacks = [
        hvdc.LearningRateWarmupCallback(initial_lr=0.8, warmup_epochs=2, verbose=1),
        hvdc.LearningRateScheduleCallback(0.8, multiplier=0.5, start_epoch=3, end_epoch=5),
        hvdc.LearningRateScheduleCallback(0.8, lambda epoch: 1 / epoch, start_epoch=5, staircase=False),
        rates,
    ]
    history = fit(model, *data(0), callbacks, epochs=6).history

    warmup = [0.8 / size + (0.8 - 0.8 / size) * step / (2 * STEPS) for step in range(1, 2 * STEPS + 1)]
    stairs = [0.8] * STEPS + [0.8] * STEPS + [0.4] * STEPS  # epoch 2 is nobody's, epoch 3 has exponent 0
    smooth = [0.8 / (5 + step / STEPS) for step in range(STEPS)]
    expected = warmup + stairs + smooth
    np.testing.assert_allclose(rates.seen, expected, rtol=1e-6)
    np.testing.assert_allclose(history["lr"], expected[STEPS - 1 :: STEPS], rtol=1e-6)
    said = capsys.readouterr().out.count("Epoch 2: finished gradual learning rate warmup to 0.8.")
    assert said == (1 if rank == 0 else 0)


def simulate(name, w, x, y, rates, momentum, nesterov=False, with_rate=False):
    """Weights after each step; u is the velocity without the learning rate, or with it if `with_rate`."""
    u, square, seen = np.zeros_like(w), np.zeros_like(w), []
    for (inputs, targets), rate in zip(batches(x, y, epochs=len(rates)), rates):
        step = gradient(w, inputs, targets)
        if name == "RMSprop":
            square = 0.9 * square + 0.1 * step**2
            step = step / np.sqrt(square + 1e-7)
        if with_rate:
            step, rate = rate * step, 1.0
        u = momentum * u + step
        w = w - rate * (momentum * u + step if nesterov else u)
        seen.append(w)
    return seen


FACTORS = [1.0, 0.25, 2.0, 2.0, 0.5, 4.0]


def fit_with_factors(keras, optimizer, factors, **options):
    """Weights after each step, the rate being 0.05 times each factor in turn."""
    model = linear(keras, optimizer)
    seen = recorder(keras, lambda model, logs: weight(model), "on_train_batch_end")
    schedule = hvdc.LearningRateScheduleCallback(
        0.05, lambda epoch: factors[round(epoch * STEPS)], staircase=False, **options
    )
    fit(model, *data(0), [schedule, seen], epochs=len(factors) // STEPS)
    return seen.seen


def check_correction(keras, make, name, **options):
    optimizer = make(name, learning_rate=0.02, momentum=0.9, **options)
    trained = fit_with_factors(keras, optimizer, FACTORS)
    problem = (name, np.ones((2, 1)), *data(0), 0.05 * np.array(FACTORS), 0.9, options.get("nesterov", False))
    expected, uncorrected = simulate(*problem), simulate(*problem, with_rate=True)
    assert not np.allclose(expected, uncorrected, rtol=1e-2)
    np.testing.assert_allclose(trained, expected, rtol=1e-4, atol=1e-5)


@each_optimizer(*WRAPPED, "derived")
def test_corrected_sgd_is_sgd_without_the_rate_in_its_momentum(keras, make):
    check_correction(keras, make, "SGD")


@each_optimizer(*PLAIN)
def test_corrected_nesterov_is_nesterov_without_the_rate_in_its_momentum(keras, make):
    check_correction(keras, make, "SGD", nesterov=True)


@each_optimizer(*PLAIN)
def test_corrected_rmsprop_is_rmsprop_without_the_rate_in_its_momentum(keras, make):
    check_correction(keras, make, "RMSprop", rho=0.9, epsilon=1e-7)


@each_keras
def test_momentum_correction_can_be_switched_off(keras):
    optimizer = keras.optimizers.SGD(0.02, momentum=0.9)
    trained = fit_with_factors(keras, optimizer, FACTORS, momentum_correction=False)
    expected = simulate("SGD", np.ones((2, 1)), *data(0), 0.05 * np.array(FACTORS), 0.9, with_rate=True)
    np.testing.assert_allclose(trained, expected, rtol=1e-4)


@each_keras
def test_adams_moments_have_no_rate_to_correct(keras):
    corrected, not_corrected = (
        fit_with_factors(keras, keras.optimizers.Adam(0.02), FACTORS, momentum_correction=correction)
        for correction in (True, False)
    )
    np.testing.assert_array_equal(corrected, not_corrected)


@each_optimizer(*PLAIN)
def test_momentum_starts_afresh_after_a_rate_of_zero(keras, make):
    factors = [1.0, 0.0, 0.5, 0.5, 1.0, 1.0]
    trained = fit_with_factors(keras, make("SGD", learning_rate=0.0, momentum=0.9), factors)
    x, y = data(0)
    first = simulate("SGD", np.ones((2, 1)), x, y, [0.05], 0.9)
    shifted = np.roll(x, -2 * BATCH, axis=0), np.roll(y, -2 * BATCH, axis=0)
    rest = simulate("SGD", first[0], *shifted, 0.05 * np.array(factors[2:]), 0.9)
    np.testing.assert_allclose(trained, [first[0], first[0], *rest], rtol=1e-4)


@each_optimizer(*WRAPPED)
def test_a_rate_that_cannot_be_set_is_named(keras, make):
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
    model = linear(keras, make("SGD", learning_rate=schedule))
    with pytest.raises(ValueError, match=r"learning rate of .* ExponentialDecay"):
        fit(model, *data(0), [hvdc.LearningRateScheduleCallback(0.1, 0.5)])


@each_keras
def test_steps_that_keras_does_not_know_must_be_given(keras, size):
    def stream():
        x, y = data(0)
        yield from batches(x, y)

    specs = (tf.TensorSpec((BATCH, 2)), tf.TensorSpec((BATCH, 1)))
    dataset = tf.data.Dataset.from_generator(stream, output_signature=specs)
    model = linear(keras, "sgd")
    with pytest.raises(ValueError, match=r"steps_per_epoch parameter to the LearningRateWarmupCallback"):
        model.fit(dataset, verbose=0, callbacks=[hvdc.LearningRateWarmupCallback(0.1)])
    warmup = hvdc.LearningRateWarmupCallback(0.1, warmup_epochs=1, steps_per_epoch=2 * STEPS)
    rates = recorder(keras, lambda model, logs: rate_of(model), "on_train_batch_end")
    model.fit(dataset, verbose=0, callbacks=[warmup, rates])
    assert rates.seen[STEPS - 1] == pytest.approx(0.1 / size * (0.5 * (size - 1) + 1))


def test_initial_lr_is_required():
    with pytest.raises(ValueError, match="initial_lr"):
        hvdc.LearningRateScheduleCallback(None, 0.5)
