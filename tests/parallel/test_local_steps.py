"""Local steps against an independent simulation in NumPy of all ranks, with different data on each."""

import csv
import itertools
import warnings
import weakref

import horovod.tensorflow as hvd
import introspect
import numpy as np
import pytest
import tensorflow as tf
from levels import levels_of_int8
from marks import slow
from tensorflow import keras

import hvd_compress as hvdc
from hvd_compress.auto import round_length
from hvd_compress.engine.round_log import COLUMNS as COLUMNS_OF_LOG
from hvd_compress.frontends.keras import optimizer_state
from hvd_compress.frontends.keras.callbacks import Callback

KERASES = {"keras": keras}
try:
    import tf_keras

    KERASES["tf_keras"] = tf_keras
except ImportError:  # TF 2.15: tf.keras is Keras 2
    pass

IS_KERAS3 = hasattr(keras.optimizers.Optimizer, "stateless_apply")
pytestmark = pytest.mark.usefixtures("fixed_costs")
STEPS, ROUND = 60, 5
LR, MOMENTUM = 0.1, 0.5  # of the inner optimizer
ROWS, COLUMNS = 40, 64
RATIO = 0.25
SUMS = (*COLUMNS_OF_LOG[1:], "statistics")
TOPK = f"topk:ratio={RATIO}"


def starts():
    """The initial matrix, bias and statistic."""
    rng = np.random.default_rng(5)
    return [rng.standard_normal(shape).astype(np.float32) for shape in ((ROWS, COLUMNS), (COLUMNS,), (COLUMNS,))]


def targets(rank):
    """What the matrix, the bias and the statistic are drawn to in each step: float32 [STEPS, ...]."""
    rng = np.random.default_rng(100 + rank)
    shapes = ((ROWS, COLUMNS), (COLUMNS,), (COLUMNS,))
    return [(1.0 + rank + rng.standard_normal((STEPS, *shape))).astype(np.float32) for shape in shapes]


# The simulation


def kept(x, spec):
    """What a rank sends of x with this compressor, which leaves vectors as they are."""
    if spec == "none" or x.ndim < 2:
        return x
    if spec == "int8":
        return levels_of_int8(x)
    k = int(np.ceil(RATIO * x.size - 1e-9))
    result = np.zeros(x.size)
    largest = np.argsort(-np.abs(x.ravel()), kind="stable")[:k]
    result[largest] = x.ravel()[largest]
    return result.reshape(x.shape)


class Simulation:
    """All ranks in float64: `local[rank][i]` are the values of matrix, bias and statistic."""

    def __init__(self, ranks, parts, outer, spec, alpha=0.0, warmup=0):
        self.local = [[x.astype(np.float64) for x in starts()] for _ in range(ranks)]
        self.velocity = [[np.zeros(x.shape) for x in starts()[:2]] for _ in range(ranks)]
        self.synchronized = [x.astype(np.float64) for x in starts()]
        self.momentum = [np.zeros(x.shape) for x in starts()]
        self.residual = [[np.zeros(x.shape) for x in starts()] for _ in range(ranks)]
        self.targets = [targets(rank) for rank in range(ranks)]
        # Fragments: lists of (variable, rows).
        self.parts, self.outer, self.spec, self.alpha, self.warmup = parts, outer, spec, alpha, warmup
        self.steps = self.in_round = 0
        # What `RoundLog` keeps, of each exchange [ranks, COLUMNS]; and sums of squares of the exchange that goes on.
        self.rows, self.sums = [], [dict.fromkeys(SUMS, 0.0) for _ in range(ranks)]

    def movements(self, fragment):
        return [[self.synchronized[i][rows] - local[i][rows] for i, rows in fragment] for local in self.local]

    def exchange(self, fragment, movements, alpha, only_average=False):
        ranks = len(self.local)
        for p, (i, rows) in enumerate(fragment):
            total = np.zeros_like(movements[0][p])
            before = self.synchronized[i][rows].copy()
            for residual, movement in zip(self.residual, movements):
                x = movement[p] + residual[i][rows]
                sent = kept(x, self.spec)
                residual[i][rows] = x - sent
                total += sent
            delta = total / ranks
            if self.outer == "average" or only_average or i == 2:
                self.synchronized[i][rows] -= delta
            else:
                lr, factor = self.outer
                self.momentum[i][rows] = factor * self.momentum[i][rows] + delta
                self.synchronized[i][rows] -= lr * (delta + factor * self.momentum[i][rows])
            for sums, movement in zip(self.sums, movements):
                if i == 2:
                    sums["statistics_drift"] += ((movement[p] - delta) ** 2).sum()
                    sums["statistics"] += (before**2).sum()
                    continue
                sums["movement"] += (movement[p] ** 2).sum()
                sums["drift"] += ((movement[p] - delta) ** 2).sum()
                sums["outer_step"] += ((self.synchronized[i][rows] - before) ** 2).sum()
                sums["weights"] += (before**2).sum()
            for local in self.local:
                local[i][rows] = alpha * local[i][rows] + (1 - alpha) * self.synchronized[i][rows]

    def log(self):
        row = []
        with np.errstate(invalid="ignore"):
            for sums in self.sums:
                norms = {name: np.sqrt(np.float64(square)) for name, square in sums.items()}
                norms["statistics_drift"] /= norms["statistics"]
                row.append([self.steps, *(norms[name] for name in COLUMNS_OF_LOG[1:])])
        self.rows.append(row)
        self.sums = [dict.fromkeys(SUMS, 0.0) for _ in self.sums]

    def step(self):
        before = self.movements(self.parts[self.in_round]) if len(self.parts) > 1 else None
        for rank, local in enumerate(self.local):
            for i in range(2):
                gradient = local[i] - self.targets[rank][i][self.steps]
                self.velocity[rank][i] = MOMENTUM * self.velocity[rank][i] - LR * gradient
                local[i] += self.velocity[rank][i]
            local[2] += 0.1 * (self.targets[rank][2][self.steps] - local[2])
        self.steps += 1
        if self.steps <= self.warmup:
            for fragment in self.parts:
                self.exchange(fragment, self.movements(fragment), 0.0, only_average=True)
            self.log()
            return
        if len(self.parts) > 1:
            self.exchange(self.parts[self.in_round], before, self.alpha)
            self.log()
        elif self.in_round == ROUND - 1:
            self.exchange(self.parts[0], self.movements(self.parts[0]), 0.0)
            self.log()
        self.in_round = (self.in_round + 1) % ROUND


WHOLE = [[(i, slice(None)) for i in range(3)]]


def streamed():
    """Fragments of ROUND: rows belong where their middle is; a vector is never divided."""
    parts, total, offset = [[] for _ in range(ROUND)], ROWS * COLUMNS + 2 * COLUMNS, 0
    by_row = [int((row + 0.5) * COLUMNS / total * ROUND) for row in range(ROWS)]
    for f in range(ROUND):
        rows = [row for row in range(ROWS) if by_row[row] == f]
        if rows:
            parts[f].append((0, slice(rows[0], rows[-1] + 1)))
    for i in (1, 2):
        offset = ROWS * COLUMNS + (i - 1) * COLUMNS
        parts[int((offset + COLUMNS / 2) / total * ROUND)].append((i, slice(None)))
    return parts


# Training


class Statistics:
    """A model, as far as the optimizer looks for moving statistics in it."""

    layers = ()

    def __init__(self, variables):
        self.non_trainable_weights = variables


class Training:
    """The same training with the package, in a custom loop: with `LocalSteps`, or with the optimizer itself."""

    def __init__(self, rank, by_optimizer=False, **options):
        self.variables = [tf.Variable(x, name=name) for x, name in zip(starts(), ("kernel", "bias", "mean"))]
        self.variables[2]._trainable = False
        trained = self.variables[:2]
        self._optimizer = keras.optimizers.SGD(LR, momentum=MOMENTUM)
        if by_optimizer:
            self._optimizer = hvdc.DistributedOptimizer(self._optimizer, **options)
            self._model = Statistics(self.variables[2:])
            self._optimizer._hvdc.model = weakref.ref(self._model)
            self.rounds = self._optimizer._hvdc.rounds
        self._optimizer.build(trained)
        if not by_optimizer:
            self.sync = hvdc.LocalSteps(trained, averaged=self.variables[2:], **options)
            self.rounds = self.sync._rounds
        data = [tf.constant(x) for x in targets(rank)]
        self.traces = 0

        @tf.function(autograph=False)
        def step(t):
            self.traces += 1
            gradients = [v - x[t] for v, x in zip(trained, data)]
            self.variables[2].assign_add(0.1 * (data[2][t] - self.variables[2]))
            self._optimizer.apply_gradients(list(zip(gradients, trained)))
            if not by_optimizer:
                self.sync()

        self._step = step

    def step(self, t):
        self._step(tf.constant(t))
        return [variable.numpy() for variable in self.variables]


NESTEROV = {"outer": "nesterov:lr=0.7,momentum=0.9"}
STREAM = {"fragments": "stream", "alpha": 0.0}
CASES = {
    "average": ({}, {"outer": "average"}),
    "nesterov": (NESTEROV, {"outer": (0.7, 0.9)}),
    "nesterov after a warm-up": ({**NESTEROV, "local_warmup": 3}, {"outer": (0.7, 0.9), "warmup": 3}),
    "stream": (STREAM, {"outer": "average"}),
    "stream with nesterov, mixed, after a warm-up": (
        {"fragments": "stream", **NESTEROV, "local_warmup": 3},  # alpha is 0.5
        {"outer": (0.7, 0.9), "alpha": 0.5, "warmup": 3},
    ),
}


@pytest.mark.parametrize(
    ("case", "spec", "by_optimizer"),
    [
        *itertools.product(CASES, ["none", TOPK], [False]),
        ("nesterov", "int8", False),
        ("nesterov after a warm-up", TOPK, True),
    ],
)
def test_every_step_equals_the_simulation_of_all_ranks(rank, size, case, spec, by_optimizer):
    options, simulated = CASES[case]
    parts = streamed() if "fragments" in options else WHOLE
    simulation = Simulation(size, parts, spec=spec, **simulated)
    training = Training(
        rank, by_optimizer, local_steps=ROUND, compression=spec, min_compress_size=256, **options
    )  # fmt: skip
    for t in range(STEPS):
        values = training.step(t)
        simulation.step()
        for value, expected in zip(values, simulation.local[rank]):
            is_close = np.isclose(value, expected, rtol=1e-5, atol=1e-5)
            # A value in the middle between two levels may be rounded up here and down there, and is corrected later.
            assert is_close.mean() > (0.99 if spec == "int8" else 1.0 - 1e-9), f"step {t}"
            np.testing.assert_allclose(value, expected, rtol=1e-5, atol=0.1 if spec == "int8" else 1e-5)
    assert training.traces == 1
    rows, expected_rows = training.rounds.log.read("test"), np.array(simulation.rows)[:, rank]
    np.testing.assert_allclose(rows, expected_rows, rtol=1e-3, atol=1e-4)
    report = training.rounds.report().rounds
    assert (report.exchanges, report.step) == (len(rows), rows[-1, 0])
    np.testing.assert_allclose(report.drift, expected_rows[-1, COLUMNS_OF_LOG.index("drift")], rtol=1e-3)
    own = [variable.numpy() for variable in training.variables]
    training.rounds.show_synchronized()
    for variable, expected in zip(training.variables, simulation.synchronized):
        is_close = np.isclose(variable.numpy(), expected, rtol=1e-5, atol=1e-5)
        assert is_close.mean() > (0.99 if spec == "int8" else 1.0 - 1e-9)
    training.rounds.show_own()
    np.testing.assert_equal([variable.numpy() for variable in training.variables], own)


def test_auto_with_one_length_equals_that_length(rank):
    found = []
    for compression, local_steps in ((TOPK, 4), (f"auto:candidates=({TOPK}),local_steps=4", None)):
        training = Training(rank, local_steps=local_steps, compression=compression, min_compress_size=256)
        found.append([training.step(t) for t in range(12)])
        assert [bucket.chosen for bucket in training.sync.compression_report().buckets] == [TOPK]
    np.testing.assert_equal(found[1], found[0])


def test_all_ranks_take_the_length_that_rank_0_proposes(rank, monkeypatch):
    """Seconds of a step and of an exchange are planted: to rank 0, exchanges are slow, and to the others, steps are."""
    planted = tf.constant([0.01, 1.0] if rank == 0 else [1.0, 0.001])
    average = round_length.policy.average  # of both times over the ranks; also of a step's time on this rank
    monkeypatch.setattr(
        round_length.policy, "average", lambda xp, old, *new: planted if old.shape == [2] else average(xp, old, *new)
    )
    options = {"compression": "auto:candidates=(int8),local_steps=(1|4)", "min_compress_size": 256}
    training = Training(rank, **options)
    for t in range(11):
        training.step(t)
    # It is proposed in the first exchange and sent with the second one.
    assert training.rounds.log.read("test")[:, 0].tolist() == [1, 2, 6, 10]
    sent, stock = training.sync.bytes_sent()
    report = training.sync.compression_report().rounds
    assert sent * 4 < stock / 3 and report.local_steps == 4
    slow = "10 ms, an exchange 1e+03 ms" if rank == 0 else "1e+03 ms, an exchange 1 ms"
    assert f"auto chose local_steps=4 from 1, 4: a step takes {slow}" in str(report)
    with training.sync.synchronized():
        assert not any(differ([variable.numpy() for variable in training.variables]))
    assert any(differ([variable.numpy() for variable in training.variables]))
    # A resumed training has the length and continues to the bit.
    state = training.rounds.state(training._optimizer.variables)
    resumed = Training(rank, **options)
    resumed.sync._rounds.restore(state, resumed._optimizer.variables)
    assert resumed.sync._rounds.local_steps == 4
    np.testing.assert_equal(resumed.step(11), training.step(11))


def test_a_new_process_resumes_to_the_bit(rank, tmp_path):
    """Its `LocalSteps` has made no steps when the save is loaded."""
    shared = hvd.broadcast_object(str(tmp_path), 0)
    training = Training(rank, local_steps=ROUND, compression=TOPK, min_compress_size=256)
    for t in range(7):
        training.step(t)
    hvdc.save_residuals(training.sync, shared, training._optimizer.variables)
    resumed = Training(rank, local_steps=ROUND, compression=TOPK, min_compress_size=256)
    assert hvdc.load_residuals(resumed.sync, shared, resumed._optimizer.variables) == 7
    for t in range(7, 14):
        np.testing.assert_equal(resumed.step(t), training.step(t))


@pytest.mark.timeout(200)
def test_lengths_are_agreed_on_where_the_reducer_got_another_name(rank):
    """As in an elastic job: a process that joins may have made fewer reducers before."""
    made = introspect.reducers_made()
    introspect.set_reducers_made(made + rank)
    options = {"compression": "auto:candidates=(int8),local_steps=(1|2)"}
    optimizer = hvdc.DistributedOptimizer(keras.optimizers.SGD(0.1), **options)
    reducer = introspect.reducer_of(optimizer)
    introspect.set_reducers_made(made + 2)
    before, reducer.name = reducer.name, hvd.broadcast_object(reducer.name, 0)
    assert (before == reducer.name) == (rank == 0)
    variable = tf.Variable(tf.ones([32, 32]))
    for _ in range(3):
        optimizer.apply_gradients([(tf.fill([32, 32], 1.0 + rank), variable)])
    assert optimizer._hvdc.rounds.log.read("test")[:, 0].tolist() == [1, 2, 3]


@pytest.mark.timeout(200)
def test_lengths_are_agreed_on_where_only_one_rank_has_a_condition_in_its_step(rank):
    """TensorFlow's names of what follows then differ between ranks."""
    variable = tf.Variable(tf.ones([32, 32]))
    sync = hvdc.LocalSteps([variable], compression="auto:candidates=(int8),local_steps=(1|2)")

    @tf.function(autograph=False)
    def step(x):
        if rank == 0:
            variable.assign_add(tf.cond(x > 0.0, lambda: tf.ones([32, 32]), lambda: tf.zeros([32, 32])))
        sync()

    for _ in range(4):
        step(tf.constant(1.0))
    sync.synchronize()
    assert not any(differ([variable.numpy()]))


def test_the_measured_times_are_the_same_on_all_ranks(rank):
    training = Training(rank, compression="auto:candidates=(int8),local_steps=(1|2)", min_compress_size=256)
    for t in range(20):
        training.step(t)
    times = training.rounds._length.times.numpy()
    assert np.all(times > 0.0) and not any(differ([times]))
    steps = training.rounds.log.read("test")[:, 0]
    assert set(np.diff(steps)) <= {1.0, 2.0} and not any(differ([steps]))


# Keras


def make_model(module, optimizer=None, seed=7, **options):
    module.utils.set_random_seed(seed)
    layers = [module.layers.Dense(48, activation="relu"), module.layers.BatchNormalization(), module.layers.Dense(4)]
    model = module.Sequential([module.Input((32,)), *layers])
    optimizer = hvdc.DistributedOptimizer(optimizer or module.optimizers.Adam(0.01), **options)
    model.compile(optimizer=optimizer, loss="mse", steps_per_execution=2, jit_compile=False)
    return model


def data(rank, batches):
    rng = np.random.default_rng(rank)
    x = rng.standard_normal((8 * batches, 32)).astype(np.float32)
    return x, x[:, :4] + rank


def fit(model, rank, epochs=1, start=0, callbacks=(), batches=6, **more):
    broadcast = hvdc.callbacks.BroadcastGlobalVariablesCallback(0)
    options = {"batch_size": 8, "verbose": 0, "shuffle": False, "callbacks": [broadcast, *callbacks]}
    return model.fit(*data(rank, batches), epochs=epochs, initial_epoch=start, **options, **more)


def differ(weights):
    """By weight, whether it differs between ranks."""
    everywhere = hvd.allgather_object(weights)
    return [any(not np.array_equal(w, other[i]) for other in everywhere) for i, w in enumerate(weights)]


class Spy(Callback):
    """Which weights differ between ranks: after each batch, in the validation and at the end of the epoch."""

    _implements_test_batch_hooks = staticmethod(lambda: True)

    def __init__(self):
        super().__init__()
        self.after_batches, self.in_validation, self.at_the_end = [], [], []

    def on_train_batch_end(self, batch, logs=None):
        self.after_batches.append(differ(self.model.get_weights()))

    def on_test_batch_end(self, batch, logs=None):
        self.in_validation.append(differ(self.model.get_weights()))

    def on_epoch_end(self, epoch, logs=None):
        self.at_the_end.append(differ(self.model.get_weights()))


@pytest.mark.parametrize("module", KERASES)
def test_one_local_step_of_sgd_equals_the_plain_optimizer(rank, module):
    module = KERASES[module]
    found = []
    for options in ({}, {"local_steps": 1}):
        module.utils.set_random_seed(3)
        model = module.Sequential([module.Input((32,)), module.layers.Dense(48), module.layers.Dense(4)])
        optimizer = hvdc.DistributedOptimizer(module.optimizers.SGD(0.05), **options)
        model.compile(optimizer=optimizer, loss="mse", steps_per_execution=2, jit_compile=False)
        fit(model, rank)
        found.append(model.get_weights())
    assert not any(differ(found[1]))
    for plain, local in zip(*found):
        np.testing.assert_allclose(local, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("module", KERASES)
def test_the_model_holds_synchronized_weights_between_epochs_and_its_own_within(rank, module):
    model = make_model(KERASES[module], local_steps=4, compression="int8")
    spy = Spy()
    fit(model, rank, epochs=2, callbacks=[spy], validation_data=data(rank, 1))
    # Rounds end after steps 4, 8 and 12. Batch hooks are called after every second step.
    some = [any(differing) for differing in spy.after_batches]
    assert some == [True, False, True, False, True, False]
    assert all(spy.after_batches[0])  # also the moving statistics, the last weights but the last layer's
    assert not np.any(spy.in_validation) and not np.any(spy.at_the_end)
    assert not any(differ(model.get_weights()))
    assert model.optimizer.bytes_sent()[0] * 4 < model.optimizer.bytes_sent()[1]


def test_the_monitor_writes_the_rounds(rank, tmp_path):
    model, logged = make_model(keras, local_steps=5, compression="int8"), []
    monitor = hvdc.callbacks.CompressionMonitor(
        hvd.broadcast_object(str(tmp_path), 0), log=lambda step, values: logged.append(values)
    )
    fit(model, rank, epochs=2, callbacks=[monitor])
    rows = model.optimizer._hvdc.rounds.log.read("test")
    assert rows[:, 0].tolist() == [5, 10, 12]  # the end of training ends the round
    with open(f"{monitor.log_dir}/rank-{rank}-rounds.csv", encoding="utf-8") as file:
        header, *lines = csv.reader(file)
    assert tuple(header) == COLUMNS_OF_LOG
    np.testing.assert_allclose(np.array(lines, np.float64), rows, rtol=1e-6)
    if rank == 0:
        last = {name.rpartition("/")[2]: value for name, value in logged[-1].items() if "/rounds/" in name}
        np.testing.assert_allclose([last[name] for name in COLUMNS_OF_LOG], rows[-1], rtol=1e-6)
    else:
        assert not logged


FITS = {
    "mixed_float16": {"compression": "int8"},
    "schedule": {"compression": "schedule:(0=int8|2=int4)"},  # exchanges count
    "powersgd": {"compression": "powersgd:rank=2"},
    "dgc": {"compression": "dgc:ratio=0.1,momentum=0,steps_per_epoch=2", "min_compress_size": 0},
}


@pytest.mark.parametrize("name", ["mixed_float16", "powersgd", *slow("schedule", "dgc")])
def test_fit_with_other_parts_of_training(rank, name):
    """And with learning rates that a schedule or a callback lowers."""
    if name == "mixed_float16" and not IS_KERAS3:
        pytest.skip("Keras 2 puts a loss scale around the optimizer, which is refused")
    try:
        keras.mixed_precision.set_global_policy("mixed_float16" if name == "mixed_float16" else "float32")
        rate = 0.01 if name == "powersgd" else keras.optimizers.schedules.CosineDecay(0.01, 100)
        model = make_model(keras, keras.optimizers.SGD(rate), local_steps=4, **FITS[name])
        slower = keras.callbacks.ReduceLROnPlateau(monitor="loss", mode="max", patience=1, factor=0.5, min_delta=0.0)
        losses = fit(model, rank, epochs=3, callbacks=[slower] if name == "powersgd" else []).history["loss"]
    finally:
        keras.mixed_precision.set_global_policy("float32")
    assert losses[-1] < losses[0] and not any(differ(model.get_weights()))
    report = hvdc_optimizer(model).compression_report()
    assert report.rounds.exchanges == 5
    assert {bucket.chosen for bucket in report.buckets} >= ({"int4"} if name == "schedule" else set())
    if name == "powersgd":
        assert float(model.optimizer.learning_rate) == pytest.approx(0.0025)


def hvdc_optimizer(model):
    """The distributed optimizer of a model, also inside of a loss scale."""
    return optimizer_state.distributed_optimizer(model.optimizer)


@pytest.mark.parametrize("name", ["conv1_bn", "abnormal"])
def test_statistics_that_are_not_averaged_are_named(rank, name):
    """Without the callback, the optimizer sees nothing but the names of what it trains."""
    model = keras.Sequential([keras.Input((32,)), keras.layers.BatchNormalization(name=name), keras.layers.Dense(4)])
    optimizer = hvdc.DistributedOptimizer(keras.optimizers.SGD(0.1), local_steps=2)
    model.compile(optimizer, "mse", jit_compile=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(*data(rank, 2), batch_size=8, verbose=0)
    lines = [str(warning.message) for warning in caught if "moving statistics" in str(warning.message)]
    assert len(lines) == (rank == 0 and name == "conv1_bn")
    assert all("beside" in line and "conv1_bn/gamma" in line and "BroadcastGlobalVariables" in line for line in lines)


@pytest.mark.parametrize("module", KERASES)
@pytest.mark.parametrize("on_rank", ["all", 1])
def test_the_best_weights_are_restored(rank, module, on_rank):
    """Keras 2 restores them at the end of an epoch, Keras 3 at the end of training; the round is not over then."""
    module, weights = KERASES[module], []
    model = make_model(module, local_steps=5)
    keep = module.callbacks.LambdaCallback(on_epoch_end=lambda *_: weights.append(model.get_weights()))
    stopping = {"monitor": "loss", "mode": "max", "patience": 1, "restore_best_weights": True}
    restoring = module.callbacks.EarlyStopping(**stopping)
    if on_rank != "all":  # at the end of an epoch, whatever Keras does

        def restore(epoch, logs):
            if epoch == 1 and rank == on_rank:
                model.set_weights(weights[0])

        restoring = module.callbacks.LambdaCallback(on_epoch_end=restore)
    fit(model, rank, epochs=6 if on_rank == "all" else 2, callbacks=[keep, restoring])
    assert len(weights) == 2 and not any(differ(model.get_weights()))
    for value, best in zip(model.get_weights(), weights[0]):
        np.testing.assert_array_equal(value, best)


@pytest.mark.parametrize("module", KERASES)
@pytest.mark.parametrize("options", [{}, {"fragments": "stream"}], ids=["whole", "stream"])
def test_ranks_with_fewer_batches_take_part_in_the_exchanges_of_the_others(rank, size, module, options):
    """With what their weights have moved; the end of an epoch is in the middle of a round, or at its end."""
    module, lr, epochs, length, most = KERASES[module], 0.1, 3, 4, 11 + size
    model = module.Sequential([module.Input((32,)), module.layers.Dense(4, use_bias=False)])
    local = [model.get_weights()[0].astype(np.float64)] * size
    broadcast = hvdc.callbacks.BroadcastGlobalVariablesCallback(0)
    local = hvd.broadcast_object(local, 0)
    optimizer = hvdc.DistributedOptimizer(module.optimizers.SGD(lr), local_steps=length, **options)
    model.compile(optimizer, "mse", jit_compile=False)
    spy = Spy()
    spy.on_train_batch_end = lambda *_, **__: None  # ranks have different ones
    validation = {"validation_data": data(rank, 1), "batch_size": 8, "verbose": 0, "shuffle": False}
    model.fit(*data(rank, most - rank), epochs=epochs, callbacks=[broadcast, spy], **validation)
    assert not np.any(spy.in_validation) and not any(differ(model.get_weights()))
    steps = epochs * most
    assert (model.optimizer._hvdc.rounds.steps, int(model.optimizer.iterations)) == (steps, steps)
    if options:
        return
    for step in range(steps):
        for r in range(size):
            x, y = (part[8 * (step % most) : 8 * (step % most + 1)] for part in data(r, most - r))
            local[r] = local[r] - lr * x.T @ (x @ local[r] - y) / 16 if len(x) else local[r]
        if (step + 1) % length == 0 or step + 1 == steps:
            local = [np.mean(local, 0)] * size
    np.testing.assert_allclose(model.get_weights()[0], local[rank], rtol=1e-4, atol=1e-5)


def test_ranks_with_fewer_batches_cannot_accumulate(rank):
    model = make_model(keras, local_steps=2, backward_passes_per_step=2)
    with pytest.raises(ValueError, match=r"the ranks have different numbers of batches, 3, 4.*steps_per_epoch=3"):
        fit(model, rank, batches=4 - rank % 2)


RESUMED = {
    "whole": {"local_steps": 4, "compression": TOPK, "outer": "nesterov"},
    "stream": {"local_steps": 4, "compression": TOPK, "fragments": "stream", "alpha": 0.5, "min_compress_size": 64},
}


@pytest.mark.slow
@pytest.mark.parametrize("options", RESUMED.values(), ids=RESUMED)
def test_training_that_is_resumed_in_the_middle_of_a_round_equals_one_that_was_not_interrupted(rank, tmp_path, options):
    directory = hvd.broadcast_object(str(tmp_path), 0)
    checkpoint = hvdc.callbacks.ResidualCheckpoint(f"{directory}/residuals")
    whole = make_model(keras, **options)
    fit(whole, rank, epochs=2)

    saved = []

    class Save(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            saved.extend([self.model.get_weights(), [v.numpy() for v in self.model.optimizer.variables]])

    interrupted = make_model(keras, **options)
    fit(interrupted, rank, callbacks=[checkpoint, Save()])  # 6 steps: a round, and half of the next one
    assert not any(differ(saved[0])) and any(differ(saved[1]))
    resumed = make_model(keras, seed=9, **options)
    resumed.set_weights(saved[0])
    resumed.optimizer.build(resumed.trainable_variables)
    for variable, value in zip(resumed.optimizer.variables, saved[1]):
        variable.assign(value)  # of which the callback broadcasts those of rank 0, as of a saved model
    fit(resumed, rank, epochs=2, start=1, callbacks=[hvdc.callbacks.ResidualCheckpoint(f"{directory}/residuals")])
    for expected, value in zip(whole.get_weights(), resumed.get_weights()):
        np.testing.assert_array_equal(value, expected)


def quadratic(rank, optimizer):
    """A matrix, and a step that pulls it to the rank's own target, with a given factor."""
    variable = tf.Variable(np.zeros((32, 64), np.float32), name="kernel")
    optimizer.build([variable])

    @tf.function(autograph=False)
    def step(factor):
        gradient = factor * (variable - float(rank))
        scale = getattr(optimizer, "dynamic_scale", None)
        optimizer.apply_gradients([(gradient if scale is None else gradient * scale, variable)])

    return variable, lambda factor=1.0: step(tf.constant(factor))


@pytest.mark.parametrize("module", KERASES)
@pytest.mark.parametrize("options", [{}, {"fragments": "stream"}], ids=["whole", "stream"])
def test_a_step_without_data_is_no_step(rank, module, options):
    """Keras learns the length of such data from a step that fails."""
    module = KERASES[module]
    model = make_model(module, local_steps=4, compression="int8", **options)
    x, y = data(rank, 6)
    batches = tf.data.Dataset.from_generator(
        lambda: ((x[i : i + 8], y[i : i + 8]) for i in range(0, len(x), 8)),
        output_signature=(tf.TensorSpec([8, 32]), tf.TensorSpec([8, 4])),
    )
    broadcast = hvdc.callbacks.BroadcastGlobalVariablesCallback(0)
    model.compile(model.optimizer, "mse", jit_compile=False)  # one step per execution
    for fits in range(1, 4):
        model.fit(batches, epochs=2, verbose=0, callbacks=[broadcast])
        assert hvd.allgather_object(model.optimizer._hvdc.rounds.steps) == [12 * fits] * hvd.size()
    assert not any(differ(model.get_weights()))


def test_passes_are_no_steps(rank, size):
    """Both kinds of gradient accumulation: two rounds of three steps of two passes."""
    mean = (size - 1) / 2
    with_passes = {"backward_passes_per_step": 2, "average_aggregated_gradients": True}
    optimizers = [hvdc.DistributedOptimizer(keras.optimizers.SGD(0.5), local_steps=3, **with_passes)]
    if IS_KERAS3:
        optimizer = keras.optimizers.SGD(0.5, gradient_accumulation_steps=2)
        optimizers.append(hvdc.DistributedOptimizer(optimizer, local_steps=3))
    for optimizer in optimizers:
        variable, step = quadratic(rank, optimizer)
        for passes in range(1, 13):
            step()
            steps = passes // 2
            # Each step halves the distance to the rank's target, each third one is followed by an average.
            distance = 0.5 ** (steps % 3)
            start = mean * (1 - 0.5 ** (steps // 3 * 3))
            np.testing.assert_allclose(variable.numpy(), start * distance + rank * (1 - distance), atol=1e-6)


@pytest.mark.skipif(not IS_KERAS3, reason="Keras 2 has another LossScaleOptimizer")
@pytest.mark.parametrize("way", ["inside", "around"])
def test_a_rank_that_overflows_leaves_out_its_own_step_and_stays_in_the_round(way, rank, size):
    inner, options = keras.optimizers.SGD(0.5), {"local_steps": 2, "compression": "none"}
    if way == "inside":
        scaler = keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0)
        scaler = hvdc.DistributedOptimizer(scaler, **options)
    else:
        scaler = keras.optimizers.LossScaleOptimizer(hvdc.DistributedOptimizer(inner, **options), initial_scale=8.0)
    variable, step = quadratic(rank, scaler)
    step(float("nan") if rank == 0 else 1.0)
    np.testing.assert_allclose(variable.numpy(), 0.5 * rank)
    step()
    np.testing.assert_allclose(variable.numpy(), 0.75 * (size - 1) / 2)
    assert len(set(hvd.allgather_object(float(scaler.dynamic_scale.numpy())))) == 2


def test_a_movement_that_is_not_finite_is_left_out_by_all_ranks(rank, size):
    variable = tf.Variable(np.zeros((32, 64), np.float32))
    sync = hvdc.LocalSteps([variable], local_steps=2, compression="int8", on_nonfinite="skip")
    for change in (1.0, float("nan") if rank == 0 else 1.0, rank, rank):
        variable.assign_add(tf.fill(variable.shape, float(change)))
        sync()
    np.testing.assert_allclose(variable.numpy(), size - 1, rtol=1e-2)


def test_ranks_that_disagree_get_one_error(rank):
    variable = tf.Variable(np.zeros((32, 64), np.float32))
    for name, values in {
        "local_steps": (2, 3),
        "outer": ("average", "nesterov:lr=0.7,momentum=0.9"),
        "local_warmup": (0, 4),
    }.items():
        options = {"local_steps": 2, name: values[rank % 2]}
        with pytest.raises(ValueError, match=rf"ranks disagree on {name}: .* has {values[0]}, .* has {values[1]}"):
            hvdc.LocalSteps([variable], compression="none", **options)


@pytest.mark.parametrize(
    ("variables", "averaged", "message"),
    [
        ((1, 2), (0, 0), "the number of variables to train: rank 0 has 1, rank 1 has 2;"),
        ((2, 1), (0, 1), "the number of variables to train: rank 0 has 2, rank 1 has 1;"),
        ((1, 1), (0, 1), "the number of gradients: rank 0 has 1, rank 1 has 2;"),
    ],
)
def test_ranks_with_other_variables_get_one_error_before_the_broadcast(variables, averaged, message, rank):
    trained = [tf.Variable(np.zeros((32, 64), np.float32)) for _ in range(variables[min(rank, 1)])]
    more = [tf.Variable(np.zeros((32, 64), np.float32)) for _ in range(averaged[min(rank, 1)])]
    with pytest.raises(ValueError, match=f"ranks disagree on {message}"):
        hvdc.LocalSteps(trained, averaged=more, local_steps=2, compression="none")


def test_ranks_with_other_names_or_shapes_get_one_error(rank):
    with pytest.raises(ValueError, match="ranks disagree on name: rank 0 has a, rank 1 has b;"):
        hvdc.LocalSteps([tf.Variable(tf.zeros([3]))], local_steps=2, name="ab"[min(rank, 1)])
    with pytest.raises(ValueError, match=r"gradient 0: rank 0 has Variable float32 \(3,\), rank 1 has .* \(4,\);"):
        hvdc.LocalSteps([tf.Variable(tf.zeros([3 + min(rank, 1)]))], local_steps=2)


def test_a_streamed_exchange_depends_on_nothing_of_the_step(rank):
    training = Training(rank, local_steps=ROUND, compression="int8", **STREAM)
    graph = training._step.get_concrete_function(tf.constant(0)).graph
    first, second = [op for op in graph.get_operations() if op.type == "Case"]
    assert "Horovod" in str(graph.as_graph_def())

    def before(op):
        found, waiting = set(), [op]
        while waiting:
            op = waiting.pop()
            if op not in found:
                found.add(op)
                waiting += [tensor.op for tensor in op.inputs] + list(op.control_inputs)
        return found

    assert second not in before(first) and first in before(second)
    kinds = {op.type for op in before(first)}
    assert not {kind for kind in kinds if kind.startswith(("Assign", "Mul", "ResourceApply"))}, kinds


@pytest.mark.parametrize("options", RESUMED.values(), ids=RESUMED)
def test_an_elastic_job_goes_back_to_the_synchronized_weights_of_the_commit(rank, options):
    """Rank 1 is killed in the middle of a round, and another one takes its place."""
    model = make_model(keras, **options)
    state = hvdc.elastic.KerasState(model)
    state.sync()
    fit_options = {"batch_size": 8, "verbose": 0, "shuffle": False}
    model.fit(*data(rank, 6), **fit_options)  # one round, and half of the next one
    state.save()
    rounds = model.optimizer._hvdc.rounds
    own, kept = model.get_weights(), hvd.allgather_object(replicated(rounds))
    rounds.show_synchronized()
    synchronized = model.get_weights()
    rounds.show_own()
    assert any(differ(own)) and not any(differ(synchronized))
    model.fit(*data(rank, 6), **fit_options)
    state.restore()
    if rank == 1:
        model = make_model(keras, seed=9, **options)
        state = hvdc.elastic.KerasState(model)
    else:
        state.reset()
    state.sync()
    rounds = model.optimizer._hvdc.rounds
    for value, expected in zip(model.get_weights(), synchronized):
        np.testing.assert_array_equal(value, expected)
    np.testing.assert_equal(replicated(rounds), kept[0])
    model.fit(*data(rank, 3), **fit_options)
    assert any(differ(model.get_weights()))
    model.optimizer.synchronize()
    assert rounds.steps == 9 and not any(differ(model.get_weights()))


def replicated(rounds):
    """The state of rounds that is equal on all ranks, but for where the round began."""
    return {name: np.asarray(v.numpy()) for name, v in rounds._replicated().items() if name != "counts"}
