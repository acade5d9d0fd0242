"""`compression="auto"`: all ranks choose alike, switching loses nothing, and the choice is explained."""

import functools
import re

import introspect
import numpy as np
import pytest
import tensorflow as tf
from reducer_training import ReducerTraining
from tensorflow import keras

import hvd_compress as hvdc
from hvd_compress.auto import comparisons, start
from hvd_compress.auto.progress import Row
from hvd_compress.common import determinism, tracing
from hvd_compress.cost import Calibration, KernelCost, Link
from hvd_compress.cost.calibration import COLLECTIVES
from hvd_compress.engine.compression_report import CompressionReport
from hvd_compress.kernels import native

pytestmark = pytest.mark.usefixtures("fixed_costs")

SHAPES = [(150, 500), (64,), (350, 500), (10, 10), (600, 450)]  # two buckets
SPEC = "auto:candidates=(none|int8|hybrid:ratio=0.05,bits=4)"
INT2 = "auto:candidates=(hybrid:ratio=0.01,bits=4|int2)"  # of the latter, progress is hardly in doubt


@functools.lru_cache(maxsize=4)
def gradients(rank, step):
    random = np.random.default_rng([rank, step])
    return [random.standard_t(3, shape).astype(np.float32) for shape in SHAPES]


def new_training(rank, spec=SPEC, **settings):
    return ReducerTraining(rank, gradients, spec, min_compress_size=200, **settings)


@pytest.fixture(scope="module")
def shared(rank, costs_file):
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("HVD_COMPRESS_CALIBRATION", str(costs_file))
        return new_training(rank).shared()


@pytest.fixture
def training(shared):
    return shared.rewound()


def test_switching_loses_nothing_and_traces_once(training, rank, size, gather):
    sent = [np.zeros(shape, np.float64) for shape in SHAPES]
    given = [np.zeros(shape, np.float64) for shape in SHAPES]
    training.step()  # makes the plan; whatever it chose
    first = [np.mean([gradients(r, 0)[i] for r in range(size)], 0) for i in range(len(SHAPES))]
    sent = [given - gather(r).mean(0) for given, r in zip(first, training.residuals())]
    given = first
    for candidate in (1, 2, 2, 0, 0, 2, 1, 0, 2):
        training.choose(candidate)
        step = training.steps
        reduced = training.step()
        sent = [s + r for s, r in zip(sent, reduced)]
        for i in range(len(SHAPES)):
            given[i] = given[i] + np.mean([gradients(r, step)[i] for r in range(size)], 0)
    left = [gather(r).mean(0) for r in training.residuals()]
    for s, r, total in zip(sent, left, given):
        np.testing.assert_allclose(s + r, total, atol=2e-4)
    assert np.abs(left[0]).max() > 0  # the last step kept something
    assert training.traces == 1


def test_uncompressed_steps_send_all_that_was_left(training, size):
    training.step()
    training.choose(2)
    training.step()
    assert any(np.abs(r).max() > 0 for r in training.residuals())
    training.choose(0)
    training.step()
    assert all(np.abs(r).max() == 0 for r in training.residuals())
    training.choose(0)
    assert introspect.nothing_is_compressed(training.plan)
    step = training.steps
    for i, reduced in enumerate(training.step()):
        mean = np.mean([gradients(r, step)[i] for r in range(size)], 0)
        np.testing.assert_allclose(reduced, mean, atol=1e-5)


def test_ranks_with_other_clocks_and_speeds_choose_alike(rank, gather, monkeypatch):
    def other_clock(time):
        # Another zero, another speed, and times that jump.
        if rank == 0:
            return time
        return time * 1.5 - 1e6 + tf.cast(tf.random.uniform([], 0.0, 0.2), tf.float64)

    introspect.replace_clock(monkeypatch, other_clock)
    training = new_training(rank)
    for _ in range(40):
        results = training.step()
        choices = gather(introspect.selector_state(training.plan).choice.numpy())
        assert (choices == choices[0]).all(), choices
        same = gather(np.array([float(r.sum()) for r in results]))
        assert (same == same[0]).all()
    assert training.traces == 1


def test_a_nan_on_one_rank_keeps_residuals_and_choice(training, rank, gather):
    training.step()
    training.choose(2)
    training.step()
    before = training.residuals()
    values = [gradient.copy() for gradient in gradients(rank, 99)]
    if rank == 1:
        values[2][5, 5] = np.nan
    assert any(np.isnan(r).any() for r in training.step(values))
    for a, b in zip(before, training.residuals()):
        np.testing.assert_array_equal(a, b)
    for _ in range(3):
        assert all(np.isfinite(r).all() for r in training.step())
    state = introspect.selector_state(training.plan)
    assert all(np.isfinite(value.numpy()).all() for value in state)


def test_a_nan_in_an_uncompressed_step_of_auto_keeps_other_residuals(rank):
    policy = (("v0", hvdc.Compression.parse("topk:ratio=0.1")),)
    training = new_training(rank, policy=policy)
    training.step()
    training.choose(0)
    training.step()
    training.choose(0)
    assert introspect.nothing_is_compressed(training.plan)
    before = training.residuals()
    assert np.abs(before[0]).max() > 0  # that of topk, which auto does not decide on
    values = [gradient.copy() for gradient in gradients(rank, 99)]
    if rank == 1:
        values[2][5, 5] = np.nan
    assert np.isnan(training.step(values)[2][5, 5])
    for a, b in zip(before, training.residuals()):
        np.testing.assert_array_equal(a, b)
    training.step()
    assert np.abs(training.residuals()[0] - before[0]).max() > 0


def test_a_checkpoint_that_is_loaded_while_training_drops_what_was_proposed(training, rank):
    training.step()
    training.choose(1)
    training.step()
    saved = introspect.saved_state(training.plan)
    introspect.propose(training.plan, 2, rank)
    introspect.restore(training.reducer, [saved])
    training.step()
    assert set(introspect.selector_state(training.plan).choice.numpy()) == {1}


def test_what_candidates_lose_is_measured(training):
    for _ in range(12):
        training.step()
    measured = introspect.selector_state(training.plan).progress.numpy()
    none, int8, hybrid = measured[Row.LOST] / measured[Row.ENERGY]
    assert none == 0 and int8 < 1e-2 and 0.1 < hybrid < 0.9  # hybrid at 5% of a heavy tail


def test_fast_steps_with_little_progress_are_left(rank):
    """Where steps with `hybrid` are faster, but the rest of the step takes most of the time."""
    training = new_training(rank, spec="auto:candidates=(int8|hybrid:ratio=0.01,bits=4),probe_every=1")
    steady = [np.random.default_rng(1).standard_normal(shape).astype(np.float32) for shape in SHAPES]
    for step in range(30):
        if step == 4:
            training.choose(1)  # as if it had been found faster
        noise = [0.2 * x for x in gradients(rank, step)]
        training.step([s + n for s, n in zip(steady, noise)])
        introspect.selector_state(training.plan).rest.assign(10.0)
    report = introspect.bucket_reports(training.plan)
    assert {bucket.chosen for bucket in report} == {"int8"}
    int8, hybrid = report[0].candidates
    assert int8.progress > 0.95 and hybrid.progress < 0.9
    assert "% of the progress" in hybrid.why


def test_hadamard_makes_less_progress_where_updates_are_normalized(rank):
    sizes = [np.exp(2.0 * np.random.default_rng(1).standard_normal(shape)).astype(np.float32) for shape in SHAPES]
    found = []
    for normalized in (False, True):
        training = new_training(rank, "auto:candidates=(none|hadamard),min_progress=0.1", normalized=normalized)
        for step in range(12):
            training.step([size * (0.3 + x) for size, x in zip(sizes, gradients(rank, step))])
        _, hadamard = introspect.bucket_reports(training.plan)[0].candidates
        found.append(hadamard.progress)
    assert found[1] < 0.9 * found[0]


def test_a_first_choice_that_costs_progress_is_left(rank, monkeypatch):
    """What is traced alone is simulated, unless it is hardly in doubt. The usual progress, here 0.94, would keep it."""
    introspect.trace_all_candidates(monkeypatch, False)
    monkeypatch.setattr(start, "_first_choice", lambda auto, rules, nbytes, *_: np.full(len(nbytes), 1))
    monkeypatch.setattr(start, "usual", lambda lost, name, normalized: 0.94)
    training = new_training(rank, spec="auto:candidates=(int8|hybrid:ratio=0.01,bits=4)")
    steady = [np.random.default_rng(1).standard_normal(shape).astype(np.float32) for shape in SHAPES]
    for step in range(40):
        training.step([s + 0.2 * x for s, x in zip(steady, gradients(rank, step))])
        introspect.selector_state(training.plan).rest.assign(10.0)
        introspect.expect_quick_traces(training.plan)
        if step == 5:
            assert introspect.traced_candidates(training.plan) == [1]
            _, hybrid = introspect.bucket_reports(training.plan)[0].candidates
            assert hybrid.progress < 0.9
    assert introspect.traced_candidates(training.plan) == [0, 1] and training.traces == 2
    assert chosen(training) == {"int8"}


def test_what_is_hardly_in_doubt_is_measured_later(rank, gather, monkeypatch):
    introspect.trace_all_candidates(monkeypatch, False)
    monkeypatch.setattr(start, "_first_choice", lambda auto, rules, nbytes, *_: np.full(len(nbytes), 1))
    training, usual = new_training(rank, spec=INT2), set()
    for step in range(68):  # candidates are compared in the steps 32 and 64
        training.step()
        if step < 8:
            usual.add(introspect.bucket_reports(training.plan)[0].candidates[1].progress)
        if step == 30:
            assert training.traces == 1 and not introspect.selector_state(training.plan).progress.numpy().any()
            introspect.seem_to_train_for(training.plan, 1e4)
        if step == 45:  # between two comparisons
            saved = introspect.saved_state(training.plan).replicated_state
            assert saved["auto_progress"][Row.ENERGY, 1] > 0
    assert introspect.traced_candidates(training.plan) == [1] and training.traces == 2
    assert len(usual) == 1 and usual.pop() > 0.95
    _, int2 = introspect.bucket_reports(training.plan)[0].candidates
    progress = gather(np.array([int2.progress]))
    # Of noise, which does not repeat, little is learnt: the lower bound counts, 0.89.
    assert (progress == progress[0]).all() and 0.8 < int2.progress < 0.95
    # A resumed training goes on measuring from its first trace on.
    resumed = new_training(rank, spec=INT2)
    introspect.set_pending(resumed.reducer, [introspect.saved_state(training.plan)])
    resumed.step()
    assert introspect.measured_candidates(resumed.plan) == [1]


def test_all_candidates_are_traced_once_they_are_worth_it(rank, gather, monkeypatch):
    introspect.trace_all_candidates(monkeypatch, False)
    training = new_training(rank)
    for _ in range(8):  # the next step is the first one in which candidates are compared
        training.step()
    (first,) = set(training.selector.choice.numpy())
    assert introspect.traced_candidates(training.plan) == [first] and training.traces == 1
    if rank == 0:  # which decides
        introspect.want_traced(training.plan, [0, 1, 2])
    traces = []
    for _ in range(4):
        values = gather(np.array([float(np.sum(x)) for x in training.step()]))
        assert (values == values[0]).all()
        traces.append(training.traces)
    assert traces == [1, 1, 2, 2]
    assert introspect.traced_candidates(training.plan) == [0, 1, 2]
    before = training.residuals()
    training.choose(2)
    given = [np.mean(gather(g), 0) for g in gradients(rank, training.steps)]
    reduced = training.step()
    for total, out, old, new in zip(given, reduced, before, training.residuals()):
        np.testing.assert_allclose(out + gather(new).mean(0), total + gather(old).mean(0), atol=1e-4)


def test_a_loop_that_made_variables_traces_more_candidates(rank, monkeypatch):
    """TensorFlow lets a function make variables in its first trace only: here the optimizer's."""
    introspect.trace_all_candidates(monkeypatch, False)
    variable = tf.Variable(tf.ones([64, 100]))
    optimizer = hvdc.DistributedOptimizer(keras.optimizers.Adam(0.01), compression=SPEC)

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(variable * x))
        optimizer.apply_gradients([(tape.gradient(loss, variable), variable)])
        return loss

    data = np.random.default_rng(rank).standard_normal((12, 64, 100)).astype(np.float32)
    losses = []
    for batch, x in enumerate(data):
        losses.append(float(step(tf.constant(x))))
        if batch == 7 and rank == 0:
            introspect.want_traced(introspect.plan_of(optimizer), [0, 1, 2])
    assert introspect.traced_candidates(introspect.plan_of(optimizer)) == [0, 1, 2]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("steps_per_execution", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_fit_traces_all_candidates_once_they_are_worth_it(steps_per_execution, rank, gather, monkeypatch):
    introspect.trace_all_candidates(monkeypatch, False)
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input([40]), keras.layers.Dense(50), keras.layers.Dense(10)])
    optimizer = hvdc.DistributedOptimizer(keras.optimizers.SGD(0.01), compression=SPEC, min_compress_size=200)
    model.compile(optimizer, "mse", jit_compile=False, steps_per_execution=steps_per_execution)
    traced = []

    class NoCost(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            plan = introspect.plan_of(optimizer)
            traced.append(len(introspect.traced_candidates(plan)))
            if batch == 7 and rank == 0:
                introspect.want_traced(plan, [0, 1, 2])

    random = np.random.default_rng(rank)
    x, y = random.standard_normal((160, 40)).astype("float32"), random.standard_normal((160, 10)).astype("float32")
    model.fit(x, y, batch_size=8, callbacks=[NoCost()], verbose=0)
    assert traced[0] == 1 and traced[-1] == 3
    for weights in model.get_weights():
        of_ranks = gather(weights)
        np.testing.assert_array_equal(of_ranks, [weights] * len(of_ranks))


def test_a_restored_choice_is_traced(rank, monkeypatch):
    first = new_training(rank)
    first.step()
    first.choose(2)
    first.step()
    introspect.trace_all_candidates(monkeypatch, False)
    second = new_training(rank)
    introspect.set_pending(second.reducer, [introspect.saved_state(first.plan)])
    second.steps = first.steps
    for mine, theirs in zip(second.step(), first.step()):
        np.testing.assert_array_equal(mine, theirs)


def with_residuals(rank, gather):
    """A training whose last step used hybrid, and the mean of the residuals that this left."""
    training = new_training(rank)
    training.step()
    training.choose(2)
    training.step()
    left = [gather(r).mean(0) for r in training.residuals()]
    assert np.abs(left[0]).max() > 0
    return training, left


def test_restored_residuals_are_sent_though_nothing_is_compressed(rank, size, gather, monkeypatch):
    first, left = with_residuals(rank, gather)
    introspect.trace_all_candidates(monkeypatch, False)
    monkeypatch.setattr(start, "_LEAST_GAIN", dict.fromkeys(native.KINDS, 1e9))
    second = new_training(rank, bucket_bytes=200_000)  # in other buckets, which begin with no choice
    introspect.set_pending(second.reducer, [introspect.saved_state(first.plan)])
    second.steps = first.steps
    for i, reduced in enumerate(second.step()):
        mean = np.mean([gradients(r, first.steps)[i] for r in range(size)], 0)
        np.testing.assert_allclose(reduced, mean + left[i], atol=1e-4)
    assert all(np.abs(r).max() == 0 for r in second.residuals())


def test_a_checkpoint_of_other_candidates(rank, gather, size):
    """As in a policy, or after an update of the default ones: positions stand for other compressors."""
    first, left = with_residuals(rank, gather)
    second = new_training(rank, "auto:candidates=(int8|powersgd:rank=1),min_progress=0.1")
    introspect.set_pending(second.reducer, [introspect.saved_state(first.plan)])
    second.steps = first.steps
    reduced = second.step()
    assert chosen(second) <= {"int8", "powersgd:rank=1"}
    for i, (out, new) in enumerate(zip(reduced, second.residuals())):
        given = np.mean([gradients(r, first.steps)[i] for r in range(size)], 0)
        np.testing.assert_allclose(out + gather(new).mean(0), given + left[i], atol=1e-4)


@pytest.mark.parametrize("same", [True, False])
def test_factors_of_the_link_refer_to_its_calibration(same, rank, costs_file, tmp_path, monkeypatch):
    first = new_training(rank)
    first.step()
    introspect.selector_state(first.plan).link.assign([1.0, 5.0])
    saved = introspect.saved_state(first.plan)
    if not same:
        slower, calibration = tmp_path / "slower.json", Calibration.load(costs_file)
        links = dict.fromkeys(COLLECTIVES, Link(1e-4, 4e-8))
        Calibration(calibration.ranks, links, calibration.kernels).save(slower)
        monkeypatch.setenv("HVD_COMPRESS_CALIBRATION", str(slower))
    second = new_training(rank)
    introspect.set_pending(second.reducer, [saved])
    second.steps = first.steps
    second.step()
    np.testing.assert_allclose(introspect.selector_state(second.plan).link, [1.0, 5.0 if same else 1.0], rtol=1e-3)


def test_what_was_measured_stays_while_a_candidate_is_held(rank, monkeypatch):
    introspect.trace_all_candidates(monkeypatch, False)
    monkeypatch.setattr(start, "_first_choice", lambda auto, rules, nbytes, *_: np.full(len(nbytes), 1))
    training = new_training(rank, f"auto:candidates=(int8|{HYBRID})")
    for _ in range(6):  # no candidates are compared yet
        training.step()
    state = introspect.selector_state(training.plan)
    for held in (0, None):
        training.plan.auto.hold(held)
        tracing.forget_traces([training._step])
        assert state.progress.numpy()[Row.ENERGY, 1] > 0
        assert introspect.measured_candidates(training.plan) == ([1] if held is None else [])
        training.step()
        assert not state.measured.numpy().any()  # of the steps before
        # A checkpoint, also one that is loaded now, knows nothing of the hold.
        saved = introspect.saved_state(training.plan)
        assert set(saved.replicated_state["auto_choice"]) == set(saved.replicated_state["auto_now"]) == {1}
        introspect.restore(training.reducer, [saved])
        training.step()
        assert chosen(training) == {HYBRID if held is None else "int8"}
        assert introspect.traced_candidates(training.plan) == [1 if held is None else 0]


def test_what_was_measured_after_a_warm_up_is_restored(rank, monkeypatch):
    introspect.trace_all_candidates(monkeypatch, False)
    monkeypatch.setattr(start, "_first_choice", lambda auto, rules, nbytes, *_: np.full(len(nbytes), 1))
    spec = f"auto:candidates=(int8|{HYBRID}),warmup=int8,warmup_steps=2"
    first, second = new_training(rank, spec), new_training(rank, spec)
    for _ in range(6):
        first.step()
    saved = introspect.saved_state(first.plan)
    measured = saved.replicated_state["auto_progress"]
    assert measured[Row.ENERGY, 1] > 0
    introspect.set_pending(second.reducer, [saved])
    second.steps = first.steps
    second.step()
    assert chosen(second) == {HYBRID}
    found = introspect.selector_state(second.plan).progress.numpy()
    np.testing.assert_allclose(found[Row.ENERGY, 1], measured[Row.ENERGY, 1], rtol=0.1)


def test_a_save_leaves_what_the_graph_has_measured(rank, monkeypatch):
    """Once all candidates are traced."""
    introspect.trace_all_candidates(monkeypatch, False)
    training = new_training(rank, "auto:candidates=(none|int8)")
    for _ in range(8):
        training.step()
    introspect.want_traced(training.plan, [0, 1])
    for _ in range(8):
        training.step()
    assert introspect.traced_candidates(training.plan) == [0, 1]
    before = introspect.selector_state(training.plan).progress.numpy()
    assert (before[Row.ENERGY] > 0).all()
    saved = introspect.saved_state(training.plan).replicated_state
    np.testing.assert_array_equal(saved["auto_progress"], before)


HYBRID = "hybrid:ratio=0.05,bits=4"
WARMUP = f"auto:candidates=(none|int8),warmup=({HYBRID}),warmup_steps=6"


def chosen(training):
    return {bucket.chosen for bucket in introspect.bucket_reports(training.plan)}


@pytest.fixture
def begins_with(monkeypatch):
    """Sets what `auto` chooses first, after the warm-up if there is one; then it compares nothing."""
    introspect.trace_all_candidates(monkeypatch, False)
    monkeypatch.setattr(comparisons.Comparisons, "add", lambda *arguments: False)

    def begin(candidate):
        monkeypatch.setattr(start, "_first_choice", lambda auto, rules, nbytes, *_: np.full(len(nbytes), candidate))

    begin(0)
    return begin


def test_a_warm_up_has_its_own_compressor_and_leaves_no_residual(begins_with, rank, size, gather, capfd):
    training = new_training(rank, WARMUP)
    for step in range(6):
        reduced = training.step()
        assert np.count_nonzero(reduced[2]) <= 0.11 * reduced[2].size  # 5% of each rank
        assert step == 5 or chosen(training) == {HYBRID}
    assert training.traces == 1
    left = [gather(r).mean(0) for r in training.residuals()]
    assert np.abs(left[0]).max() > 0
    for i, reduced in enumerate(training.step()):
        mean = np.mean([gradients(r, 6)[i] for r in range(size)], 0)
        np.testing.assert_allclose(reduced, mean + left[i], atol=1e-4)
    assert chosen(training) == {"none"}
    assert all(np.abs(r).max() == 0 for r in training.residuals())
    training.step()
    assert introspect.nothing_is_compressed(training.plan) and training.traces == 2
    err = capfd.readouterr().err
    if rank == 0:
        assert re.search(rf"auto begins with bucket 0 .*{re.escape(HYBRID)}, .*, until step 6\n", err)
        assert f"auto: the warm-up with {HYBRID} is over; now none\n" in err


@pytest.mark.parametrize("warmup", ["none", HYBRID, "powersgd:rank=1"])
def test_what_follows_a_warm_up_takes_over_its_residuals(begins_with, warmup, rank, gather):
    begins_with(1)
    training = new_training(rank, f"auto:candidates=(none|int8),warmup=({warmup}),warmup_steps=3")
    before = [np.zeros(shape) for shape in SHAPES]
    for step in range(5):
        reduced = training.step()
        left = [gather(r).mean(0) for r in training.residuals()]
        for i, (out, old, new) in enumerate(zip(reduced, before, left)):
            given = np.mean([gradients(r, step)[i] for r in range(2)], 0)
            np.testing.assert_allclose(out + new, given + old, atol=1e-4)
        before = left
        assert chosen(training) == ({warmup} if step < 2 else {"int8"})
    assert introspect.traced_candidates(training.plan) == [1]
    assert set(training.selector.before.numpy()) == {1}


def test_the_trace_after_a_warm_up_also_measures(begins_with, rank):
    begins_with(1)
    training = new_training(rank, f"{INT2},warmup=int8,warmup_steps=3")
    for _ in range(5):
        training.step()
    assert chosen(training) == {"int2"} and introspect.measured_candidates(training.plan) == [1]
    assert training.traces == 2


@pytest.mark.parametrize("steps", [2, 6, 8])
def test_a_warm_up_goes_on_in_a_run_that_resumes(begins_with, steps, rank, capfd):
    first = new_training(rank, WARMUP)
    for _ in range(steps):
        first.step()
    second = new_training(rank, WARMUP)
    introspect.set_pending(second.reducer, [introspect.saved_state(first.plan)])
    second.steps = first.steps
    capfd.readouterr()
    for _ in range(6):
        for mine, theirs in zip(second.step(), first.step()):
            np.testing.assert_array_equal(mine, theirs)
        if rank == 0 and second.steps == steps + 1:
            begins = re.search("auto begins with bucket 0 .*", capfd.readouterr().err)[0]
            assert begins.endswith(", until step 6") == (steps < 6) and (HYBRID in begins) == (steps < 6)
        assert chosen(first) == chosen(second) == ({HYBRID} if first.steps < 6 else {"none"})
        if first.steps < 6:
            assert introspect.traced_candidates(second.plan) == [2]


def test_a_run_that_goes_back_warms_up_again(begins_with, rank):
    training, second = new_training(rank, WARMUP), new_training(rank, WARMUP)
    for _ in range(2):
        training.step()
    saved, steps = introspect.saved_state(training.plan), training.steps
    expected = [training.step() for _ in range(6)]
    second.steps = 0
    for _ in range(8):
        second.step()
    introspect.restore(second.reducer, [saved])
    second.steps = steps
    for results in expected:
        for mine, theirs in zip(second.step(), results):
            np.testing.assert_array_equal(mine, theirs)


def test_a_warm_up_before_the_shortest_step_is_looked_for(begins_with, rank):
    spec = f"auto:objective=step,candidates=(int8|{HYBRID}),warmup=int8,warmup_steps=3"
    training = new_training(rank, spec)
    traced = []
    for _ in range(5):
        training.step()
        traced.append(introspect.traced_candidates(training.plan))
    assert traced == [[0], [0], [0, 1], [0, 1], [0, 1]]
    assert training.traces == 2


def test_a_guard_comes_before_a_warm_up(begins_with, rank):
    training = new_training(rank, WARMUP)
    training.step()

    def hold(candidate):
        training.plan.auto.hold(candidate)
        tracing.forget_traces([training._step])

    for held, steps, then in ((1, 2, "int8"), (None, 1, HYBRID), (1, 4, "int8"), (None, 2, "none")):
        hold(held)
        for _ in range(steps):
            training.step()
            assert chosen(training) == {then}, training.steps
    training.step()
    assert introspect.nothing_is_compressed(training.plan)


def test_a_target_that_nothing_reaches_means_no_compression(rank):
    training = new_training(rank, spec="auto:objective=step,candidates=(none|hybrid:ratio=0.05,bits=4),target=0.99")
    for _ in range(15):
        training.step()
    assert {bucket.chosen for bucket in introspect.bucket_reports(training.plan)} == {"none"}


def test_warm_up_and_phases_set_the_target(rank):
    spec = (
        "auto:objective=step,candidates=(int8|hybrid:ratio=0.05,bits=4),target=0.01,warmup_steps=20,"
        "phases=(40:0.9),max_slowdown=0,probe_every=1"
    )
    training = new_training(rank, spec=spec)
    for _ in range(20):
        training.step()
    assert {bucket.chosen for bucket in introspect.bucket_reports(training.plan)} == {"int8"}
    training.choose(1)  # as if it had been found faster
    for _ in range(26):
        training.step()
    assert {bucket.chosen for bucket in introspect.bucket_reports(training.plan)} == {"int8"}
    assert introspect.bucket_reports(training.plan)[0].switches >= 1


def test_rank_0_logs_switches_and_the_report_explains(rank, capfd):
    training = new_training(rank)
    training.step()
    started = capfd.readouterr().err
    training.choose(1)
    for _ in range(12):  # the choice may change once more, and is measured from its second step on
        training.step()
    capfd.readouterr()
    plan = training.plan
    other = 1 if int(introspect.selector_state(plan).choice[0]) == 2 else 2
    spec = ["none", "int8", "hybrid:ratio=0.05,bits=4"][other]
    while not all(bucket.measured for bucket in introspect.bucket_reports(plan)):  # a switch in the last steps
        training.step()
    capfd.readouterr()
    introspect.propose(plan, other, rank)
    before = introspect.selected(plan)
    training.step()
    log = capfd.readouterr().err
    if rank == 0:
        assert "auto begins with bucket 0 (" in started
        nbytes = introspect.selector_bytes(plan)[0]
        assert f"bucket 0 ({nbytes / 1e6:.1f} MB): {before[0]} -> {spec}; predicted " in log
        assert f" ms, {before[0]} measured " in log
    else:
        assert "hvd_compress" not in started + log
    report = introspect.bucket_reports(training.plan)
    assert all(bucket.chosen == spec for bucket in report)
    for bucket in report:
        assert bucket.predicted > 0 and bucket.switches >= 1
        assert bucket.measured is None  # that of the compressor before does not count
        assert [c.compressor for c in bucket.candidates] == ["none", "int8", "hybrid:ratio=0.05,bits=4"]
        assert [c.compressor for c in bucket.candidates if not c.why] == [spec]
    assert "not none: " in str(CompressionReport(tuple(report)))
    auto = CompressionReport(tuple(report)).auto
    assert [each.compressor for each in auto.fixed] == ["none", "int8", "hybrid:ratio=0.05,bits=4", "fp16"]
    chosen, fp16 = (next(each for each in auto.fixed if each.compressor == name) for name in (spec, "fp16"))
    assert auto.choice.per_progress == pytest.approx(chosen.per_progress) and auto.choice.step > 0
    assert fp16.step > 0 and fp16.per_progress == fp16.step
    assert str(CompressionReport(tuple(report))).startswith(f"auto after {auto.steps} steps")


def test_groups_with_pieces_of_different_shapes(rank, size):
    training = new_training(rank, groups=2)
    for _ in range(4):
        reduced = training.step()
        assert all(np.isfinite(r).all() for r in reduced)
    assert len(introspect.buckets(training.plan)) == 2 and training.traces == 1
    assert (introspect.selector_state(training.plan).progress.numpy()[Row.ENERGY] > 0).all()
    assert len({group.shapes[0] for group in introspect.groups(training.plan)}) == 2


def test_policy_gives_variables_other_compressors(rank, size):
    policy = (("emb*", hvdc.Compression.none), ("dense/*", hvdc.Compression.int8))
    spec = "auto:candidates=(none|int8)"
    reducer = introspect.new_reducer(spec, min_compress_size=200, policy=policy)
    names = ["embedding/table", "dense/kernel", "other/kernel"]
    variables = [tf.Variable(tf.zeros([40, 50]), name=name) for name in names]
    values = [tf.random.stateless_normal([40, 50], [rank, i]) for i in range(3)]
    reduced = reducer(values, variables)
    plan = introspect.plan_of(reducer)
    assert [group.compressor.spec for group in introspect.groups(plan)] == ["int8", spec]
    assert introspect.uncompressed_buckets(plan) == [(0,)]
    mean = np.mean([tf.random.stateless_normal([40, 50], [r, 0]) for r in range(size)], 0)
    np.testing.assert_allclose(reduced[0], mean, atol=1e-6)
    assert introspect.bytes_sent(plan)[0] > 0


def test_a_calibration_file_is_used_or_refused_alike(rank, size, tmp_path, monkeypatch):
    path = tmp_path / "link.json"
    link, kernels = Link(1e-4, 8e-9), {spec: KernelCost(1e-5, 1e-9, 1e-10, 1e-10) for spec in ("none", "int8")}
    calibration = Calibration(size, dict.fromkeys(COLLECTIVES, link), kernels)
    calibration.save(path)
    monkeypatch.setenv("HVD_COMPRESS_CALIBRATION", str(path))
    training = new_training(rank, spec="auto:candidates=(none|int8)")
    training.step()
    model = calibration.model()
    nbytes = introspect.selector_bytes(training.plan)[0]
    predicted = introspect.bucket_reports(training.plan)[0].candidates[1].predicted
    if rank == 0:  # whose file counts
        found = model.predict("int8", nbytes)
        assert predicted == pytest.approx(found.total + found.burst, rel=1e-3)  # as in the middle of a step
    with pytest.raises(ValueError, match="does not know what int4 costs"):
        new_training(rank, spec="auto:candidates=(none|int4)").step()
    if rank == 1:
        path.write_text("{}")
    with pytest.raises(ValueError, match="HVD_COMPRESS_CALIBRATION, rank 1: .* is not a calibration"):
        new_training(rank, spec="auto:candidates=(none|int8)").step()
    calibration.save(path)
    if rank == 0:
        monkeypatch.delenv("HVD_COMPRESS_CALIBRATION")
    with pytest.raises(ValueError, match="is not set on rank 0"):
        new_training(rank, spec="auto:candidates=(none|int8)").step()


@pytest.mark.parametrize("spec", ["auto", "auto:delay=(0|1)", "auto:local_steps=(1|4)"])
def test_it_cannot_choose_where_operations_are_deterministic(spec, monkeypatch):
    monkeypatch.setattr(determinism, "is_enabled", lambda: True)
    variable = tf.Variable(tf.zeros([40, 50]))
    optimizer = hvdc.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=spec)
    optimizer.build([variable])
    with pytest.raises(ValueError, match="^auto.* after tf.config.experimental.enable_op_determinism"):
        for _ in range(4):
            optimizer.apply_gradients([(tf.ones([40, 50]), variable)])
