"""Models with embeddings and dense layers, whose ranks see other words."""

import functools

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
pytestmark = pytest.mark.usefixtures("fixed_costs")
WORDS, LENGTH, BATCH, STEPS = 400, 6, 8, 5


def make_model(keras, optimizer=None):
    keras.utils.set_random_seed(7)
    model = keras.Sequential(
        [
            keras.Input((LENGTH,), dtype="int32"), keras.layers.Embedding(WORDS, 16, name="words"),
            keras.layers.Flatten(), keras.layers.Dense(32, activation="relu"), keras.layers.Dense(2),
        ]
    )  # fmt: skip
    model.compile(optimizer=optimizer, loss="mse", jit_compile=False)
    return model


def distributed(keras, **options):
    optimizer = keras.optimizers.SGD(0.2, momentum=0.5)
    return make_model(keras, hvdc.DistributedOptimizer(optimizer, min_compress_size=64, **options))


def data(rank):
    """Words of a rank: frequent ones on all, and within a batch more than once."""
    rng = np.random.default_rng(rank)
    words = np.minimum(rng.zipf(1.4, (BATCH * STEPS, LENGTH)) - 1, WORDS - 1)
    y = np.stack([words.mean(1) / 50.0, np.sin(words[:, 0])], 1)
    return words.astype(np.int32), y.astype(np.float32)


def fit(model, rank, epochs, start=0, callbacks=()):
    options = {"batch_size": BATCH, "verbose": 0, "shuffle": False, "callbacks": list(callbacks)}
    return model.fit(*data(rank), epochs=epochs, initial_epoch=start, **options).history["loss"]


def variables_of(optimizer):
    return optimizer.variables() if callable(optimizer.variables) else optimizer.variables


def plan_of(model):
    return introspect.plan_of(model.optimizer)


def flat(arrays):
    return np.concatenate([np.ravel(a) for a in arrays])


@pytest.fixture(scope="module")
def learnt(rank):
    """Trains a model once for all tests; returns it and its losses."""

    @functools.cache
    def train(spec, name="keras"):
        model = distributed(KERASES[name], compression=spec)
        return model, fit(model, rank, 4)

    return train


@pytest.mark.parametrize(
    "spec, name",
    # What a Keras makes of an embedding's gradient does not depend on the compressor.
    [
        ("int8", "keras"),
        *slow(("none", "keras"), ("hybrid:ratio=0.1,bits=4", "keras")),
        *slow(*(("int8", name) for name in KERASES if name != "keras")),
    ],
)
def test_ranks_stay_the_same_to_the_bit(spec, name, rank, gather, learnt):
    model, losses = learnt(spec, name)
    everyone = gather(flat(model.get_weights()))
    assert (everyone == everyone[0]).all()
    assert losses[-1] < 0.7 * losses[0]
    plan = plan_of(model)
    assert [path.split("/")[-2] for path in introspect.row_paths(plan)] == ["words"]
    assert bool(introspect.row_residual_variables(plan)) == (spec != "none")
    assert model.optimizer.bytes_sent()[0] > 0


def test_uncompressed_is_one_process_with_all_batches(rank, size):
    """The mean over ranks of the gradients of their batches is the gradient of all batches together."""
    model = distributed(tf_dot_keras, compression="none")
    fit(model, rank, 2)
    alone = make_model(tf_dot_keras, tf_dot_keras.optimizers.SGD(0.2, momentum=0.5))
    for _ in range(2):
        for step in range(STEPS):
            part = slice(step * BATCH, (step + 1) * BATCH)
            x, y = (np.concatenate([data(r)[k][part] for r in range(size)]) for k in range(2))
            alone.train_on_batch(x, y)
    for ours, theirs in zip(model.get_weights(), alone.get_weights()):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.slow
def test_quantized_rows_learn_as_uncompressed_ones(learnt):
    found = {spec: learnt(spec)[1][-1] for spec in ("none", "int8")}
    assert abs(found["int8"] / found["none"] - 1.0) < 0.05


def test_a_tape_reduces_rows(rank, size, gather):
    table, kernel = tf.Variable(tf.ones([50, 8])), tf.Variable(tf.ones([8, 3]))
    words, seen = data(rank)[0][:4] % 50, []

    @tf.function
    def step(words):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, words) @ kernel)
        tape = hvdc.DistributedGradientTape(tape, compression="int8", min_compress_size=0)
        rows, dense = tape.gradient(loss, [table, kernel])
        return tf.convert_to_tensor(rows), dense, rows.values

    rows, dense, values = step(words)
    everyone = gather(np.concatenate([rows.numpy().ravel(), dense.numpy().ravel()]))
    assert (everyone == everyone[0]).all()
    expected = np.zeros([50, 8])
    for r in range(size):
        np.add.at(expected, (data(r)[0][:4] % 50).ravel(), 3.0 / size)
        seen += (data(r)[0][:4] % 50).ravel().tolist()
    np.testing.assert_allclose(rows, expected, rtol=1e-5)
    assert len(values) == len(set(seen))


def test_sparse_as_dense_has_no_rows(rank, gather):
    model = distributed(tf_dot_keras, compression="int8", sparse_as_dense=True)
    fit(model, rank, 1)
    assert not introspect.row_paths(plan_of(model))
    everyone = gather(flat(model.get_weights()))
    assert (everyone == everyone[0]).all()


def test_policy_and_auto(rank, gather):
    model = distributed(tf_dot_keras, compression="auto:candidates=(none|int8)", policy={"*words*": "int4"})
    fit(model, rank, 2)
    everyone = gather(flat(model.get_weights()))
    assert (everyone == everyone[0]).all()
    report = model.optimizer.compression_report()
    assert report.buckets[-1].rows_of == introspect.paths(plan_of(model))[0]
    assert report.buckets[-1].chosen == "int4"
    assert f"rows of {introspect.paths(plan_of(model))[0]} (0.0 MB): int4" in str(report)


def test_rows_are_watched(rank, size):
    model = distributed(tf_dot_keras, compression="int8")
    introspect.watch(model.optimizer)
    fit(model, rank, 1)
    plan = plan_of(model)
    steps = introspect.recorded_steps(plan)
    names = [bucket.name for bucket in introspect.recorded_buckets(plan)]
    at = names.index("sparse-0")
    assert len(steps) == STEPS
    assert steps.buckets.bytes[-1, at] == introspect.row_bytes_sent(plan, 0) > 0
    assert (steps.buckets.uncompressed_bytes[:, at] == BATCH * LENGTH * (16 * 4 + 8) * (size - 1)).all()
    assert ((steps.buckets.error[:, at] > 0) & (steps.buckets.error[:, at] < 0.02)).all()
    owed = np.linalg.norm(introspect.row_residual_variables(plan)[0].numpy())
    np.testing.assert_allclose(steps.buckets.residual_norm[-1, at], owed, rtol=1e-5)
    assert (steps.buckets.gradient_norm[:, at] > 0).all()


RESUMED = [
    {"compression": "int8"},
    {"compression": "topk:ratio=0.1", "momentum_correction": 0.9},  # whose rows are not compressed
    {"compression": "fp16", "policy": {"*words*": "int4"}},  # residuals of rows only
]


@pytest.mark.parametrize(
    "options", [RESUMED[0], *(pytest.param(o, marks=pytest.mark.slow) for o in RESUMED[1:])], ids=str
)
def test_a_resumed_run_continues_bit_identically(options, rank, tmp_path):
    shared = hvd.broadcast_object(str(tmp_path), 0)
    first = distributed(tf_dot_keras, **options)
    fit(first, rank, 1, callbacks=[hvdc.callbacks.ResidualCheckpoint(shared)])
    second = distributed(tf_dot_keras, **options)
    second.set_weights(first.get_weights())
    second.optimizer.build(second.trainable_variables)
    for variable, old in zip(variables_of(second.optimizer), variables_of(first.optimizer)):
        variable.assign(np.asarray(old))
    fit(second, rank, 2, 1, [hvdc.callbacks.ResidualCheckpoint(shared)])
    fit(first, rank, 2, 1)
    for ours, theirs in zip(second.get_weights(), first.get_weights()):
        np.testing.assert_array_equal(ours, theirs)
    for a, b in zip(*(introspect.row_residual_variables(plan_of(model)) for model in (second, first))):
        assert np.abs(b.numpy()).max() > 0
        np.testing.assert_array_equal(a.numpy(), b.numpy())
