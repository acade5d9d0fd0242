"""What is watched is what happens, and watching changes nothing."""

import csv
import dataclasses
import gc
import json
import struct
import weakref
from types import SimpleNamespace

import introspect
import numpy as np
import pytest
import tensorflow as tf
from marks import slow
from tensorflow import keras

import hvd_compress as hvdc
from hvd_compress.auto import comparisons, policy, start
from hvd_compress.common import devices, gradient_file
from hvd_compress.engine.reducer import watch_all
from hvd_compress.frontends.keras import compression_monitor
from hvd_compress.monitor import chrome_trace, clocks
from hvd_compress.monitor.gradients import MAX_STEPS, GradientRecorder
from hvd_compress.tools import doctor, run_log

SHAPES = [(300, 500), (64,), (70, 90)]


def gradients(rank, step):
    random = np.random.default_rng([rank, step])
    return [random.standard_t(3, shape).astype(np.float32) for shape in SHAPES]


def train(rank, steps, watched, spec, **settings):
    """The reduced gradients of each step, and the reducer."""
    reducer = introspect.new_reducer(spec, watched, **settings)
    variables = [tf.Variable(tf.zeros(shape)) for shape in SHAPES]
    step = tf.function(lambda *g: reducer(list(g), variables))
    return [[r.numpy() for r in step(*map(tf.constant, gradients(rank, t)))] for t in range(steps)], reducer


def read(reducer):
    plan = introspect.plan_of(reducer)
    return introspect.recorded_steps(plan), plan


@pytest.mark.parametrize(
    "spec",
    ["none", "topk:ratio=0.01", "quantize:bits=2,rounding=stochastic", "hybrid:ratio=0.05,bits=4"],
)
def test_some_ranks_watch_and_training_is_the_same_to_the_bit(spec, rank):
    plain, _ = train(rank, 3, False, spec)
    watched, _ = train(rank, 3, rank == 0, spec)
    for a, b in zip(plain, watched):
        for x, y in zip(a, b):
            np.testing.assert_array_equal(x, y)


def test_norms_errors_and_bytes_are_those_of_numpy(rank):
    _, reducer = train(rank, 4, True, "topk:ratio=0.01")
    steps, plan = read(reducer)
    assert steps.step.tolist() == [1, 2, 3, 4]
    (group,) = introspect.groups(plan)
    residual = [np.zeros(shape) for shape in group.shapes]
    k = [int(np.ceil(0.01 * shape[0])) for shape in group.shapes]
    for t in range(4):
        chunks = introspect.in_pieces(plan, gradients(rank, t))
        for b, bucket in enumerate(introspect.buckets(plan)):
            g2 = x2 = r2 = 0.0
            for i in bucket.chunks:
                g = chunks[i].astype(np.float64)
                x = g + residual[i]
                order = np.argsort(-np.abs(x), kind="stable")
                residual[i] = x.copy()
                residual[i][order[: k[i]]] = 0.0
                g2, x2, r2 = g2 + (g**2).sum(), x2 + (x**2).sum(), r2 + (residual[i] ** 2).sum()
            assert steps.buckets.gradient_norm[t, b] == pytest.approx(np.sqrt(g2), rel=1e-5)
            assert steps.buckets.error[t, b] == pytest.approx(np.sqrt(r2 / x2), rel=1e-4)
            assert steps.buckets.residual_norm[t, b] == pytest.approx(np.sqrt(r2), rel=1e-4)
    sent, uncompressed = introspect.bytes_sent(plan)
    np.testing.assert_array_equal(steps.bytes, sent)
    np.testing.assert_allclose(steps.ratio, uncompressed / sent)


def test_without_a_residual_the_error_is_that_of_a_second_encoding(rank):
    """An unbiased quantizer keeps no residual: its error follows from the bound and from what was decoded."""
    spec = "quantize:bits=8,rounding=stochastic"
    _, reducer = train(rank, 2, True, spec, error_feedback=False)
    steps, plan = read(reducer)
    assert (steps.buckets.residual_norm == 0.0).all()
    compressed = steps.buckets.error[:, : len(introspect.buckets(plan))]
    assert ((compressed > 1e-4) & (compressed < 0.2)).all()


def test_times_are_in_order_and_lie_within_the_step(rank):
    _, reducer = train(rank, 4, True, "int8")
    plan = introspect.plan_of(reducer)
    rows = introspect.recorded_rows(plan)
    header, columns = introspect.record_layout()
    cells = rows[:, header:].reshape(4, -1, columns)
    begun, sent, arrived, done = (cells[:, :, i] for i in range(4))
    assert (begun <= sent).all() and (sent <= arrived).all() and (arrived <= done).all()
    steps = introspect.recorded_steps(plan, rows)
    assert np.isnan(steps.seconds[0]) and (steps.seconds[1:] > 0).all()
    assert (steps.exchange[1:] <= steps.seconds[1:] + 1e-6).all()
    assert (steps.wire <= done.max(1) - begun.min(1) + 1e-6).all()
    assert len(introspect.recorded_rows(plan)) == 0


def test_a_nan_on_one_rank_is_seen_on_all(rank):
    reducer = introspect.new_reducer("int8", watched=True)
    variables = [tf.Variable(tf.zeros(shape)) for shape in SHAPES]
    for t in range(3):
        values = gradients(rank, t)
        if rank == 1 and t == 1:
            values[0][0, 0] = np.nan
        reducer([tf.constant(v) for v in values], variables)
    steps, _ = read(reducer)
    assert steps.finite.tolist() == [True, False, True]
    assert np.isnan(steps.error[1]) and np.isfinite(steps.error[[0, 2]]).all()


def test_auto_and_indexed_slices_are_watched(rank, fixed_costs, capfd):
    reducer = introspect.new_reducer("auto:candidates=(none|int8),warmup_steps=0", watched=True)
    variables = [tf.Variable(tf.zeros([100, 8])), tf.Variable(tf.zeros([300, 100]))]

    @tf.function
    def step(x):
        rows = tf.IndexedSlices(tf.ones([2, 8]), tf.constant([1, 2]), tf.constant([100, 8]))
        return reducer([rows, x], variables)

    for t in range(4):
        step(tf.random.stateless_normal([300, 100], [rank, t]))
        if t == 1:
            introspect.force_choice(introspect.plan_of(reducer), 1)
    steps, plan = read(reducer)
    recorded = introspect.recorded_buckets(plan)
    assert [bucket.name for bucket in recorded] == ["0", "sparse-0"]
    assert steps.buckets.compressor[2, 0] == 1
    assert steps.buckets.bytes[2, 0] == recorded[0].sent[1]
    assert 0.0 < steps.error[2] < 0.05
    # Rows of embeddings are not tried, though they may be compressed or not.
    tried = dataclasses.replace(steps, trial=np.array([False, False, True, False]))
    compression_monitor._log_trials(0, [tried], recorded, [0])
    assert ("auto tried int8 in 1 of 4 steps" in capfd.readouterr().err) == (rank == 0)


def test_what_auto_chooses_from_is_written(rank, tmp_path, fixed_costs, capfd, monkeypatch):
    # It would otherwise choose by times, which differ between machines.
    monkeypatch.setattr(start, "_first_choice", lambda auto, rules, nbytes, *others: np.zeros(len(nbytes)))
    monkeypatch.setattr(comparisons.Comparisons, "add", lambda *arguments: False)
    monkeypatch.setattr(policy, "propose", lambda _, state, *others: (state, 0 * state.choice, tf.constant(-1)))
    directory = tmp_path / "run"
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.layers.Input([40]), keras.layers.Dense(200), keras.layers.Dense(1)])
    spec = "auto:candidates=(none|int8)"
    model.compile(hvdc.DistributedOptimizer(keras.optimizers.SGD(0.01), compression=spec), "mse", jit_compile=False)
    x, y = np.random.default_rng(rank).standard_normal((2, 16 * 30, 40))

    class Try(keras.callbacks.Callback):
        """Makes one trial of two steps of the first epoch, and takes care that `auto` makes none."""

        def on_train_batch_end(self, batch, logs=None):
            auto = introspect.plan_of(model.optimizer._hvdc.reducer).auto
            auto.state.choice.assign([0])
            auto.state.now.assign([1] if batch in (15, 16) and not self.epoch else [0])

        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

    callbacks = [hvdc.callbacks.CompressionMonitor(directory), Try()]
    model.fit(x, y[:, :1], batch_size=16, epochs=2, verbose=0, callbacks=callbacks)
    err = capfd.readouterr().err
    report = model.optimizer.compression_report().auto
    if rank:
        assert "auto tried" not in err
        return
    assert "hvd_compress: epoch 1: auto tried int8 in 2 of 30 steps" in err and "epoch 2: auto tried" not in err
    run = run_log.load(str(directory))
    assert set(run.auto) == {"auto", "none", "int8", "fp16"}
    for columns in run.auto.values():
        assert (columns["step_ms"] > 0).all() and (columns["ms_per_progress"] >= 0.99 * columns["step_ms"]).all()
        assert columns["step"][-1] == 60
    assert run.auto["auto"]["ms_per_progress"][-1] == pytest.approx(1e3 * report.choice.per_progress, rel=1e-5)
    tags = set(scalars(directory / "tensorboard"))
    for name in ("choice", "none", "int8", "fp16"):
        assert {f"hvd_compress/auto/{name}/{what}" for what in ("step_ms", "progress", "ms_per_progress")} <= tags
    assert {"hvd_compress/auto/none/gained_seconds", "hvd_compress/auto/trial_steps"} <= tags
    # The first step was with auto's own first choice.
    np.testing.assert_array_equal(run.trial[1:], run.first.buckets["0"]["compressor"][1:] == "int8")
    assert run.trial.sum() == 2


@pytest.mark.parametrize("kind", ["keras", "tf_keras"])
def test_the_callback_writes_what_happened(kind, rank, size, tmp_path, capfd):
    if kind == "tf_keras":
        kernel = pytest.importorskip("tf_keras")
    else:
        kernel = keras
    directory = tmp_path / "run"

    def fit(callbacks):
        kernel.utils.set_random_seed(3)
        model = kernel.Sequential([kernel.layers.Input([40]), kernel.layers.Dense(50), kernel.layers.Dense(1)])
        optimizer = hvdc.DistributedOptimizer(kernel.optimizers.SGD(0.01), compression="int8")
        model.compile(optimizer, "mse", jit_compile=False)
        losses = []

        class Losses(kernel.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                losses.append(float(logs["loss"]))

        random = np.random.default_rng(rank)
        x, y = random.standard_normal((64, 40)), random.standard_normal((64, 1))
        history = model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0, callbacks=[*callbacks, Losses()])
        return model.get_weights(), history.history, np.array(losses)

    plain, _, running = fit([])
    logged = []

    def log(step, values):
        logged.append((step, dict(values)))
        if step == 6:
            raise OSError("the service is gone")

    weights, history, _ = fit([hvdc.callbacks.CompressionMonitor(directory, update_freq=2, log=log)])
    rounding = 1e-4 if devices.has_gpu() else 0  # a GPU rounds otherwise in each training
    for a, b in zip(plain, weights):
        np.testing.assert_allclose(a, b, rtol=0, atol=rounding)
    assert set(history) == {"loss", "ratio", "comm_ms"}
    assert all(ratio > 3 for ratio in history["ratio"]) and all(ms > 0 for ms in history["comm_ms"])

    assert rank == 0 or not logged
    with open(directory / f"rank-{rank}.csv") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(1, 9))
    assert [int(row["epoch"]) for row in rows] == [0] * 4 + [1] * 4
    # Keras's running means of an epoch tell each step's loss.
    sums = running.reshape(2, 4) * np.arange(1, 5)
    expected = np.diff(sums, axis=1, prepend=0.0).ravel()
    np.testing.assert_allclose([float(row["loss"]) for row in rows], expected, rtol=1e-4)
    assert all(float(row["memory_mb"]) > 10 for row in rows)
    assert [row["step_ms"] == "" for row in rows] == [True, False, False, False] * 2
    with open(directory / f"rank-{rank}-buckets.csv") as file:
        buckets = list(csv.DictReader(file))
    assert {(row["bucket"], row["compressor"]) for row in buckets} == {("0", "int8"), ("dense-0", "none")}
    if rank == 0:
        run = json.loads((directory / "run.json").read_text())
        assert run["ranks"] == size and run["model"]["parameters"] == 41 * 50 + 51
        assert run["first_step_seconds"] > 0 and run["finished"] and run["settings"]["compression"] == "int8"
        err = capfd.readouterr().err
        assert f"the first step took {run['first_step_seconds']:.1f} s" in err
        assert err.count("CompressionMonitor: log failed at step 6 (OSError('the service is gone'))") == 1
        assert [step for step, _ in logged] == [2, 4, 6]
        events = scalars(directory / "tensorboard")
        assert sorted(events["hvd_compress/loss"]) == [2, 4, 6, 8]
        assert events["hvd_compress/loss"][2] == pytest.approx(expected[:2].mean(), rel=1e-4)
        assert events["hvd_compress/bucket_0/compressor"] == {2: "int8"}
        for step, values in logged:  # the same as TensorBoard's
            assert values == pytest.approx({tag: found[step] for tag, found in events.items() if tag in values})
        assert {
            "ratio",
            "exchange_ms",
            "encode_ms",
            "wire_ms",
            "decode_ms",
            "relative_error",
            "residual_norm",
        } <= {tag.split("/")[1] for tag in events}


def scalars(directory):
    """What a TensorBoard directory holds: {tag: {step: value}}."""
    (path,) = directory.iterdir()
    data, found = path.read_bytes(), {}
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        event = tf.compat.v1.Event.FromString(data[12 : 12 + length])
        data = data[16 + length :]
        for value in event.summary.value:
            array = tf.make_ndarray(value.tensor)
            text = value.metadata.plugin_data.plugin_name == "text"
            found.setdefault(value.tag, {})[event.step] = array[0].decode() if text else float(array)
    return found


def test_a_model_that_was_traced_before_is_traced_again(rank, tmp_path):
    model = keras.Sequential([keras.layers.Input([40]), keras.layers.Dense(50), keras.layers.Dense(1)])
    model.compile(hvdc.DistributedOptimizer(keras.optimizers.SGD(0.01), compression="int8"), "mse", jit_compile=False)
    x, y = np.ones((32, 40)), np.ones((32, 1))
    model.fit(x, y, batch_size=16, verbose=0)
    # On one rank only: its function is traced again, with the same collectives.
    callbacks = [hvdc.callbacks.CompressionMonitor(tmp_path / "run")] if rank == 0 else []
    model.fit(x, y, batch_size=16, verbose=0, callbacks=callbacks)
    if rank == 0:
        rows = (tmp_path / "run" / "rank-0.csv").read_text().splitlines()
        assert [row.split(",")[0] for row in rows] == ["step", "3", "4"]


def test_profile_of_a_custom_loop(rank, tmp_path):
    weights = tf.Variable(tf.ones([60, 60]))

    @tf.function
    def train_step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ weights) ** 2)
        tape = hvdc.DistributedGradientTape(tape, compression="int8")
        weights.assign_sub(0.01 * tape.gradient(loss, [weights])[0])
        return loss

    losses = []
    with hvdc.profile(tmp_path / "run") as prof:
        for t in range(12):
            loss = train_step(tf.random.stateless_normal([4, 60], [rank, t]))
            prof.step(loss)
            losses.append(float(loss))
    stats = prof.stats()
    assert stats["loss"]["mean"] == pytest.approx(np.mean(losses[1:]))
    assert stats["loss"]["std"] == pytest.approx(np.std(losses[1:]))
    assert stats["loss"]["p90"] == pytest.approx(np.percentile(losses[1:], 90))
    assert stats["ratio"]["mean"] > 3 and stats["step_ms"]["p50"] > 0
    lines = prof.summary().splitlines()
    assert lines[0].startswith("12 steps; the first, which compiles, took ")
    assert lines[1].split() == ["mean", "std", "p50", "p90", "p99", "max"]
    assert any(line.startswith("wire_ms") for line in lines)
    rows = (tmp_path / "run" / f"rank-{rank}.csv").read_text().splitlines()
    assert len(rows) == 13


def test_a_trace_has_all_ranks_on_one_time_line(rank, size, tmp_path, monkeypatch):
    ahead = 50.0 * rank  # of this rank's clock, and of the timestamps in the graph
    clock = clocks.time.time
    monkeypatch.setattr(clocks, "time", SimpleNamespace(time=lambda: clock() + ahead, sleep=clocks.time.sleep))
    own = chrome_trace.rank_steps

    def rank_steps(*arguments):
        found = own(*arguments)
        return found._replace(begin=found.begin + ahead, ready=found.ready + ahead, times=found.times + ahead)

    monkeypatch.setattr(chrome_trace, "rank_steps", rank_steps)
    weights = tf.Variable(tf.ones([300, 200]))

    @tf.function
    def train_step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ weights) ** 2)
        tape = hvdc.DistributedGradientTape(tape, compression="int8", bucket_bytes=2**17)
        weights.assign_sub(0.01 * tape.gradient(loss, [weights])[0])
        return loss

    path = tmp_path / "trace.json"
    with hvdc.profile(trace=path) as prof:
        for t in range(4):
            prof.step(train_step(tf.random.stateless_normal([4, 300], [rank, t])))
    if rank:
        assert not path.exists()
        return
    trace = json.loads(path.read_text())
    error = 1e6 * trace["metadata"]["clocks_aligned_within_seconds"]
    assert 0.0 < error < 10e6  # the offset is 50 s
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["tid"] > 0]
    ends = {(e["pid"], e["args"]["step"], e["tid"], e["name"]): e["ts"] + e["dur"] for e in slices}
    keys = {key[1:3] for key in ends}
    assert {step for step, _ in keys} == {1, 2, 3, 4} and {key[0] for key in ends} == set(range(size))
    for step, bucket in keys:
        # No rank has received a bucket before all have encoded it.
        encoded = [ends[(r, step, bucket, "encode")] for r in range(size)]
        # A bucket that has overtaken an earlier one is never alone on the wire.
        # What takes less than a microsecond is left out.
        received = [
            max(ends.get((r, step, bucket, name), 0.0) for name in ("queue", "wire"))
            or ends[(r, step, bucket, "decode")]
            for r in range(size)
        ]
        # A busy machine may take a time late, but not by a part of the 50 s by which the clocks differ.
        assert min(received) >= max(encoded) - 2.0 * error - 1e6


def test_a_profile_reads_the_plan_that_takes_steps(rank):
    def make_step(size):
        weights = tf.Variable(tf.ones([size, size]))

        @tf.function
        def step():
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(weights) * (1.0 + rank)
            tape = hvdc.DistributedGradientTape(tape, compression="int8")
            weights.assign_sub(0.01 * tape.gradient(loss, [weights])[0])
            return loss

        return step

    large, small = make_step(80), make_step(60)
    with hvdc.profile() as both:
        for _ in range(3):
            both.step(large() + small())
    assert both.stats()["bytes"]["max"] > 6400  # the larger one
    with hvdc.profile() as prof:
        for _ in range(4):
            prof.step(small())
    assert prof.summary().startswith("4 steps")
    assert "loss" in prof.stats() and prof.stats()["bytes"]["max"] < 6400


def test_a_run_goes_on_with_the_next_plan(rank, tmp_path):
    """That of another training, and then that of the same variables after a reset; no step is counted twice."""
    variables = [tf.Variable(tf.zeros([size, size])) for size in (50, 60)]
    reducers = [introspect.new_reducer("int8") for _ in variables]

    def train(i, steps):
        for _ in range(steps):
            reducers[i]([tf.fill(variables[i].shape, 1.0 + rank)], [variables[i]])
            prof.step()

    with hvdc.profile(tmp_path) as prof:
        train(0, 3)
        reducers[0] = None
        gc.collect()
        train(1, 2)
        states = introspect.states_of_reducer(reducers[1])
        train(1, 2)
        while prof._session.read() is not None:
            pass
        reducers[1].replan(states)  # its steps 3 and 4 are made again
        train(1, 3)
    if rank:
        return
    columns = run_log.load(str(tmp_path)).first.steps
    assert columns["step"].tolist() == list(range(1, 9))
    assert columns["bytes"].tolist() == [columns["bytes"][0]] * 3 + [columns["bytes"][3]] * 5
    assert columns["bytes"][3] > columns["bytes"][0]


@pytest.mark.parametrize("spec", ["none", "int8", "auto:candidates=(none|int8)", "powersgd:rank=2"])
@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16])
def test_bytes_are_those_that_the_optimizer_reports(spec, dtype, rank, fixed_costs):
    reducer = introspect.new_reducer(spec, watched=True)
    variables = [tf.Variable(tf.zeros(shape, dtype)) for shape in SHAPES]
    for t in range(3):
        reducer([tf.cast(g, dtype) for g in gradients(rank, t)], variables)
    steps, plan = read(reducer)
    sent, stock = plan.bytes_sent()
    assert steps.bytes[-1] == pytest.approx(sent, abs=64)  # a bucket counts its own rounding
    assert steps.buckets.uncompressed_bytes[-1].sum() == pytest.approx(stock, abs=64)


@pytest.mark.parametrize("compression", ["int8", *slow("auto:local_steps=(1|2),candidates=int8")])
def test_a_watched_model_is_freed(compression, rank, tmp_path):
    model = keras.Sequential([keras.layers.Input([40]), keras.layers.Dense(50)])
    model.compile(hvdc.DistributedOptimizer(keras.optimizers.SGD(0.01), compression=compression), "mse")
    x = np.full([8, 40], 1.0 + rank)
    model.fit(x, np.zeros([8, 50]), 4, verbose=0, callbacks=[hvdc.callbacks.CompressionMonitor(str(tmp_path))])
    reducer, kernel = weakref.ref(introspect.reducer_of(model.optimizer)), weakref.ref(model.layers[0])
    del model
    keras.backend.clear_session()
    gc.collect()
    assert reducer() is None and kernel() is None


@pytest.mark.np4
def test_the_first_rank_of_a_process_set_writes_what_one_rank_writes(process_sets, rank, tmp_path):
    own = process_sets[rank % 2]
    model = keras.Sequential([keras.layers.Input([40]), keras.layers.Dense(50)])
    model.compile(hvdc.DistributedOptimizer(keras.optimizers.SGD(0.01), compression="int8", process_set=own), "mse")
    logged = []
    monitor = hvdc.callbacks.CompressionMonitor(tmp_path, gradients=1, log=lambda step, values: logged.append(step))
    model.fit(np.full([8, 40], 1.0 + rank), np.zeros([8, 50]), 4, verbose=0, callbacks=[monitor])
    is_first = rank == min(own.ranks)
    written = {path.name for path in tmp_path.iterdir()}
    assert {f"rank-{rank}.csv", f"rank-{rank}-buckets.csv"} <= written
    assert {"run.json", "gradients.npz", "tensorboard"} <= written if is_first else "run.json" not in written
    assert bool(logged) == is_first
    if is_first:
        run = run_log.load(str(tmp_path))
        assert run.meta["ranks"] == 2 and run.num_steps == 2 and doctor.examine(run) is not None


def test_a_trace_that_cannot_be_written_is_an_error_on_all_ranks(tmp_path):
    before = list(watch_all)
    with (
        pytest.raises(OSError, match="profile: trace, rank 0: .*No such file"),
        hvdc.profile(trace=tmp_path / "missing" / "trace.json"),
    ):
        pass
    assert watch_all == before


def test_errors_say_what_is_wrong(tmp_path):
    for make in (hvdc.callbacks.CompressionMonitor, lambda log_dir: hvdc.profile(log_dir or 0)):
        with pytest.raises(TypeError, match="^log_dir must be the path of a directory, got (None|0)$"):
            make(None)
    with pytest.raises(ValueError, match="update_freq must be 'batch', 'epoch' or a whole number from 1 on, got 0"):
        hvdc.callbacks.CompressionMonitor(tmp_path, update_freq=0)
    model = keras.Sequential([keras.layers.Input([4]), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(TypeError, match="CompressionMonitor watches hvdc.DistributedOptimizer"):
        model.fit(
            np.ones((4, 4)),
            np.ones((4, 1)),
            verbose=0,
            callbacks=[hvdc.callbacks.CompressionMonitor(tmp_path)],
        )
    with pytest.raises(RuntimeError, match="inside of `with hvdc.profile"):
        hvdc.profile().step()


@pytest.mark.parametrize("spec", ["int8", "topk:ratio=0.01", "quantize:bits=2,rounding=stochastic"])
def test_compare_finds_in_recorded_gradients_what_the_monitor_measured(spec, rank, size, tmp_path):
    """With two ranks, a rank's errors do not depend on the other's gradients."""
    path = str(tmp_path / "gradients.npz")
    reducer = introspect.new_reducer(spec)
    reducer.watch(lambda plan: GradientRecorder(plan, path, 1))
    variables = [tf.Variable(tf.zeros(shape), name=f"w{i}") for i, shape in enumerate(SHAPES)]
    step = tf.function(lambda *g: reducer(list(g), variables))
    for t in range(10):
        step(*map(tf.constant, gradients(rank, t)))
    steps, plan = read(reducer)
    recorded = gradient_file.read(path)
    assert len(recorded) == MAX_STEPS  # no more than these
    for t, arrays in enumerate(recorded):
        assert list(arrays) == ["w0", "w1", "w2"]
        for array, value in zip(arrays.values(), gradients(rank, t)):
            np.testing.assert_array_equal(array, value)
    if rank != 0:  # a stochastic compressor draws other numbers on other ranks
        return
    (row,) = hvdc.compare(path, spec).rows
    assert row.relative_error == pytest.approx(steps.error[0], rel=0.01 if "stochastic" in spec else 1e-4)
    buckets = len(introspect.buckets(plan))
    payload = steps.buckets.bytes[0, :buckets].sum() + 4 * 64  # and the bias, which is not compressed
    assert row.bytes == pytest.approx(payload, abs=64 * buckets)  # a bucket's flag
    if steps.residual_norm[0]:
        missing = steps.residual_norm[MAX_STEPS - 1]
        total = sum(
            np.concatenate([g[0].ravel(), g[2].ravel()]) for g in (gradients(rank, t) for t in range(MAX_STEPS))
        )
        assert row.error_with_residual == pytest.approx(missing / np.linalg.norm(total), rel=1e-4)


def test_rank_0_records_gradients_of_a_fit(rank, tmp_path, monkeypatch):
    """Gradients of every third step; a second fit writes another file, and leaves the first as it is."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Input([40]), keras.layers.Embedding(9, 30), keras.layers.Dense(50)])
    optimizer = hvdc.DistributedOptimizer(keras.optimizers.SGD(0.01), compression="int8")
    model.compile(optimizer, "mse", jit_compile=False)
    x = np.random.default_rng(rank).integers(0, 9, [32, 40])
    y = np.zeros([32, 40, 50], np.float32)
    for name, every in [("first", 3), ("plain", None), ("second", 2)]:
        monitor = hvdc.callbacks.CompressionMonitor(str(tmp_path / name), gradients=every)
        model.fit(x, y, batch_size=4, callbacks=[monitor], verbose=0)
    first, second = (tmp_path / name / "gradients.npz" for name in ("first", "second"))
    assert first.exists() == second.exists() == (rank == 0)
    assert not (tmp_path / "plain" / "gradients.npz").exists()
    if rank == 0:
        with np.load(first) as file:
            assert {name.partition("/")[0] for name in file.files} == {"3", "6"}
            assert {file[name].shape for name in file.files} == {(30, 50), (50,)}  # no IndexedSlices
        with np.load(second) as file:  # steps are counted on, 16 before
            assert {name.partition("/")[0] for name in file.files} == {"18", "20", "22", "24"}


def test_a_profile_records_gradients(rank, tmp_path):
    w = tf.Variable(tf.ones([40, 50]), name="w")

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(w * x)
        return hvdc.DistributedGradientTape(tape, compression="int8").gradient(loss, [w])

    with hvdc.profile(tmp_path, gradients=2) as prof:
        for t in range(5):
            step(tf.fill([40, 50], float(t + rank)))
            prof.step()
    path = tmp_path / "gradients.npz"
    assert path.exists() == (rank == 0)
    if rank == 0:
        assert [float(arrays["w"][0, 0]) for arrays in gradient_file.read(path)] == [1.0, 3.0]
    again = tf.function(step.python_function)
    with hvdc.profile(tmp_path, gradients=1):
        again(tf.fill([40, 50], 7.0))
    if rank == 0:
        assert [float(arrays["w"][0, 0]) for arrays in gradient_file.read(path)] == [7.0]


def test_a_full_disk_stops_recording_and_not_training(rank, tmp_path, capfd):
    reducer = introspect.new_reducer("int8")
    reducer.watch(lambda plan: GradientRecorder(plan, str(tmp_path / "missing" / "g.npz"), 1))
    variable = tf.Variable(tf.zeros([40, 50]))
    for _ in range(3):
        (reduced,) = reducer([tf.ones([40, 50])], [variable])
    np.testing.assert_allclose(reduced, 1.0, rtol=1e-2)
    assert capfd.readouterr().err.count("training goes on") == 1
