"""CompressionGuard: all ranks compress less in the same step while training is in trouble, and never otherwise."""

import horovod.tensorflow as hvd
import introspect
import keras as default_keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_compress as hvdc
from hvd_compress.compressors import Compressor
from hvd_compress.engine import guarding
from hvd_compress.engine.guard import Guard
from hvd_compress.tools import doctor, run_log

KERASES = [default_keras]
try:
    import tf_keras
except ImportError:
    pass
else:
    KERASES.append(tf_keras)
each_keras = pytest.mark.parametrize("keras", KERASES, ids=[f"keras{keras.__version__[0]}" for keras in KERASES])


class Explosive(Compressor):
    """No contraction: sends three times every second value, so that the residual of these doubles in each step."""

    def compress(self, tensor):
        return 3.0 * tensor[::2], tensor.shape

    def decompress(self, payload, ctx):
        return tf.reshape(tf.stack([payload, tf.zeros_like(payload)], 1), [-1])[: ctx[0]]


def fit(keras, rank, compression, callbacks=(), epochs=3, learning_rate=1.0):
    """Trains a linear model on data of its own; the losses of the epochs, and the weights."""
    teacher = np.random.default_rng(7).standard_normal([40, 30])
    own = np.random.default_rng([rank, 1])
    x = own.standard_normal([640, 40]).astype(np.float32)
    y = (x @ teacher + 0.1 * own.standard_normal([640, 30])).astype(np.float32)
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.layers.Input([40]), keras.layers.Dense(30, use_bias=False)])
    optimizer = hvdc.DistributedOptimizer(keras.optimizers.SGD(learning_rate), compression=compression)
    model.compile(optimizer, "mse", jit_compile=False)
    first = hvdc.callbacks.BroadcastGlobalVariablesCallback(0)
    history = model.fit(x, y, 16, epochs, verbose=0, shuffle=False, callbacks=[first, *callbacks])
    return history.history["loss"], model.get_weights()[0]


def guarded(keras, rank, compression, guard, *callbacks, **how):
    """As `fit` with a guard; also the level after each batch."""
    levels = []
    watch = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: levels.append(guard.level))
    return (*fit(keras, rank, compression, [guard, *callbacks, watch], **how), levels)


@each_keras
def test_residuals_that_grow_without_bound(keras, rank, gather, capfd, tmp_path):
    """The guard acts on both ranks in the same step, training recovers, and the monitor knows of it."""
    guard = hvdc.callbacks.CompressionGuard(["topk:ratio=0.5", "none"], every=4, calm=88)
    monitor = hvdc.callbacks.CompressionMonitor(tmp_path)
    losses, weights, levels = guarded(keras, rank, Explosive(), guard, monitor)
    assert (gather(levels) == levels).all() and (gather(weights) == weights).all()
    # It blows up within eight batches; after 88 batches it is tried again, and blows up again.
    assert levels == [0] * 7 + [1] * 88 + [0] * 8 + [1] * 17
    assert losses[1] < 0.1 * losses[0]
    lines = [line for line in capfd.readouterr().err.splitlines() if "CompressionGuard" in line]
    if rank:
        assert not lines
        return
    assert len(lines) == 3 and "the residual grows without bound" in lines[0]
    assert "topk:ratio=0.5 in place of Explosive" in lines[0] and "as configured in place of topk" in lines[1]
    run = run_log.load(str(tmp_path))
    assert run.guard["compressor"].tolist() == ["topk:ratio=0.5", guarding.AS_CONFIGURED, "topk:ratio=0.5"]
    assert run.guard["step"].tolist() == [8, 96, 104]
    (used,) = (columns["compressor"].tolist() for columns in run.first.buckets.values())
    assert used == ["Explosive"] * 8 + ["topk:ratio=0.5"] * 88 + ["Explosive"] * 8 + ["topk:ratio=0.5"] * 16
    (finding,) = [found for found in doctor.examine(run) if found.problem == "the guard acted"]
    assert "3 changes" in finding.figures


def test_a_learning_rate_at_which_only_compressed_training_diverges(rank, gather):
    guard = hvdc.callbacks.CompressionGuard(every=2, calm=1000)
    losses, weights, levels = guarded(default_keras, rank, "topk:ratio=0.02", guard, learning_rate=5.0)
    assert (gather(levels) == levels).all() and (gather(weights) == weights).all()
    assert 0 < levels.index(1) < 60 and levels[-1] == 1 and sorted(levels) == levels
    assert losses[-1] < 0.1 * losses[0]


def test_the_way_back_at_the_end_of_training(rank, gather):
    """A `fit` without the guard compresses as configured; one with the guard goes on where it was."""
    teacher = np.random.default_rng(7).standard_normal([40, 30])
    x = np.random.default_rng([rank, 1]).standard_normal([64, 40]).astype(np.float32)
    model = default_keras.Sequential([default_keras.layers.Input([40]), default_keras.layers.Dense(30, use_bias=False)])
    optimizer = hvdc.DistributedOptimizer(default_keras.optimizers.SGD(1.0), compression=Explosive())
    model.compile(optimizer, "mse", jit_compile=False)
    guard = hvdc.callbacks.CompressionGuard(["topk:ratio=0.5"], every=4, calm=1000)
    first, used = hvdc.callbacks.BroadcastGlobalVariablesCallback(0), []

    def train(epochs, *callbacks):
        specs = []
        watch = default_keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: specs.append(spec_of(optimizer))
        )
        model.fit(x, (x @ teacher).astype(np.float32), 4, epochs, verbose=0, callbacks=[first, *callbacks, watch])
        used.append(specs[-1])

    train(1, guard)
    assert guard.level == 1 and spec_of(optimizer) == Explosive().spec
    model.set_weights([np.zeros([40, 30], np.float32)])
    train(1)
    train(1, guard)
    assert used == ["topk:ratio=0.5", Explosive().spec, "topk:ratio=0.5"]
    weights = model.get_weights()[0]
    assert (gather(weights) == weights).all()


def spec_of(optimizer):
    return introspect.plan_of(optimizer).compressors()[0].spec


def test_a_new_plan_keeps_the_residual_of_a_checkpoint(rank):
    """As after an elastic reset, when a guard has acted before."""
    variable = tf.Variable(tf.zeros(SHAPES[0]))
    reducer = introspect.new_reducer("topk:ratio=0.1", min_compress_size=0)
    reducer.guard = Guard((hvdc.Compression.parse("topk:ratio=0.25"),), level=1)
    gradient, _, _ = gradients(rank, 0)
    reducer([gradient], [variable])
    norm, states = guarding.residual_norm(introspect.plan_of(reducer)), introspect.states_of_reducer(reducer)
    assert norm > 0.0
    reducer.replan(states)
    reducer([tf.zeros_like(gradient)], [variable])
    left = np.sort(np.abs(gradient.numpy().ravel()))[: gradient.shape.num_elements() // 2]  # after two steps
    np.testing.assert_allclose(guarding.residual_norm(introspect.plan_of(reducer)), np.linalg.norm(left), rtol=1e-5)


def test_a_healthy_run_is_left_as_it_is(rank):
    guard = hvdc.callbacks.CompressionGuard(every=2, monitor="loss")
    plain = fit(default_keras, rank, "topk:ratio=0.02", epochs=2)
    losses, weights, levels = guarded(default_keras, rank, "topk:ratio=0.02", guard, epochs=2)
    assert set(levels) == {0} and losses[1] < losses[0]
    assert losses == plain[0]
    np.testing.assert_array_equal(weights, plain[1])


SHAPES = [(60, 40), (40, 30), (70, 50)]


def gradients(rank, step):
    """Two dense gradients, and some rows of an embedding."""
    rng = np.random.default_rng([rank, step])
    first, second, rows = (rng.standard_normal(shape).astype(np.float32) for shape in [*SHAPES[:2], (8, SHAPES[2][1])])
    slices = tf.IndexedSlices(tf.constant(rows), tf.constant(rng.integers(0, SHAPES[2][0], 8)), tf.constant(SHAPES[2]))
    return [tf.constant(first), tf.constant(second), slices]


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param("powersgd:rank=1", marks=pytest.mark.slow),
        "schedule:(0=onebit|2=int4)",
        pytest.param("auto:candidates=(none|int4)", marks=pytest.mark.slow),
    ],
)
def test_without_compression_gradients_are_exact_and_the_way_back_begins_with_no_residual(
    spec, rank, size, fixed_costs
):
    variables = [tf.Variable(tf.zeros(shape)) for shape in SHAPES]
    reducer = introspect.new_reducer(spec, min_compress_size=0)

    def reduced(step):
        return [tf.convert_to_tensor(g).numpy() for g in reducer(gradients(rank, step), variables)]

    def exact(step):
        each = [[tf.convert_to_tensor(g).numpy() for g in gradients(r, step)] for r in range(size)]
        return [np.mean(of_ranks, 0) for of_ranks in zip(*each)]

    first = [reduced(step) for step in range(3)]
    plan = introspect.plan_of(reducer)
    reducer.guard = Guard((hvdc.Compression.none,))
    guarding.attach(plan, reducer.guard)
    before = [c.spec for c in plan.compressors()]
    assert guarding.next_level(reducer, 0) == 1
    guarding.change_level(reducer, 1, "a test")
    assert {c.spec for c in plan.compressors()} == {"none"}
    for step in range(3, 5):
        for got, expected in zip(reduced(step), exact(step)):
            np.testing.assert_allclose(got, expected, atol=1e-5)
    assert guarding.residual_norm(plan) == 0.0
    guarding.change_level(reducer, 0, "a test")
    assert [c.spec for c in plan.compressors()] == before
    again = [reduced(step) for step in range(5, 7)]
    for got in (*first, *again):
        assert all(np.isfinite(tensor).all() for tensor in got)
    assert hvd.allgather_object([t.sum() for t in again[-1]])[0] == [t.sum() for t in again[-1]]
