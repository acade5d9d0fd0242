"""`hvdc.elastic.KerasState` on ranks that stay: going back to a commit, copies, and what is done with them."""

import functools

import horovod.tensorflow as hvd
import introspect
import numpy as np
import pytest
from marks import slow
from tensorflow import keras

import hvd_compress as hvdc
from hvd_compress.frontends.keras import optimizer_state

KERASES = {"keras": keras}
try:
    import tf_keras

    KERASES["tf_keras"] = tf_keras
except ImportError:  # TF 2.15: tf.keras is Keras 2
    pass
CONFIGURATIONS = {
    "int8": {"compression": "int8"},
    "momentum": {"compression": "topk:ratio=0.05", "momentum_correction": 0.9},
    "passes": {"compression": "int4", "backward_passes_per_step": 2},
}


JOBS = [("keras", "int8"), ("keras", "passes"), ("tf_keras", "momentum")]


@pytest.fixture(params=JOBS)
def make(request):
    """Makes a model that is trained with residuals, its optimizer and its state."""
    return functools.partial(make_job, *request.param)


@pytest.fixture
def job(make):
    return make(seed=3)


@pytest.fixture
def shared(tmp_path):
    """One directory for all ranks: that of rank 0."""
    return hvd.broadcast_object(str(tmp_path / "residuals"), 0)


def make_job(package, options, seed):
    package = KERASES.get(package, keras)
    package.utils.set_random_seed(seed)
    layers = [package.layers.Input([48]), package.layers.Dense(40), package.layers.Dense(30)]
    model = package.Sequential(layers)
    optimizer = hvdc.DistributedOptimizer(package.optimizers.Adam(0.01), **CONFIGURATIONS[options])
    model.compile(optimizer, "mse", jit_compile=False)
    return model, optimizer, hvdc.elastic.KerasState(model, epoch=0)


def fit(model, rank, steps, seed=0):
    random = np.random.default_rng([seed, rank])
    x, y = (random.normal(size=[4 * steps, n]).astype(np.float32) for n in (48, 30))
    model.fit(x, y, batch_size=4, verbose=0, shuffle=False)


def held(optimizer):
    """What this rank keeps: arrays in a fixed order."""
    states = introspect.saved_states(optimizer, aggregation=True)
    return [np.asarray(t) for state in states for held in state.tensors.values() for t in held.values()]


def everything(model, optimizer):
    return [np.array(a) for a in [*model.get_weights(), *held(optimizer)]]


def total(optimizer, gather):
    return [gather(tensor).sum(axis=0) for tensor in held(optimizer)]


def test_back_to_the_commit(job, rank, size, gather):
    model, optimizer, state = job
    state.sync()
    fit(model, rank, 5)
    state.epoch = 1
    state.commit()
    committed = everything(model, optimizer)
    assert any(tensor.any() for tensor in held(optimizer))
    # The rank before is copied.
    copies = [t for copy in state._commits[-1].copies for f in copy.tensors.values() for t in f.values()]
    assert copies
    for own, copy in zip(held(optimizer), copies):
        np.testing.assert_array_equal(copy, gather(own)[(rank - 1) % size])
    fit(model, rank, 3, seed=1)
    after = everything(model, optimizer)
    state.epoch = 2
    state.restore()
    assert state.epoch == 1
    for now, then in zip(everything(model, optimizer), committed):
        np.testing.assert_array_equal(now, then)
    fit(model, rank, 3, seed=1)  # the same steps again
    for now, then in zip(everything(model, optimizer), after):
        np.testing.assert_array_equal(now, then)


def test_back_to_a_commit_before_the_first_step(job, rank):
    model, optimizer, state = job
    state.sync()
    weights = model.get_weights()
    fit(model, rank, 5)
    state.restore()
    for now, then in zip(model.get_weights(), weights):
        np.testing.assert_array_equal(now, then)
    assert not any(tensor.any() for tensor in held(optimizer))


@pytest.mark.parametrize(
    "make, copied",
    # Whether there are copies does not depend on what is in them.
    [(JOBS[0], True), *slow(*((make, True) for make in JOBS[1:]), (JOBS[0], False))],
    indirect=["make"],
)
def test_residuals_of_a_rank_that_is_gone(job, rank, gather, copied):
    # Two ranks that were 0 and 2 of three: rank 2 has copies of rank 1's, here those that it got from rank 0.
    model, optimizer, state = job
    state.copy_residuals = copied
    state.sync()
    fit(model, rank, 5)
    state.commit()
    before = total(optimizer, gather)
    of_rank_0 = [gather(tensor)[0] for tensor in held(optimizer)]
    state._commits[-1].rank, state._commits[-1].ranks = 2 * rank, 3
    state.reset()
    if copied or rank == 1:
        state.sync()
    else:
        with pytest.warns(UserWarning, match="the residuals of rank 1 of 3 are lost: there are no copies of them"):
            state.sync()
    for then, now, copy in zip(before, total(optimizer, gather), of_rank_0):
        np.testing.assert_allclose(now, then + copied * copy, rtol=1e-6, atol=1e-6)
    fit(model, rank, 2)  # a new plan takes them over
    weights = np.concatenate([w.ravel() for w in model.get_weights()])
    np.testing.assert_array_equal(*gather(weights))


def test_a_rank_that_joins(make, job, rank, gather):
    # Rank 1 begins anew, with other weights and after having made other optimizers.
    model, optimizer, state = job
    state.sync()
    fit(model, rank, 5)
    state.epoch = 4
    state.commit()
    before, steps = total(optimizer, gather), int(optimizer.iterations)
    of_rank_1 = [gather(tensor)[1] for tensor in held(optimizer)]
    if rank == 1:
        introspect.set_reducers_made(introspect.reducers_made() + 5)
        model, optimizer, state = make(seed=4)
    else:
        state.reset()
        state._commits[-1].ranks = 1  # alone before: nobody is gone
    state.sync()
    assert (state.epoch, int(optimizer.iterations)) == (4, steps)
    for then, now, gone in zip(before, total(optimizer, gather), of_rank_1):
        np.testing.assert_allclose(now, then - gone, rtol=1e-6, atol=1e-6)
    fit(model, rank, 4)
    np.testing.assert_array_equal(*gather(np.concatenate([w.ravel() for w in model.get_weights()])))
    made = introspect.reducers_made()
    assert made == int(gather(np.asarray(made))[0])


def test_a_rank_joins_one_that_was_alone(make, rank, shared):
    # A single rank makes no plan. When another one joins, an old save is not what training continues from.
    model, optimizer, _ = make(seed=3)
    fit(model, rank, 2)
    hvdc.save_residuals(optimizer, shared)
    model, optimizer, state = make(seed=3)
    state.sync()
    if rank == 0:
        optimizer.iterations.assign(7)
    state.commit()
    if rank == 1:
        model, optimizer, state = make(seed=4)
    else:
        state.reset()
        state._commits[-1].ranks = 1
    state.sync()
    assert int(optimizer.iterations) == 7
    callback = hvdc.callbacks.ResidualCheckpoint(shared)
    callback.set_model(model)
    callback.on_train_begin()
    fit(model, rank, 2)


ALGORITHMS = {
    "dgc": lambda: hvdc.DistributedOptimizer(keras.optimizers.SGD(0.01), compression="dgc:ratio=0.02,clipnorm=1"),
    "schedule": lambda: hvdc.DistributedOptimizer(keras.optimizers.SGD(0.01), compression="schedule:(0=int8|40%=int4)"),
    "powersgd": lambda: hvdc.DistributedOptimizer(keras.optimizers.SGD(0.01), compression="powersgd:rank=2"),
    "delay": lambda: hvdc.DistributedOptimizer(keras.optimizers.SGD(0.01), compression="int4", delay=1),
    "rows": lambda: hvdc.DistributedOptimizer(keras.optimizers.SGD(0.01), compression="int8"),
    "frozen": lambda: hvdc.optimizers.OneBitAdam(0.01, freeze_step=3),
    "to be frozen": lambda: hvdc.optimizers.OneBitAdam(0.01, freeze_step=STEPS + 2),
}
STEPS, EPOCHS = 5, 4  # per epoch; of training, in which this is one of the first


def alike(model, optimizer):
    """What must be the same on all ranks."""
    variables = map(optimizer_state.tf_variable, optimizer_state.optimizer_variables(optimizer))
    states = introspect.saved_states(optimizer)
    named = [state.replicated_state[name] for state in states for name in sorted(state.replicated_state)]
    return [*model.get_weights(), *(variable.numpy() for variable in variables), *named]


@pytest.mark.parametrize("name", ["powersgd", "rows", *slow("delay", "dgc", "schedule", "frozen", "to be frozen")])
def test_a_rank_is_killed_and_another_joins(name, rank, gather):
    if name.endswith("frozen") and not hasattr(keras.optimizers.Optimizer, "stateless_apply"):
        pytest.skip("a Keras 3 optimizer")

    def begin(seed):
        keras.utils.set_random_seed(seed)
        layers = [keras.layers.Input([48]), keras.layers.Dense(40, "relu"), keras.layers.Dense(30)]
        if name == "rows":
            layers[:2] = [keras.layers.Input([4]), keras.layers.Embedding(90, 20), keras.layers.Flatten()]
        model, optimizer = keras.Sequential(layers), ALGORITHMS[name]()
        model.compile(optimizer, "mse", jit_compile=False)
        return model, optimizer, hvdc.elastic.KerasState(model, epoch=0, batch=0)

    def epoch(seed):
        random = np.random.default_rng([seed, rank])
        x, y = (random.normal(size=[4 * STEPS, n]).astype(np.float32) for n in (48, 30))
        if name == "rows":  # always as many different ones: each number would be compiled anew
            x = np.concatenate([random.permutation(45)[:16] + 45 * rank for _ in range(STEPS)]).reshape(-1, 4)
        callbacks = [
            hvdc.elastic.UpdateEpochStateCallback(state),
            hvdc.elastic.CommitStateCallback(state, 10**6),  # at the end of the epoch
            keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: setattr(model, "stop_training", True)),
        ]
        epochs = EPOCHS - state.epoch
        model.fit(x, y, batch_size=4, epochs=epochs, verbose=0, shuffle=False, callbacks=callbacks)

    model, optimizer, state = begin(seed=rank)
    state.sync()
    epoch(0)
    before, common = total(optimizer, gather), alike(model, optimizer)
    own = [tensor.copy() for tensor in held(optimizer)]
    assert any(tensor.any() for tensor in own) == (name != "to be frozen")
    state.commit = lambda: None  # what follows never is
    epoch(1)
    del state.commit
    state.restore()
    for now, then in zip([*alike(model, optimizer), *held(optimizer)], [*common, *own]):
        np.testing.assert_array_equal(now, then)

    if rank == 1:  # killed, and another one takes its place; rank 0 has the copy of what it kept
        model, optimizer, state = begin(seed=2)
    else:
        state.reset()
    state.sync()
    assert state.epoch == 1
    for now, then in zip(alike(model, optimizer), common):
        np.testing.assert_array_equal(now, then)
    for now, then in zip(total(optimizer, gather), before):
        np.testing.assert_allclose(now, then, rtol=1e-6, atol=1e-6)
    if rank == 1:
        assert not any(tensor.any() for tensor in held(optimizer))
    epoch(2)
    for everyone in map(gather, alike(model, optimizer)):
        np.testing.assert_array_equal(*everyone)
    assert int(optimizer.iterations) == 2 * STEPS
    plan = introspect.plans_of(optimizer)[-1]
    assert introspect.steps_made(plan) == 2 * STEPS
    if name == "dgc":
        assert introspect.progress(plan) == 2.0
    elif name == "schedule":
        assert introspect.progress(plan) == pytest.approx(2 / EPOCHS)
        assert {bucket.chosen for bucket in optimizer.compression_report().buckets} == {"int4"}
    elif name.endswith("frozen"):
        assert optimizer.frozen_at == optimizer.freeze_step


@pytest.mark.parametrize("make", [JOBS[1]], indirect=True)
def test_a_commit_that_not_all_have(job, rank, gather):
    # Rank 0 has finished a commit, rank 1 has not: all go back to the one before.
    model, optimizer, state = job
    state.sync()
    fit(model, rank, 3)
    state.commit()
    before, weights = total(optimizer, gather), model.get_weights()
    fit(model, rank, 3, seed=1)
    state.save()
    if rank == 1:
        state._commits = state._commits[:1]
    state.restore()
    state.reset()
    state.sync()
    for now, then in zip(model.get_weights(), weights):
        np.testing.assert_array_equal(now, then)
    for then, now in zip(before, total(optimizer, gather)):
        np.testing.assert_allclose(now, then, rtol=1e-6, atol=1e-6)


def test_process_sets_do_not_outlive_a_reset(process_sets, rank):
    model = keras.Sequential([keras.layers.Input([4]), keras.layers.Dense(1)])
    model.compile(hvdc.DistributedOptimizer(keras.optimizers.SGD(), process_set=process_sets[rank % 2]), "mse")
    with pytest.raises(ValueError, match="process set must be the global one"):
        hvdc.elastic.KerasState(model)
    assert hvd.size() > 1
