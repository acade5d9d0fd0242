"""`delay=1`: each step applies what the step before has encoded, and its exchange waits for none of its gradients."""

import threading

import horovod.tensorflow as hvd
import introspect
import numpy as np
import pytest
import tensorflow as tf
from levels import levels_of_int8
from marks import slow
from specs import EXCHANGED
from tensorflow import keras

import hvd_compress as hvdc
from hvd_compress.auto import delay_choice, start

IS_KERAS3 = hasattr(keras.optimizers.Optimizer, "stateless_apply")
KERNEL, BIAS = (32, 48), (48,)
# Gradients are about 1, and change by 0.08 from step to step. A value that lies between two levels of int8 may be
# rounded up here and down there: that moves a weight by 9e-6.
LEARNING_RATE, STIFFNESS = 0.0004, 200.0
STEPS = 60


def targets(rank, step):
    """Where a rank pulls the variables in a step."""
    rng = np.random.default_rng([rank, step])
    return [(rng.standard_normal(shape) / STIFFNESS).astype(np.float32) for shape in (KERNEL, BIAS)]


def simulated(encode, ranks, steps, warm_up):
    """The weights after each step of SGD with the gradients STIFFNESS * (weight - target), in NumPy."""
    weights = [np.zeros(shape) for shape in (KERNEL, BIAS)]
    residuals = [np.zeros(KERNEL) for _ in range(ranks)]
    waiting = [np.zeros(shape) for shape in (KERNEL, BIAS)]
    for step in range(steps):
        sent = [np.zeros(shape) for shape in (KERNEL, BIAS)]
        for rank in range(ranks):
            kernel, bias = (STIFFNESS * (w - target) for w, target in zip(weights, targets(rank, step)))
            encoded = encode(kernel + residuals[rank])
            residuals[rank] += kernel - encoded
            sent[0] += encoded / ranks
            sent[1] += bias / ranks
        applied, waiting = (sent, waiting) if step < warm_up else (waiting, sent)
        weights = [w - LEARNING_RATE * gradient for w, gradient in zip(weights, applied)]
        yield weights


@pytest.mark.parametrize(("spec", "warm_up"), [("none", 0), ("int8", 0), ("int8", 10)])
def test_steps_are_those_of_numpy(spec, warm_up, rank, size):
    encode = levels_of_int8 if spec == "int8" else lambda x: x
    options = {"compression": spec, "delay": 1, "delay_warmup": warm_up}  # biases are not compressed
    optimizer = hvdc.DistributedOptimizer(keras.optimizers.SGD(LEARNING_RATE), **options)
    make = keras.Variable if IS_KERAS3 else tf.Variable
    variables = [make(np.zeros(shape, np.float32)) for shape in (KERNEL, BIAS)]
    optimizer.build(variables)

    @tf.function
    def train(*aims):
        optimizer.apply_gradients([(STIFFNESS * (tf.convert_to_tensor(v) - aim), v) for v, aim in zip(variables, aims)])

    without_delay = list(simulated(encode, size, STEPS, STEPS))
    for step, weights in enumerate(simulated(encode, size, STEPS, warm_up)):
        train(*map(tf.constant, targets(rank, step)))
        for variable, expected in zip(variables, weights):
            np.testing.assert_allclose(variable.numpy(), expected, atol=1e-5)
    assert all(np.abs(a - b).max() > 1e-4 for a, b in zip(weights, without_delay[-1]))
    assert int(optimizer.iterations) == STEPS


SHAPES = [(100, 83), (512, 258), (64,)]


def draw(rank, step):
    rng = np.random.default_rng([rank, step])
    return [tf.constant(rng.standard_normal(shape), tf.float32) for shape in SHAPES]


def new_reducer(compressor, **settings):
    """A reducer with buckets of several chunks, and a function from gradients to reduced gradients."""
    variables = [tf.Variable(tf.zeros(shape)) for shape in SHAPES]
    reducer = introspect.new_reducer(compressor, bucket_bytes=2**18, **settings)
    return reducer, lambda gradients: reducer(gradients, variables)


class HalfPrecision(hvdc.Compressor):
    """A user's own."""

    def compress(self, tensor):
        return tf.cast(tensor, tf.float16), tensor.shape

    def decompress(self, payload, ctx):
        return tf.reshape(tf.cast(payload, tf.float32), ctx)


@pytest.mark.parametrize(
    "compressor",
    [*map(hvdc.Compression.parse, ["none", "fp16", "bf16", "randomk:ratio=0.1", *EXCHANGED]), HalfPrecision()],
    ids=str,
)
def test_what_is_applied_is_that_of_the_step_before(compressor, rank):
    reducer, delayed = new_reducer(compressor, delay=1)
    _, direct = new_reducer(compressor)
    before = [tf.zeros(shape) for shape in SHAPES]
    for step in range(3):
        for result, expected in zip(delayed(draw(rank, step)), before):
            np.testing.assert_array_equal(result, expected)
        before = direct(draw(rank, step))
    waiting = introspect.waiting_variables(introspect.plan_of(reducer))
    nbytes = sum(variable.shape.num_elements() * variable.dtype.size for variable in waiting)
    assert (nbytes < 0.6 * 4 * sum(map(np.prod, SHAPES))) == (compressor.spec != "none")


# Seconds of a step, of its coding, of the wire, and of the computing.
SLOW, FAST = [0.2, 0.01, 0.09, 0.1], [0.102, 0.001, 0.001, 0.1]


@pytest.mark.parametrize("planted", [SLOW, FAST], ids=["slow link", "fast link"])
def test_the_delay_begins_on_all_ranks_where_rank_0_says_that_it_pays(planted, rank, gather, monkeypatch):
    """Rank 0 and the others are told different times."""
    times = tf.constant(planted if rank == 0 else FAST if planted == SLOW else SLOW)
    monkeypatch.setattr(delay_choice.policy, "average", lambda xp, old, new, known: times)
    reducer, delayed = new_reducer("auto:candidates=(int8),delay=(0|1)")
    _, direct = new_reducer("int8")
    began, before = [], [tf.zeros(shape) for shape in SHAPES]
    for step in range(20):
        results, now = delayed(draw(rank, step)), direct(draw(rank, step))
        is_delayed = began[-1:] == [True]
        for result, expected in zip(results, before if is_delayed else now):
            np.testing.assert_array_equal(result, expected)
        selector = introspect.plan_of(reducer).delay_selector
        began.append(bool(selector.has_begun()))
        before = now if is_delayed else [tf.zeros(shape) for shape in SHAPES]
    assert began[-1] == (planted == SLOW) and not any(began[:8])
    gathered = gather(tf.constant([began]))
    np.testing.assert_array_equal(gathered[0], gathered[-1])
    assert {"delay_begun", "delay_times", "delay_measured"} <= introspect.plan_of(reducer).replicated_state.keys()


def test_times_are_measured_and_the_same_on_all_ranks(rank, gather):
    reducer, delayed = new_reducer("auto:candidates=(int8),delay=(0|1)")
    for step in range(12):
        delayed(draw(rank, step))
    step, coding, wire, computing = times = introspect.plan_of(reducer).replicated_state["delay_times"].numpy()
    assert np.all(times > 0.0) and max(coding, wire, computing) < step
    gathered = gather(tf.constant([times]))
    np.testing.assert_array_equal(gathered[0], gathered[-1])


def test_a_resumed_training_keeps_its_candidate(rank, monkeypatch):
    spec = "auto:candidates=(int8|int4),delay=(0|1)"
    reducer, delayed = new_reducer(spec)
    delayed(draw(rank, 0))
    (before,) = {c.spec for c in introspect.plan_of(reducer).compressors()}
    other = hvdc.Compression.parse("int4" if before == "int8" else "int8")
    monkeypatch.setattr(start, "only_candidate", lambda *_: other)
    resumed, delayed = new_reducer(spec)
    resumed.pending.append(introspect.saved_state(introspect.plan_of(reducer)))
    delayed(draw(rank, 1))
    assert {c.spec for c in introspect.plan_of(resumed).compressors()} == {before}
    anew, delayed = new_reducer(spec)
    delayed(draw(rank, 1))
    assert {c.spec for c in introspect.plan_of(anew).compressors()} == {other.spec}


def test_a_checkpoint_that_is_loaded_while_training_drops_what_was_proposed(rank, monkeypatch):
    monkeypatch.setattr(delay_choice.policy, "average", lambda xp, old, new, known: tf.constant(SLOW))
    reducer, delayed = new_reducer("auto:candidates=(int8),delay=(0|1)")
    delayed(draw(rank, 0))
    plan = introspect.plan_of(reducer)
    saved = introspect.saved_state(plan)
    for _ in range(20):
        delayed(draw(rank, 1))
    assert plan.delay_selector.has_begun()
    introspect.restore(reducer, [saved])
    delayed(draw(rank, 2))
    assert not plan.delay_selector.has_begun()


def test_nothing_to_compress_leaves_nothing_to_choose(rank, size):
    variables = [tf.Variable(tf.zeros([8]))]
    reducer = introspect.new_reducer("auto:delay=(0|1)")
    for _ in range(2):
        (result,) = reducer([tf.fill([8], float(rank))], variables)
        np.testing.assert_array_equal(result, np.full(8, (size - 1) / 2, np.float32))


@pytest.mark.np4
@pytest.mark.parametrize("spec", ["int8", "hybrid:ratio=0.25,bits=8"])
def test_nothing_is_lost_in_a_scatter_reduce(spec, rank, size, monkeypatch):
    introspect.prefer_scatter_reduce(monkeypatch)
    reducer, delayed = new_reducer(spec, delay=1)
    applied = [np.zeros(shape) for shape in SHAPES]
    for step in range(24):
        # After the gradients come zeros, until residuals and what waits are zero as well.
        gradients = draw(rank, step) if step < 4 else [tf.zeros(shape) for shape in SHAPES]
        applied = [a + size * result.numpy() for a, result in zip(applied, delayed(gradients))]
    came = [sum(draw(r, s)[i].numpy() for r in range(size) for s in range(4)) for i in range(len(SHAPES))]
    for a, c in zip(applied, came):
        np.testing.assert_allclose(a, c, atol=2e-4)
    (group,) = introspect.groups(introspect.plan_of(reducer))
    assert introspect.is_scatter_reduced(group.compressor, group.shapes, size)


@pytest.mark.parametrize("spec", ["int8", "randomk:ratio=0.1"])
def test_what_is_not_finite_arrives_one_step_later_and_leaves_the_residuals_alone(spec, rank, gather):
    reducer, delayed = new_reducer(spec, delay=1)
    delayed(draw(rank, 0))
    before = introspect.residuals(introspect.plan_of(reducer))
    broken = draw(rank, 1)
    if rank == 1:
        broken[1] = tf.where(tf.range(SHAPES[1][1]) == 5, np.nan, broken[1])
    assert all(np.isfinite(result).all() for result in delayed(broken))
    if rank == 1:
        for residual, old in zip(introspect.residuals(introspect.plan_of(reducer)), before):
            np.testing.assert_array_equal(residual, old)
    assert (gather(np.isnan(delayed(draw(rank, 2))[1]).all())).all()
    assert all(np.isfinite(result).all() for result in delayed(draw(rank, 3)))


@pytest.mark.parametrize("warm_up", [0, 1])
@pytest.mark.parametrize("spec", ["none", "int8"])
def test_the_exchange_is_done_before_the_gradients_are_there(spec, warm_up, rank):
    """The gradients of the last step do not come before its exchange is done: if it waited for them, for ever."""
    _, delayed = new_reducer(spec, delay=1, delay_warmup=warm_up)
    exchanged = threading.Event()

    def wait(x):
        return x if exchanged.wait(60) else np.float32(np.nan)

    def done(x):
        exchanged.set()
        return x

    @tf.function
    def step(*gradients):
        # Without side effects: TensorFlow would call functions with side effects in this order.
        zero = tf.ensure_shape(tf.numpy_function(wait, [tf.reduce_min(gradients[0]) * 0.0], tf.float32, False), [])
        reduced = delayed([gradient + zero for gradient in gradients])
        sums = [tf.reduce_sum(gradient) for gradient in reduced]
        return [tf.numpy_function(done, [tf.add_n(sums)], tf.float32, False), *reduced]

    exchanged.set()
    for number in range(2):
        step(*draw(rank, number))
    exchanged.clear()
    step(*draw(rank, 2))
    exchanged.set()
    assert all(np.isfinite(result).all() for result in step(*draw(rank, 3)))


@pytest.mark.parametrize("spec", ["none", "int8"])
def test_no_collective_depends_on_the_forward_pass(spec, rank):
    """In the graph of a training step of Keras, data and control inputs included; without a delay they all do."""
    depends = {}
    for delay in (0, 1):
        layers = [keras.layers.Dense(64, "relu"), keras.layers.Dropout(0.5), keras.layers.Dense(8)]
        model = keras.Sequential([keras.Input([40]), *layers])
        optimizer = hvdc.DistributedOptimizer(keras.optimizers.Adam(), compression=spec, delay=delay)
        model.compile(optimizer, "mse", jit_compile=False)
        optimizer.build(model.trainable_variables)
        data = [tf.TensorSpec([16, 40]), tf.TensorSpec([16, 8])]
        graph = tf.function(lambda x, y, m=model: m.train_step((x, y)), autograph=False).get_concrete_function(*data)
        collectives = introspect.collectives(graph.graph)
        assert len(collectives) == (1 if spec == "none" else 2)
        depends[delay] = ["MatMul" in introspect.types_of_ancestors(op) for op in collectives]
    assert all(depends[0]) and not any(depends[1])


@pytest.mark.skipif(not IS_KERAS3, reason="Keras 2 does not accumulate")
def test_accumulated_gradients_wait_for_the_next_update(rank, size):
    """Whether they are exchanged depends on no gradient, so that the exchange runs beside the last pass."""
    sgd = keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
    optimizer = hvdc.DistributedOptimizer(sgd, compression="int8", min_compress_size=0, delay=1)
    variable = keras.Variable(np.zeros([4, 8], np.float32))
    optimizer.build([variable])

    @tf.function
    def train(x):
        optimizer.apply_gradients([(tf.matmul(x, tf.ones([1, 8])), variable)])

    weights = before = 0.0
    for number in range(8):
        train(tf.fill([4, 1], (rank + 1.0) * number))
        if number % 2:
            weights, before = weights - before, (number - 0.5) * (size + 1) / 2
        np.testing.assert_allclose(variable.numpy(), weights, rtol=1e-6)
    graph = train.get_concrete_function(tf.TensorSpec([4, 1])).graph
    (branch,) = (op for op in graph.get_operations() if op.type == "If")
    assert branch.get_attr("_lower_using_switch_merge") and not branch.control_inputs
    assert "MatMul" not in introspect.types_of_ancestors(branch.inputs[0].op)
    assert "MatMul" in introspect.types_of_ancestors(branch)


@pytest.mark.parametrize("policy", ["mixed_float16", *slow("float32")])
def test_fit_with_several_steps_per_execution(policy, rank):
    """They are the steps of one at a time, and those of a loss scale are alike on all ranks."""
    found = []
    try:
        keras.mixed_precision.set_global_policy(policy)
        for per_execution in (1, 3):
            keras.utils.set_random_seed(3)
            layers = [keras.layers.Dense(48, "relu"), keras.layers.Dense(4, dtype="float32")]
            model = keras.Sequential([keras.Input([32]), *layers])
            optimizer = hvdc.DistributedOptimizer(keras.optimizers.Adam(0.01), compression="int8", delay=1)
            model.compile(optimizer, "mse", jit_compile=False, steps_per_execution=per_execution)
            x = np.random.default_rng(rank).standard_normal([48, 32]).astype(np.float32)
            losses = model.fit(x, x[:, :4], batch_size=8, epochs=3, verbose=0, shuffle=False).history["loss"]
            assert losses[-1] < losses[0]
            found.append(model.get_weights())
    finally:
        keras.mixed_precision.set_global_policy("float32")
    for one, three in zip(*found):
        np.testing.assert_array_equal(one, three)
    everywhere = hvd.allgather_object(found[0])
    assert all(np.array_equal(a, b) for a, b in zip(everywhere[0], everywhere[-1]))


@pytest.mark.skipif(not IS_KERAS3, reason="Keras 2 has another LossScaleOptimizer")
def test_the_loss_scale_may_change_between_two_steps(rank, size):
    """Each rank's gradient is its rank + 1, so steps are alike; the scale doubles in every second step."""
    sgd = hvdc.DistributedOptimizer(keras.optimizers.SGD(1.0), min_compress_size=0, compression="fp16", delay=1)
    optimizer = keras.optimizers.LossScaleOptimizer(sgd, initial_scale=8.0, dynamic_growth_steps=2)
    variable = keras.Variable(np.zeros([4, 8], np.float32))
    optimizer.build([variable])
    scales = []
    for step in range(6):
        scales.append(float(optimizer.scale_loss(tf.constant(1.0))))
        optimizer.apply([scales[-1] * tf.fill([4, 8], rank + 1.0)], [variable])
        np.testing.assert_allclose(variable.numpy(), -step * (size + 1) / 2)
    assert scales[0] < scales[2] < scales[4]


def test_rows_of_an_embedding_are_refused_on_all_ranks():
    variable = tf.Variable(tf.zeros([100, 16]), name="table")
    reducer = introspect.new_reducer("int8", delay=1)
    slices = tf.IndexedSlices(tf.ones([3, 16]), tf.constant([1, 2, 3]), tf.constant([100, 16]))
    with pytest.raises(ValueError, match=r"the rows of table.*sparse_as_dense=True"):
        reducer([slices], [variable])
    dense = introspect.new_reducer("int8", delay=1, sparse_as_dense=True)
    dense([slices], [variable])
    (result,) = dense([slices], [variable])
    np.testing.assert_allclose(result[:5, 0], [0, 1, 1, 1, 0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"delay": 2}, "delay must be a whole number from 0 to 1, got 2"),
        ({"delay_warmup": 5}, "delay_warmup=5 needs delay=1"),
        ({"delay": 1, "compression": "auto"}, "delay=1 does not work with auto: .*use a fixed compressor such as int4"),
        ({"delay": 1, "compression": "powersgd:rank=2"}, "delay=1 does not work with powersgd:rank=2: "),
        ({"delay": 1, "compression": "schedule:(0=none|9=int8)"}, "its stages have payloads of different sizes"),
        ({"delay": 1, "policy": {"*": "auto"}}, "delay=1 does not work with auto"),
        ({"delay": 1, "compression": "dgc:ratio=0.01,steps_per_epoch=9"}, "dgc.* and delay=1 cannot go together"),
        (
            {"delay": 1, "compression": "topk:ratio=0.1", "momentum_correction": 0.9},
            "momentum_correction and delay=1 cannot",
        ),
        ({"delay": 1, "hierarchical": True}, "hierarchical=True and delay=1 cannot go together"),
        ({"delay": 1, "backward_passes_per_step": 2}, "backward_passes_per_step=2 and delay=1 cannot go together"),
        ({"delay": 1, "local_steps": 4}, "local_steps and delay=1 cannot go together"),
    ],
)
def test_what_does_not_go_together(options, message):
    with pytest.raises(ValueError, match=message):
        hvdc.DistributedOptimizer(keras.optimizers.SGD(0.1), **options)


def test_a_tape(rank, size):
    variable, constant = tf.Variable(tf.zeros([40, 50])), tf.constant(1.0)

    @tf.function
    def gradient_of(factor, source):
        with tf.GradientTape() as tape:
            tape.watch(source)
            loss = factor * tf.reduce_sum(source)
        return hvdc.DistributedGradientTape(tape, compression="int4", delay=1).gradient(loss, [source])[0]

    for step, expected in enumerate([0.0, 1.0, 2.0]):
        result = gradient_of(tf.constant((step + 1.0) * (rank + 1)), variable)
        np.testing.assert_allclose(result, np.full([40, 50], expected * (size + 1) / 2), rtol=1e-6)
    with pytest.raises(ValueError, match="delay=1 needs variables as sources"):
        gradient_of(tf.constant(1.0), constant)
    hvd.allreduce(tf.constant(0.0), name="after_the_error")
