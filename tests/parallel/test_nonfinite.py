"""`on_nonfinite`: one rank's gradient is not finite, and all ranks do the same about it."""

import horovod.tensorflow as hvd
import introspect
import numpy as np
import pytest
import tensorflow as tf
from specs import KINDS
from test_optimizer import IS_KERAS3, KERASES, flat_weights, make_data, make_model

import hvd_compress as hvdc


@pytest.fixture(params=sorted(KERASES))
def keras(request):
    return KERASES[request.param]


# Every two of compressor, Keras, and eager or in a tf.function meet; no code looks at all three.
COVERED = [("none", "keras", True), ("int8", "keras", False), ("topk:ratio=0.1", "keras", True)]
COVERED += [("hybrid:ratio=0.1,bits=4", "keras", False)]
if "tf_keras" in KERASES:
    COVERED += [("none", "tf_keras", False), ("int8", "tf_keras", True)]
each_covered = pytest.mark.parametrize("spec, keras, in_function", COVERED, indirect=["keras"])


def gradients_of(rank, step):
    """Of a matrix, which is compressed, and of a bias, which is not."""
    rng = np.random.default_rng([rank, step])
    return [rng.standard_normal((40, 50)).astype(np.float32), rng.standard_normal(3).astype(np.float32)]


class Training:
    """Two variables under SGD with momentum, which is state that a step changes."""

    def __init__(self, keras, in_function=True, **options):
        sgd = keras.optimizers.SGD(0.5, momentum=0.9)
        self.optimizer = hvdc.DistributedOptimizer(sgd, **options)
        self.variables = [tf.Variable(tf.zeros([40, 50])), tf.Variable(tf.zeros([3]))]
        self.optimizer.build(self.variables)
        self._function = tf.function(self._apply) if in_function else self._apply

    def step(self, gradients):
        self._function([tf.constant(g) for g in gradients])

    def _apply(self, gradients):
        self.optimizer.apply_gradients(zip(gradients, self.variables))

    def state(self):
        """Everything that a step changes."""
        residuals = [r for plan in introspect.plans_of(self.optimizer) for r in introspect.residual_variables(plan)]
        return [np.array(v) for v in (*self.variables, *self.optimizer.variables, *residuals)]


def spoil(gradients, where):
    gradients = [g.copy() for g in gradients]
    gradients[where].flat[1] = np.inf if where else np.nan
    return gradients


def same(first, second):
    return len(first) == len(second) and all(np.array_equal(a, b) for a, b in zip(first, second))


@each_covered
def test_skip(spec, in_function, keras, rank, size, gather):
    """As if the bad steps had never been."""
    options = {"compression": spec, "on_nonfinite": "skip"}
    with_bad, without = Training(keras, in_function, **options), Training(keras, **options)
    for step in range(3):
        gradients = gradients_of(rank, step)
        if step == 2:
            before = with_bad.state()
            for where in (0, 1):
                with_bad.step(spoil(gradients, where) if rank == size - 1 else gradients)
                assert same(with_bad.state(), before)
        with_bad.step(gradients)
        without.step(gradients)
    assert same(with_bad.state(), without.state())
    assert int(with_bad.optimizer.iterations) == 3
    everyone = gather(with_bad.variables[0].numpy())
    assert (everyone == everyone[0]).all() and np.abs(everyone).max() > 0


@each_covered
def test_raise(spec, in_function, keras, rank, size, gather):
    training = Training(keras, in_function, compression=spec, on_nonfinite="raise")
    for step in range(2):
        training.step(gradients_of(rank, step))
    before = training.state()
    bad = gradients_of(rank, 2)
    with pytest.raises(tf.errors.InvalidArgumentError) as info:
        training.step(spoil(bad, 0) if rank == 0 else bad)
    lines = hvd.allgather_object(next(line for line in str(info.value).splitlines() if "not finite" in line))
    assert "gradients of step 3 are not finite on at least one rank" in lines[0]
    assert set(lines) == {lines[0]}
    # weights and residuals as before (a graph may have counted the step already), and all goes on
    after = training.state()
    assert same(after[:2], before[:2])
    assert same([x for x in after if x.ndim], [x for x in before if x.ndim])
    training.step(gradients_of(rank, 3))
    everyone = gather(training.variables[0].numpy())
    assert (everyone == everyone[0]).all() and np.isfinite(everyone).all()


@pytest.mark.parametrize(
    "spec, keras",
    [*((spec, "keras") for spec in KINDS), *(("int8", name) for name in KERASES if name != "keras")],
    indirect=["keras"],
)
def test_propagate_is_the_default(spec, keras, rank, size):
    training = Training(keras, compression=spec)
    training.step(gradients_of(rank, 0))
    before = training.state()
    bad = gradients_of(rank, 1)
    training.step(spoil(bad, 0) if rank == size - 1 else bad)
    assert not np.isfinite(training.variables[0].numpy()).all()
    assert int(training.optimizer.iterations) == 2
    residuals = [x for x in before if x.ndim][4:]
    assert same([x for x in training.state() if x.ndim][4:], residuals)
    assert bool(residuals) == (spec != "none")


@pytest.mark.parametrize("policy", ["skip", "propagate"])
def test_bad_slices_leave_the_residuals_alone(policy, keras, rank, size):
    """The residuals are of another gradient than the one that is bad."""
    opt = hvdc.DistributedOptimizer(keras.optimizers.SGD(1.0), compression="topk:ratio=0.1", on_nonfinite=policy)
    weight, table = tf.Variable(tf.zeros([40, 50])), tf.Variable(tf.zeros([size, 3]))

    def step(i, value):
        slices = tf.IndexedSlices(tf.fill([1, 3], value), tf.constant([rank]), tf.constant([size, 3]))
        opt.apply_gradients([(tf.constant(gradients_of(rank, i)[0]), weight), (slices, table)])
        return introspect.residuals(introspect.plan_of(opt))[0], weight.numpy()

    residual, before = step(0, 1.0)
    after, moved = step(1, np.nan if rank == 0 else 1.0)
    np.testing.assert_array_equal(after, residual)
    assert np.array_equal(moved, before) == (policy == "skip")
    assert np.isfinite(table.numpy()).all() == (policy == "skip")


@pytest.mark.parametrize(
    "spec, keras", [("int8", "keras"), *(("none", name) for name in KERASES if name != "keras")], indirect=["keras"]
)
def test_skip_in_fit(spec, keras, rank, size, gather):
    model = make_model(keras, seed=0)
    opt = hvdc.DistributedOptimizer(keras.optimizers.Adam(0.01), compression=spec, on_nonfinite="skip")
    model.compile(optimizer=opt, loss="mse")
    x, y = make_data(rank, n=80)
    if rank == size - 1:
        x[35] = np.nan
    model.fit(x, y, batch_size=16, verbose=0, shuffle=False)
    everyone = gather(flat_weights(model))
    assert (everyone == everyone[0]).all() and np.isfinite(everyone).all()
    assert int(opt.iterations) == 4


def test_skip_with_backward_passes_per_step(keras, rank, size):
    """The whole step is left out, and nothing of it is in the next one's sums."""
    opt = hvdc.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=2, on_nonfinite="skip")
    weight = tf.Variable(tf.zeros([3]))
    opt.build([weight])

    @tf.function
    def step(gradient):
        opt.apply_gradients([(gradient, weight)])

    seen = []
    for i in range(6):
        step(tf.constant([np.nan if i == 2 and rank == 0 else i + 1.0, 0.0, rank], tf.float32))
        seen.append(weight.numpy())
    mean = (size - 1) / 2
    np.testing.assert_allclose(seen[3], [-3.0, 0.0, -2 * mean])
    np.testing.assert_allclose(seen[5], [-14.0, 0.0, -4 * mean])


def test_local_variables_do_not_count(keras, rank):
    opt = hvdc.DistributedOptimizer(keras.optimizers.SGD(1.0), on_nonfinite="skip")
    local, shared = tf.Variable([0.0]), tf.Variable([0.0])
    opt.register_local_var(local)
    opt.apply_gradients([(tf.constant([np.nan if rank == 0 else 1.0]), local), (tf.constant([1.0]), shared)])
    assert shared.numpy() == [-1.0]


@pytest.mark.parametrize("spec, in_function", [*((spec, True) for spec in KINDS), ("none", False), ("int8", False)])
def test_tape(spec, in_function, rank, size):
    variables = [tf.Variable(tf.zeros([40, 50])), tf.Variable(tf.zeros([3]))]
    unused = tf.Variable(0.0)

    def run(pull, bias, policy):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variables[0] * pull) + tf.reduce_sum(variables[1] * bias)
        tape = hvdc.DistributedGradientTape(tape, compression=spec, on_nonfinite=policy)
        return tape.gradient(loss, [*variables, unused])

    step = tf.function(run) if in_function else run
    good = gradients_of(rank, 0)
    bad = spoil(good, 0) if rank == 0 else good
    first = step(*good, "skip")
    assert all(np.isfinite(g).all() and np.abs(g).max() > 0 for g in first[:2])
    for gradient, variable in zip(step(*bad, "skip"), variables):
        np.testing.assert_array_equal(gradient, np.zeros(variable.shape))
    assert step(*bad, "skip")[2] is None
    assert not np.isfinite(step(*bad, "propagate")[0]).all()
    step(*good, "raise")
    with pytest.raises(tf.errors.InvalidArgumentError, match="gradients of step 2 are not finite"):
        step(*bad, "raise")
    assert np.isfinite(step(*good, "raise")[0]).all()


def test_a_rank_alone_does_it_too(keras, rank, size, process_sets):
    if size > 2:
        pytest.skip("process sets of one rank")
    training = Training(keras, on_nonfinite="skip", process_set=process_sets[rank])
    training.step(spoil(gradients_of(rank, 0), 0))
    assert (training.variables[0].numpy() == 0).all() and int(training.optimizer.iterations) == 0


@pytest.mark.skipif(not IS_KERAS3, reason="Keras 3's LossScaleOptimizer")
@pytest.mark.parametrize("policy", ["skip", "raise"])
def test_a_loss_scaler_decides_by_itself(policy, rank, size):
    keras = KERASES["keras"]
    inner = hvdc.DistributedOptimizer(keras.optimizers.SGD(1.0), on_nonfinite=policy)
    opt = keras.optimizers.LossScaleOptimizer(inner, initial_scale=4.0)
    weight = keras.Variable(np.zeros(3, np.float32))
    opt.apply([tf.constant([np.inf if rank == 0 else 4.0, 4.0, 4.0])], [weight])
    assert float(opt.dynamic_scale) == 2.0
    opt.apply([tf.constant([2.0, 2.0, 2.0])], [weight])
    np.testing.assert_allclose(np.array(weight), -1.0)


def test_wrong_arguments(keras):
    with pytest.raises(ValueError, match="on_nonfinite must be one of .*'skip'.*, got 'ignore'"):
        hvdc.DistributedOptimizer(keras.optimizers.SGD(0.1), on_nonfinite="ignore")
    if IS_KERAS3 and keras is KERASES["keras"]:
        sgd = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
        with pytest.raises(ValueError, match="use backward_passes_per_step"):
            hvdc.DistributedOptimizer(sgd, on_nonfinite="skip")


def test_float64_beyond_the_range_of_float32_is_not_finite(rank, size, capfd):
    variable = tf.Variable(tf.zeros([40, 50], tf.float64), name="wide")
    reducer = introspect.new_reducer("int8")
    large, small = (tf.fill([40, 50], tf.constant(x, tf.float64)) for x in (1e39, float(rank)))
    assert not np.isfinite(reducer([large if rank == 0 else small], [variable])[0]).any()
    np.testing.assert_allclose(reducer([small], [variable])[0], (size - 1) / 2, atol=0.01)  # no residual kept it
    said = [line for line in capfd.readouterr().err.splitlines() if "float64" in line]
    assert len(said) == (rank == 0)
    assert all("gradient of wide: " in line and 'policy={"wide": "none"} sends it' in line for line in said)
    as_it_is = introspect.new_reducer("int8", policy=(("wide", hvdc.Compression.none),))
    np.testing.assert_allclose(as_it_is([large], [variable])[0], 1e39)
    assert "float64" not in capfd.readouterr().err
