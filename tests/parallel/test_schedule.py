"""schedule: several compressors one after the other, against NumPy, step by step; different gradients on each rank."""

import math

import horovod.tensorflow as hvd
import introspect
import numpy as np
import pytest
import tensorflow as tf
from marks import slow
from reducer_training import ReducerTraining
from tensorflow import keras as tf_dot_keras

import hvd_compress as hvdc

KERASES = {"keras": tf_dot_keras}
try:
    import tf_keras

    KERASES["tf_keras"] = tf_keras
except ImportError:  # TF 2.15: tf.keras is Keras 2
    pass

schedule = hvdc.Compression.schedule
SHAPES = [(40, 50), (50,), (30, 40)]  # the second one is not compressed


@pytest.fixture
def shared(tmp_path):
    """A directory that all ranks see."""
    return hvd.broadcast_object(str(tmp_path), 0)


class Rounded(hvdc.Compressor):
    """A user's compressor: whole multiples of a step."""

    def __init__(self, step):
        self.step = step

    def compress(self, tensor):
        return tf.cast(tf.round(tensor / self.step), tf.int16), None

    def decompress(self, payload, ctx):
        return tf.cast(payload, tf.float32) * self.step


def draw(rank, step):
    rng = np.random.default_rng([rank, step])
    return [rng.standard_normal(shape).astype(np.float32) for shape in SHAPES]


def top(x, ratio):
    keep = np.argsort(-np.abs(x), kind="stable")[: math.ceil(ratio * x.size)]
    sent = np.zeros_like(x)
    sent[keep] = x[keep]
    return sent


# What NumPy sends in each stage: a user's compressor, a sparse one, one without error feedback, and the first again.
PHASES = {0: Rounded(0.5), 3: "topk:ratio=0.1", 6: "none", 7: Rounded(2.0), 9: "topk:ratio=0.1"}
SENT = [
    *[lambda x: np.round(x / 0.5) * 0.5] * 3,
    *[lambda x: top(x, 0.1)] * 3,
    lambda x: x,
    *[lambda x: np.round(x / 2.0) * 2.0] * 2,
    *[lambda x: top(x, 0.1)] * 2,
]


def flat(gradients):
    return np.concatenate([gradients[0].ravel(), gradients[2].ravel()]).astype(np.float64)


def simulate(ranks):
    """For each step, the mean of what the ranks send, and the residual of each rank."""
    residuals, history = [np.zeros(40 * 50 + 30 * 40) for _ in range(ranks)], []
    for step, sent_of in enumerate(SENT):
        sums = [flat(draw(r, step)) + residuals[r] for r in range(ranks)]
        sent = [sent_of(x) for x in sums]
        residuals = [x - s for x, s in zip(sums, sent)]
        history.append((sum(sent) / ranks, residuals))
    return history


def follows_the_simulation(training, history, rank, size, told):
    for step, (mean, residuals) in enumerate(history):
        if step:
            told(step)
        reduced = training.step()
        np.testing.assert_allclose(flat(reduced), mean, atol=1e-5)
        np.testing.assert_allclose(flat(training.residuals()), residuals[rank], atol=1e-5)
        np.testing.assert_allclose(reduced[1], sum(draw(r, step)[1] for r in range(size)) / size, atol=1e-6)


def test_residuals_stay_through_all_stages_against_numpy(rank, size):
    training, history = ReducerTraining(rank, draw, schedule(PHASES)), simulate(size)
    chosen, sent = [], []

    def told(step):
        (bucket,) = training.reducer.report().buckets
        chosen.append(bucket.chosen)
        sent.append(training.reducer.bytes_sent()[0])

    follows_the_simulation(training, history, rank, size, told)
    assert training.traces == 1
    # What is sent after the last residual of `none` is all of the gradients so far, and a residual is left before.
    assert np.abs(history[5][1]).max() > 1.0 and np.abs(history[6][1]).max() == 0.0
    # The compressor of the next step.
    expected = ["Rounded"] * 2 + ["topk:ratio=0.1"] * 3 + ["none"] + ["Rounded"] * 2 + ["topk:ratio=0.1"] * 2
    assert chosen == expected
    small = 4 * 50  # the bytes of the uncompressed gradient, as in a ring of two
    elements = 40 * 50 + 30 * 40
    of = {
        "Rounded": 2 * elements,
        "none": 4 * elements,
        "topk:ratio=0.1": hvdc.Compression.topk(0.1).wire_bytes(elements),
    }
    assert sent == pytest.approx([of[spec] + small for spec in expected], rel=0.02)


def test_the_share_of_so_many_steps_is_the_same(rank, size):
    shares = {100 * step / len(SENT): compressor for step, compressor in PHASES.items()}
    shares = {f"{share}%" if share else 0: compressor for share, compressor in shares.items()}
    training = ReducerTraining(rank, draw, schedule(shares, steps=len(SENT)))
    follows_the_simulation(training, simulate(size), rank, size, lambda step: None)
    assert introspect.progress(training.plan) == pytest.approx(1.0)


def test_a_tape_with_a_new_object_in_each_step(rank, size):
    weights = [tf.Variable(np.zeros(shape, np.float32)) for shape in SHAPES]
    for step, (mean, _) in enumerate(simulate(size)):
        phases = {0: Rounded(0.5), 3: "topk:ratio=0.1", 6: "none", 7: Rounded(2.0), 9: "topk:ratio=0.1"}
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(w * g) for w, g in zip(weights, draw(rank, step))])
        tape = hvdc.DistributedGradientTape(tape, compression=schedule(phases))
        reduced = [g.numpy() for g in tape.gradient(loss, weights)]
        np.testing.assert_allclose(flat(reduced), mean, atol=1e-5)
    with tf.GradientTape() as tape:
        tensor = tf.ones([40, 50])
        tape.watch(tensor)
        loss = tf.reduce_sum(tensor)
    with pytest.raises(ValueError, match="schedule follows training: .* or for variables in hvdc.Distributed"):
        hvdc.DistributedGradientTape(tape, compression=schedule(phases)).gradient(loss, tensor)


def test_each_group_of_a_policy_has_its_own_stages(rank, size):
    """One group by steps, one by the share of training, the others fixed; and the monitor sees them."""
    shapes = {"a": (40, 50), "b": (30, 40), "c": (64, 32)}
    variables = [tf.Variable(tf.zeros(shape), name=name) for name, shape in shapes.items()]
    policy = (
        ("a*", hvdc.Compression.parse("schedule:(0=none|2=int8)")),
        ("b*", schedule({0: "int4", "75%": "none"}, 4)),
    )
    reducer = introspect.new_reducer("int8", watched=True, policy=policy)
    seen = []
    for step in range(4):
        gradients = [np.random.default_rng([rank, step, i]).standard_normal(v.shape) for i, v in enumerate(variables)]
        reducer([tf.constant(g, tf.float32) for g in gradients], variables)
        seen.append([bucket.chosen for bucket in reducer.report().buckets])
    assert seen == [
        ["none", "int4", "int8"],
        ["int8", "int4", "int8"],
        ["int8", "none", "int8"],
        ["int8", "none", "int8"],
    ]
    plan = introspect.plan_of(reducer)
    found = introspect.recorded_steps(plan).buckets
    specs = [bucket.compressors for bucket in introspect.recorded_buckets(plan)]
    recorded = [[specs[b][int(c)] for b, c in enumerate(row)] for row in found.compressor]
    assert recorded == [["none", "int4", "int8"], *seen[:3]]
    sizes = found.bytes / found.uncompressed_bytes
    ratio = {"none": 1.0, "int8": 0.26, "int4": 0.135}
    np.testing.assert_allclose(sizes, [[ratio[spec] for spec in row] for row in recorded], rtol=0.1)


@pytest.mark.np4
def test_scatter_reduce_between_four_ranks_conserves_mass(rank, size, gather, monkeypatch):
    """Both losses of a scatter-reduce are in the residual, which the other stages take over."""
    introspect.prefer_scatter_reduce(monkeypatch)
    stages = {0: "int4", 2: "topk:ratio=0.05", 4: "none", 5: "int8"}
    training = ReducerTraining(rank, draw, schedule(stages))
    before = np.zeros(40 * 50 + 30 * 40)
    for step in range(7):
        reduced = flat(training.step())
        left = gather(flat(training.residuals())).sum(0)
        came = sum(flat(draw(r, step)) for r in range(size))
        np.testing.assert_allclose(size * reduced + left, came + before, atol=1e-4)
        assert (np.abs(left).max() == 0.0) == (step == 4)
        before = left


# Keras's epochs

EPOCHS, BATCHES = 5, 4


def make_model(keras, compression, **options):
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((24,)), keras.layers.Dense(90, "relu"), keras.layers.Dense(70)])
    optimizer = hvdc.DistributedOptimizer(keras.optimizers.SGD(0.02), compression=compression, **options)
    model.compile(optimizer=optimizer, loss="mse")
    return model


def data_of(rank):
    rng = np.random.default_rng(rank)
    return tuple(rng.standard_normal((8 * BATCHES, n)).astype(np.float32) for n in (24, 70))


def fit(model, rank, epochs=EPOCHS, start=0, callbacks=(), tell=True, unknown=False):
    x, y = data_of(rank)
    told = [hvdc.callbacks.BroadcastGlobalVariablesCallback(0)] if tell else []
    options = {"epochs": epochs, "initial_epoch": start, "verbose": 0, "callbacks": [*told, *callbacks]}
    if unknown:
        data = tf.data.Dataset.from_tensor_slices((x, y)).filter(lambda *_: True).batch(8)
        model.fit(data, **options)
    else:
        model.fit(x, y, batch_size=8, shuffle=False, **options)


class Seen:
    """A Keras callback that keeps what the report tells after each step: for each epoch a list of compressors."""

    def __new__(cls, keras):
        class Callback(keras.callbacks.Callback):
            chosen, sent = [], []

            def on_epoch_begin(self, epoch, logs=None):
                self.chosen.append([])

            def on_train_batch_end(self, batch, logs=None):
                (bucket,) = self.model.optimizer.compression_report().buckets
                self.chosen[-1].append(bucket.chosen)
                self.sent.append(self.model.optimizer.bytes_sent()[0])

        return Callback()


def stop_after(keras, epochs):
    """A Keras callback that ends training after so many epochs."""

    class Callback(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = epoch + 1 == epochs

    return Callback()


def continue_from(first, second):
    """As from a checkpoint of the model and its optimizer."""
    second.set_weights(first.get_weights())
    second.optimizer.build(second.trainable_variables)
    second.optimizer.iterations.assign(int(first.optimizer.iterations.numpy()))


def after_each_step(begins, epochs=EPOCHS, start=0):
    """The compressor that holds after each step, of pairs of a begin in steps and a compressor."""
    steps = range(1 + start * BATCHES, 1 + epochs * BATCHES)
    return np.reshape([[c for first, c in begins if first <= s][-1] for s in steps], [-1, BATCHES]).tolist()


@pytest.mark.parametrize("keras", sorted(KERASES))
def test_epochs_of_keras(keras, rank):
    model = make_model(KERASES[keras], "schedule:(0=int8|1epochs=int4|3epochs=onebit)")
    seen = Seen(KERASES[keras])
    fit(model, rank, callbacks=[seen])
    assert seen.chosen == [[spec] * BATCHES for spec in ("int8", "int4", "int4", "onebit", "onebit")]
    assert seen.sent[0] > seen.sent[BATCHES] > seen.sent[-1]


@pytest.mark.parametrize("keras", sorted(KERASES))
def test_the_share_of_keras_training_grows_with_each_step(keras, rank):
    """10% are 2 of 20 steps, 30% are 6, 55% are 11."""
    model = make_model(KERASES[keras], "schedule:(0=int8|10%=int4|30%=onebit|55%=none)")
    seen = Seen(KERASES[keras])
    fit(model, rank, callbacks=[seen])
    assert seen.chosen == after_each_step([(0, "int8"), (2, "int4"), (6, "onebit"), (11, "none")])


def test_without_the_number_of_steps_the_share_grows_with_each_epoch(rank):
    model, seen = make_model(tf_dot_keras, "schedule:(0=int8|10%=int4|60%=onebit)"), Seen(tf_dot_keras)
    fit(model, rank, callbacks=[seen], unknown=True)
    assert seen.chosen == [[spec] * BATCHES for spec in ("int8", "int4", "int4", "onebit", "onebit")]


@pytest.mark.parametrize("option", ["backward_passes_per_step", "gradient_accumulation_steps"])
def test_the_share_counts_batches_that_are_added_up(option, rank):
    """Of 20 batches, two make a step: 30% are 6 batches, 3 steps."""
    keras = KERASES["keras"]
    if option == "gradient_accumulation_steps":
        if not hasattr(keras.optimizers.SGD, "stateless_apply"):
            pytest.skip("Keras 3")
        keras.utils.set_random_seed(3)
        optimizer = hvdc.DistributedOptimizer(
            keras.optimizers.SGD(0.02, gradient_accumulation_steps=2), compression="schedule:(0=int8|30%=int4)"
        )
        model = make_model(keras, "none")
        model.compile(optimizer=optimizer, loss="mse")
    else:
        model = make_model(keras, "schedule:(0=int8|30%=int4)", backward_passes_per_step=2)
    plans, shares = [], []

    class Callback(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            plans[:] = introspect.plans_of(self.model.optimizer)
            shares.append(introspect.progress(plans[0]) if plans else 0.0)

    fit(model, rank, callbacks=[Callback()])
    np.testing.assert_allclose(shares, [2 * (batch // 2) / 20 for batch in range(1, 21)], atol=1e-9)


@pytest.mark.parametrize(
    "compression",
    [
        "schedule:(0=int8|60%=int4)",
        *slow("schedule:(0=int8|12=int4)", "schedule:(0=int8|3epochs=int4)", "schedule:(0=int8|60%=int4),steps=20"),
    ],
)
def test_a_resumed_run_is_in_the_right_stage(compression, rank, shared):
    """It stops after two of five epochs, 8 of 20 steps; the next stage begins at the 12th."""
    keras = KERASES["keras"]
    first = make_model(keras, compression)
    fit(first, rank, callbacks=[hvdc.callbacks.ResidualCheckpoint(shared), stop_after(keras, 2)])
    second, seen = make_model(keras, compression), Seen(keras)
    continue_from(first, second)
    fit(second, rank, EPOCHS, 2, [hvdc.callbacks.ResidualCheckpoint(shared), seen])
    if "epochs" in compression:  # the third epoch ends after the report
        assert seen.chosen == [[spec] * BATCHES for spec in ("int8", "int4", "int4")]
    else:
        assert seen.chosen == after_each_step([(0, "int8"), (12, "int4")], start=2)
    assert introspect.steps_made(introspect.plan_of(second.optimizer)) == EPOCHS * BATCHES


@pytest.mark.parametrize(
    ("saved", "resumed", "progress"),
    [
        ("schedule:(0=int8|30%=int4)", "schedule:(0=int8|30%=int4)", 0.4),  # 2 of 5 epochs, not 1 of 5
        # In other units of steps, as on another number of ranks: 8 of 20 steps, then 4 of 40.
        ("schedule:(0=int8|30%=int4),steps=20", "schedule:(0=int8|30%=int4),steps=40", 8 / 20 + 4 / 40),
    ],
)
def test_the_share_goes_on_where_it_was(saved, resumed, progress, rank, shared):
    """Also if Keras counts from 0 again."""
    keras = KERASES["keras"]
    first = make_model(keras, saved)
    fit(first, rank, callbacks=[hvdc.callbacks.ResidualCheckpoint(shared), stop_after(keras, 2)])
    second, seen = make_model(keras, resumed), Seen(keras)
    continue_from(first, second)
    fit(second, rank, callbacks=[hvdc.callbacks.ResidualCheckpoint(shared), seen, stop_after(keras, 1)])
    assert introspect.progress(introspect.plan_of(second.optimizer)) == pytest.approx(progress)
    assert seen.chosen == [["int4"] * BATCHES]


@pytest.mark.parametrize(
    ("compression", "message"),
    [
        ("schedule:(0=int8|2epochs=int4)", "schedule: nobody says which epoch it is, .* count in steps, such as"),
        ("schedule:(0=int8|30%=int4)", "schedule: nobody says how long training is, .* pass schedule's steps=..., "),
    ],
)
def test_nobody_says_which_epoch_it_is(compression, message, rank):
    model = make_model(KERASES["keras"], compression)
    with pytest.raises(ValueError, match=message) as error:
        fit(model, rank, 1, tell=False)
    text = str(error.value)
    assert "\n" not in text and len(set(hvd.allgather_object(text))) == 1


def test_rank_0_says_what_the_stages_are(rank, capfd):
    fit(make_model(KERASES["keras"], "schedule:(0=int8|30%=quantize:bits=6|60%=int4)"), rank, 1)
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("hvd_compress: schedule")]
    expected = "hvd_compress: schedule: int8, from 30% quantize:bits=6, from 60% int4; now int8"
    assert lines == ([expected] if rank == 0 else [])
