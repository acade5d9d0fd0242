"""`auto` with `powersgd` among its candidates: chosen for all buckets at once, sharing the residuals of the others."""

import horovod.tensorflow as hvd
import introspect
import numpy as np
import pytest
import tensorflow as tf
from reducer_training import ReducerTraining
from tensorflow import keras

import hvd_compress as hvdc

pytestmark = pytest.mark.usefixtures("fixed_costs")

# (2, 30, 45) is a matrix of 60 x 45; (250,), (5, 3) and (30, 2) are sent as they are.
SHAPES = [(90, 120), (250,), (2, 30, 45), (5, 3), (30, 2), (200, 170)]
SIDES = {0: (90, 120), 2: (60, 45), 5: (200, 170)}
RANK = 2
NONE, INT8, LOW_RANK = range(3)
SPEC = f"auto:candidates=(none|int8|powersgd:rank={RANK})"
SPECS = ["none", "int8", f"powersgd:rank={RANK}", "hybrid:ratio=0.05,bits=4"]


def draw(rank, step):
    """Matrices with some large singular values that stay from step to step, and noise; tensors likewise."""
    steady, noise = np.random.default_rng(rank), np.random.default_rng([rank, step])
    found = []
    for shape in SHAPES:
        rows = int(np.prod(shape[:-1]))
        fixed = steady.standard_normal((rows, 2)) @ steady.standard_normal((2, shape[-1]))
        found.append((fixed.reshape(shape) + noise.standard_normal(shape)).astype(np.float32))
    return found


def new_training(rank, spec=SPEC, watched=False, **settings):
    settings = {"min_compress_size": 0, "bucket_bytes": 2**17, "policy": (), **settings}
    return ReducerTraining(rank, draw, spec, watched, **settings)


def factors_of(plan):
    """The right factors by gradient, columns x rank, float64."""
    (variable,) = introspect.factor_variables(plan)
    flat, found = variable.numpy().astype(np.float64), {}
    for i in introspect.model_wide_members(plan):
        if i in SIDES:
            columns = SIDES[i][1]
            found[i], flat = flat[: RANK * columns].reshape(RANK, columns).T, flat[RANK * columns :]
    assert flat.size == 0
    return found


@pytest.fixture(scope="module")
def shared(rank, costs_file):
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("HVD_COMPRESS_CALIBRATION", str(costs_file))
        return new_training(rank).shared()


@pytest.fixture
def training(shared):
    """With `SPEC` and no other settings."""
    return shared.rewound()


def powersgd(brought, right):
    """One step of Vogels et al. 2019, Algorithms 1 and 2: output, residuals, right factor; of all ranks' matrices."""
    left, _ = np.linalg.qr(np.mean([m @ right for m in brought], 0))
    own = [m.T @ left for m in brought]
    new = np.mean(own, 0)
    return left @ new.T, [m - left @ q.T for m, q in zip(brought, own)], new


def close(mine, theirs, tolerance=2e-5):
    assert np.linalg.norm(mine - theirs) <= tolerance * max(1e-3, np.linalg.norm(theirs))


def cosines(a, b):
    return np.abs((a * b).sum(0) / np.linalg.norm(a, axis=0) / np.linalg.norm(b, axis=0))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param(
            {"groups": 2, "residual_decay": 0.9, "residual_dtype": "bfloat16", "gradient_predivide_factor": 2.0},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_switching_to_and_fro_loses_nothing(settings, rank, size, gather, training):
    """Each step: what all ranks brought is what all receive and what all keep. Those of low rank are the paper's."""
    training = new_training(rank, **settings) if settings else training
    decay = settings.get("residual_decay", 1.0)
    predivide = settings.get("gradient_predivide_factor", 1.0)
    rounding = 2.0**-8 if "residual_dtype" in settings else 1e-5
    training.step()
    factors = factors_of(training.plan)
    for candidate in (LOW_RANK, LOW_RANK, INT8, LOW_RANK, NONE, NONE, LOW_RANK, INT8, NONE, LOW_RANK):
        training.choose(candidate)
        old, step = [predivide * gather(r) for r in training.residuals()], training.steps
        outputs = training.step()
        new = [predivide * gather(r) for r in training.residuals()]
        for i in range(len(SHAPES)):
            brought = np.array([draw(r, step)[i] for r in range(size)]) + decay * old[i]
            np.testing.assert_array_equal(gather(outputs[i]), [outputs[i]] * size)
            scale = np.abs(brought).max() + np.abs(new[i]).max()
            np.testing.assert_allclose(size * outputs[i] + new[i].sum(0), brought.sum(0), atol=4 * rounding * scale)
            if candidate == LOW_RANK and i in SIDES:
                output, left, right = powersgd(brought.reshape(size, *SIDES[i]), factors[i])
                close(outputs[i].reshape(SIDES[i]), output)
                close(new[i].reshape(size, *SIDES[i]), np.array(left), max(2e-5, rounding))
                np.testing.assert_allclose(cosines(factors_of(training.plan)[i], right), 1.0, atol=1e-5)
            elif candidate == LOW_RANK:
                assert not new[i].any()
        if candidate != LOW_RANK:  # they wait
            for i, factor in factors_of(training.plan).items():
                np.testing.assert_array_equal(factor, factors[i])
        factors = factors_of(training.plan)
    assert training.traces == 1
    assert any(r.any() for r in training.residuals())


def test_alone_it_is_powersgd_to_the_bit(rank):
    auto, fixed = (
        new_training(rank, f"auto:candidates=(powersgd:rank={RANK})"),
        new_training(rank, f"powersgd:rank={RANK}"),
    )
    for _ in range(4):
        for mine, theirs in zip(auto.step(), fixed.step()):
            np.testing.assert_array_equal(mine, theirs)
    assert introspect.bytes_sent(auto.plan) == introspect.bytes_sent(fixed.plan)
    kinds = [op.type for op in auto._step.get_concrete_function(*map(tf.constant, draw(0, 0))).graph.get_operations()]
    assert kinds.count("HorovodAllreduce") == 2
    assert not {"Case", "StatelessCase"} & set(kinds)  # there is nothing to switch


def test_without_residual(rank, size):
    training = new_training(rank, error_feedback=False)
    training.step()
    for candidate in (LOW_RANK, INT8, LOW_RANK):
        training.choose(candidate)
        factors, step = factors_of(training.plan), training.steps
        outputs = training.step()
        if candidate == LOW_RANK:
            for i, sides in SIDES.items():
                brought = [draw(r, step)[i].reshape(sides).astype(np.float64) for r in range(size)]
                close(outputs[i].reshape(sides), powersgd(brought, factors[i])[0])
    assert not introspect.residual_variables(training.plan)


@pytest.mark.slow
def test_some_variables_have_compressors_of_their_own(rank, size):
    training = new_training(rank, policy=(("v2", hvdc.Compression.int8), ("v4", hvdc.Compression.none)))
    training.step()
    training.choose(LOW_RANK)
    step = training.steps
    outputs = training.step()
    assert sorted(introspect.model_wide_members(training.plan)) == [0, 1, 3, 5]
    means = [np.mean([draw(r, step)[i] for r in range(size)], 0) for i in range(len(SHAPES))]
    assert [np.linalg.matrix_rank(outputs[i].reshape(s), 1e-3) for i, s in SIDES.items()] == [RANK, 45, RANK]
    np.testing.assert_allclose(outputs[2], means[2], atol=0.1)
    np.testing.assert_allclose(outputs[4], means[4], atol=1e-6)


@pytest.mark.slow
def test_ranks_with_other_clocks_choose_alike(rank, gather, monkeypatch):
    def other_clock(time):
        if rank == 0:
            return time
        return time * 1.5 - 1e6 + tf.cast(tf.random.uniform([], 0.0, 0.2), tf.float64)

    introspect.replace_clock(monkeypatch, other_clock)
    training = new_training(rank, f"auto:candidates=(none|int8|powersgd:rank={RANK}),probe_every=3")
    for step in range(40):
        if step in (5, 25):
            training.choose(LOW_RANK)
        outputs = training.step()
        choices = gather(training.selector.now.numpy())
        assert (choices == choices[0]).all(), choices
        assert len(set(choices[0])) == 1 or LOW_RANK not in choices[0]
        sums = gather(np.array([float(r.sum()) for r in outputs]))
        assert (sums == sums[0]).all()
    assert training.traces == 1


def test_a_nan_on_one_rank_leaves_no_trace(rank, size):
    training = new_training(rank, min_compress_size=40)
    training.step()
    for where in (0, 1, 3):  # a matrix, a vector, what is not compressed
        for _ in range(2):
            training.choose(LOW_RANK)
            training.step()
        training.choose(LOW_RANK)
        before = training.residuals(), factors_of(training.plan)
        values = draw(rank, 99)
        if rank == size - 1:
            values[where].reshape(-1)[-1] = np.nan
        assert any(np.isnan(r).any() for r in training.step(values))
        for a, b in zip(before[0], training.residuals()):
            np.testing.assert_array_equal(a, b)
        for i, factor in factors_of(training.plan).items():
            np.testing.assert_array_equal(factor, before[1][i])
        for _ in range(3):
            assert all(np.isfinite(r).all() for r in training.step())
        assert all(np.isfinite(value.numpy()).all() for value in training.selector)


@pytest.mark.slow
def test_what_lets_enough_through_is_chosen(rank):
    """Gradients of rank 1 pass, those of noise do not."""
    spec = "auto:objective=step,candidates=({}|powersgd:rank=2),target=0.9,probe_every=1"
    steady = np.random.default_rng(0)
    low = [
        (steady.standard_normal((int(np.prod(s[:-1])), 1)) @ steady.standard_normal((1, s[-1])))
        .reshape(s)
        .astype(np.float32)
        for s in SHAPES
    ]
    passes = new_training(rank, spec.format("hybrid:ratio=0.05,bits=4"))
    for _ in range(12):
        passes.step([(1.0 + 0.5 * rank) * x for x in low])
    report = introspect.bucket_reports(passes.plan)
    assert {bucket.chosen for bucket in report} == {"powersgd:rank=2"}
    # What hybrid had left before was no matrix of rank 1.
    assert all(bucket.candidates[1].through > 0.45 for bucket in report)
    assert "not hybrid:ratio=0.05,bits=4: lets" in str(introspect.report_of(passes.reducer))
    does_not = new_training(rank, spec.format("int8"))
    random = np.random.default_rng(rank)
    for _ in range(12):
        does_not.step([random.standard_normal(s).astype(np.float32) for s in SHAPES])
    assert {bucket.chosen for bucket in introspect.bucket_reports(does_not.plan)} == {"int8"}


def test_the_log_and_the_report_name_it(rank, capfd, training):
    for _ in range(3):
        training.step()
    for candidate, new in ((LOW_RANK, INT8), (INT8, LOW_RANK)):
        training.choose(candidate)
        training.step()
        training.choose(candidate)
        training.step()
        training.choose(candidate)
        capfd.readouterr()
        count = len(introspect.buckets(training.plan))
        introspect.propose(training.plan, new, rank)
        training.step()
        log, report = capfd.readouterr().err, introspect.bucket_reports(training.plan)
        assert [bucket.chosen for bucket in report] == [SPECS[new]] * count
        together = " for all buckets at once" if new == LOW_RANK else ""
        line = f"{SPECS[candidate]} -> {SPECS[new]}; predicted "
        assert log.count(line) == (count if rank == 0 else 0)
        if rank == 0:
            assert f" ms{together}, {SPECS[candidate]} measured " in log
        text = str(introspect.report_of(training.reducer))
        assert text.count("for all buckets at once") >= count
        assert all(bucket.together == (new == LOW_RANK) for bucket in report)
        total = report[0].predicted
        if new == LOW_RANK:
            assert all(bucket.predicted == total > 0 for bucket in report)


def test_a_restored_run_goes_on_to_the_bit(rank, training):
    first = training
    first.step()
    for candidate in (LOW_RANK, INT8, LOW_RANK):
        first.choose(candidate)
        first.step()
    saved = introspect.saved_state(first.plan)
    assert "auto_factors_2" in saved.replicated_state
    second = new_training(rank)
    introspect.set_pending(second.reducer, [introspect.state_through_file(saved)])
    second.steps = first.steps
    second._step.get_concrete_function(*map(tf.constant, draw(rank, 0)))  # makes the plan, which takes it
    for candidate in (LOW_RANK, INT8, LOW_RANK, NONE, LOW_RANK):
        first.choose(candidate)
        expected = first.step()
        second.choose(candidate)
        for mine, theirs in zip(second.step(), expected):
            np.testing.assert_array_equal(mine, theirs)
    for mine, theirs in zip(first.residuals(), second.residuals()):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.slow
def test_it_is_watched(rank, size):
    training = new_training(rank, watched=True)
    training.step()
    norms = []
    for candidate in (LOW_RANK, INT8, LOW_RANK):
        training.choose(candidate)
        old, step = training.residuals(), training.steps
        training.step()
        brought = [g + o for g, o in zip(draw(rank, step), old)]
        norms.append([np.sqrt(sum(np.sum(x**2) for x in xs)) for xs in (training.residuals(), brought)])
    plan = training.plan
    steps = introspect.recorded_steps(plan)
    buckets = len(introspect.buckets(plan))
    assert steps.buckets.compressor[1:].tolist() == [
        [LOW_RANK] * buckets,
        [INT8] * buckets,
        [LOW_RANK] * buckets,
    ]
    np.testing.assert_allclose(steps.residual_norm[1:], [n[0] for n in norms], rtol=1e-4)
    np.testing.assert_allclose(steps.error[[1, 3]], [norms[i][0] / norms[i][1] for i in (0, 2)], rtol=1e-4)
    sent = round(2 * (size - 1) / size * 4 * (RANK * sum(map(sum, SIDES.values())) + 250 + 15 + 60))
    assert steps.bytes[1] == steps.bytes[3] == sent
    assert (steps.buckets.wire[[1, 3], -1] > 0).all() and not steps.buckets.wire[[1, 3], :-1].any()
    assert (steps.buckets.encode[[1, 3], -1] > 0).all()
    assert (steps.exchange[2:] <= steps.seconds[2:] + 1e-6).all()


@pytest.mark.slow
def test_training_converges(rank, size):
    keras.utils.set_random_seed(1)
    digits = np.random.default_rng(0).standard_normal((10, 64)).astype(np.float32)
    random = np.random.default_rng([1, rank])
    labels = random.integers(0, 10, 640)
    images = digits[labels] + random.standard_normal((640, 64)).astype(np.float32)
    layers = [keras.layers.Dense(48, activation="relu"), keras.layers.Dense(10)]
    model = keras.Sequential([keras.Input((64,)), *layers])
    spec = "auto:candidates=(none|int8|powersgd:rank=2),probe_every=5"
    optimizer = hvdc.DistributedOptimizer(keras.optimizers.Adam(3e-3), compression=spec, min_compress_size=100)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=False)
    callbacks = [hvdc.callbacks.BroadcastGlobalVariablesCallback(0)]
    history = model.fit(images, labels, batch_size=32, epochs=6, verbose=0, callbacks=callbacks).history
    assert history["accuracy"][-1] > 0.97
    weights = np.concatenate([w.ravel() for w in model.get_weights()])
    everyone = hvd.allgather(tf.constant(weights[None])).numpy()
    assert (everyone == everyone[0]).all()
