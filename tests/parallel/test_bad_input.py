"""Bad input: it works, or every rank raises the same error of one line, and Horovod still works after it."""
# ruff: noqa: B023  (what is called at once may use a loop's variable)

import horovod.tensorflow as hvd
import horovod.tensorflow.keras
import introspect
import numpy as np
import pytest
import tensorflow as tf
from test_optimizer import KERASES

import hvd_compress as hvdc


@pytest.fixture(params=sorted(KERASES))
def keras(request):
    return KERASES[request.param]


@pytest.fixture(params=["eager", "function"])
def run(request):
    """Calls a function as it is, or inside of a tf.function."""
    return (lambda f: f()) if request.param == "eager" else (lambda f: tf.function(f)())


def refused(match, function, kind=(ValueError, TypeError)):
    """Every rank raises the same line; collectives still work."""
    with pytest.raises(kind, match=match) as info:
        function()
    texts = hvd.allgather_object(str(info.value))
    assert set(texts) == {texts[0]} and "\n" not in texts[0]
    total = hvdc.allreduce(tf.fill([40, 50], float(hvd.rank() + 1)), compression="int8", op=hvd.Sum)
    np.testing.assert_allclose(total, hvd.size() * (hvd.size() + 1) / 2, rtol=1e-5)


def reduce(gradients, variables, spec="int8", **options):
    return introspect.new_reducer(spec, **options)(gradients, variables)


def ones(rank):
    return tf.fill([40, 50], float(rank))


# hvdc.allreduce


@pytest.mark.parametrize(
    "spec, run", [("none", "function"), ("int8", "eager"), ("topk:ratio=0.5", "function")], indirect=["run"]
)
def test_dtypes(spec, run, rank, size):
    for dtype in ("uint8", "int8", "int32", "int64", "float16", "bfloat16", "float32", "float64"):
        total = run(lambda: hvdc.allreduce(tf.cast(tf.fill([8], rank + 1), dtype), compression=spec, op=hvd.Sum))
        assert total.dtype == dtype
        expected = np.where(np.arange(8) < 4, 3, 0) if spec.startswith("topk") and total.dtype.is_floating else 3
        np.testing.assert_array_equal(tf.cast(total, tf.float32), expected)
    for dtype in ("complex64", "complex128"):
        refused(
            "Horovod cannot reduce complex numbers",
            lambda: run(lambda: hvdc.allreduce(tf.zeros([8], dtype), compression=spec)),
        )
    for dtype in ("bool", "int16", "uint32", "string"):
        refused(
            f"tensor is {dtype}, which Horovod cannot reduce",
            lambda: run(lambda: hvdc.allreduce(tf.zeros([8], dtype), compression=spec)),
        )


@pytest.mark.parametrize("spec", ["none", "int8"])
def test_what_is_no_tensor(spec, rank):
    for value in (None, "text", object(), [[1.0], [2.0, 3.0]], {"a": 1.0}):
        refused("tensor", lambda: hvdc.allreduce(value, compression=spec))
    for value in (None, 5, "ab", ones(rank), {"a": ones(rank)}):
        refused("tensors must be a list of tensors, got", lambda: hvdc.grouped_allreduce(value, compression=spec))
    refused(
        "tensor must be a tensor, got None",
        lambda: hvdc.grouped_allreduce([ones(rank), None], compression=spec),
    )
    refused(
        "cannot reduce a RaggedTensor",
        lambda: hvdc.allreduce(tf.ragged.constant([[1.0], []]), compression=spec),
    )
    for value in (1.5, [1.0, 2.0], np.ones((3, 4)), tf.Variable([1.0, 2.0]), tf.zeros([0, 3]), 3):
        result = hvdc.allreduce(value, compression=spec)
        np.testing.assert_allclose(result, np.asarray(value), rtol=1e-6)
    shapes = [r.shape for r in hvdc.grouped_allreduce([ones(rank), tf.constant(1), tf.zeros([0])], compression=spec)]
    assert shapes == [[40, 50], [], [0]] and hvdc.grouped_allreduce([], compression=spec) == []


@pytest.mark.parametrize("spec, run", [("none", "eager"), ("int8", "function")], indirect=["run"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"op": "sum"}, "op must be one of Horovod's"), ({"op": 99}, "op must be one of Horovod's"),
        ({"prescale_factor": "2"}, "prescale_factor must be a finite number, got '2'"),
        ({"prescale_factor": float("nan")}, "prescale_factor must be a finite number, got nan"),
        ({"postscale_factor": None}, "postscale_factor must be a finite number, got None"),
        ({"name": 5}, "name must be a string, got 5"),
        ({"process_set": None}, "process_set must be a hvd.ProcessSet, got None"),
        ({"process_set": hvd.ProcessSet([0])}, r"process_set of ranks \[0\] is not registered"),
        ({"device_dense": 5}, "device_dense must be a string"),
        ({"ignore_name_scope": "x"}, "ignore_name_scope must be True or False"),
    ],
)  # fmt: skip
def test_arguments_of_allreduce(spec, options, message, run, rank):
    refused(message, lambda: run(lambda: hvdc.allreduce(ones(rank), compression=spec, **options)))


def test_compressors_of_allreduce(run, rank, monkeypatch):
    for compression, message in {
        "topkk": "did you mean 'topk'", "topk:ratio=2": "ratio must be", 5: "compression must be a hvdc.Compressor",
        hvdc.Compression.topk: "pass an instance", "auto": "auto chooses from what it measures in training",
    }.items():  # fmt: skip
        refused(message, lambda: run(lambda: hvdc.allreduce(ones(rank), compression=compression)))
    monkeypatch.setenv("HVD_COMPRESS", "topk:ratio=nan")
    refused("environment variable HVD_COMPRESS: topk: ratio", lambda: run(lambda: hvdc.allreduce(ones(rank))))


@pytest.mark.parametrize("signature", [[None, 50], None])
def test_shapes_unknown_to_allreduce(signature, rank, size):
    def traced(spec):
        spec_of = tf.TensorSpec(signature, tf.float32)
        return tf.function(lambda x: hvdc.allreduce(x, compression=spec), input_signature=[spec_of])(ones(rank))

    np.testing.assert_allclose(traced("none"), (size - 1) / 2)
    refused("int8 needs a tensor of static shape", lambda: traced("int8"))


# Gradients


@pytest.mark.parametrize("spec, run", [("none", "eager"), ("int8", "function")], indirect=["run"])
def test_gradients_that_are_not_float(spec, run, rank, size):
    variables = [tf.Variable(tf.zeros([40, 50])), tf.Variable(tf.zeros([40, 50], tf.int64), name="counts")]
    for dtype in ("int64", "int32", "bfloat16"):
        gradients = [ones(rank), tf.cast(tf.fill([40, 50], 2 * rank), dtype)]
        first, second = run(lambda: reduce(gradients, variables, spec))
        np.testing.assert_allclose(first, (size - 1) / 2, rtol=1e-5)
        assert second.dtype == dtype
        np.testing.assert_array_equal(tf.cast(second, tf.float32), size - 1)
    for dtype in ("complex64", "bool"):
        gradients = [ones(rank), tf.zeros([40, 50], dtype)]
        message = f"the gradient of counts is {dtype}, .*Horovod cannot reduce"
        refused(message, lambda: run(lambda: reduce(gradients, variables, spec)))


@pytest.mark.parametrize("spec, run", [("none", "function"), ("int8", "eager")], indirect=["run"])
def test_gradients_without_a_size(spec, run, rank, size):
    shapes = [(), (0, 4), (0,)]
    variables = [tf.Variable(tf.zeros(shape)) for shape in shapes]
    for least in (0, 1024):
        reduced = run(
            lambda: reduce([tf.fill(s, float(rank)) for s in shapes], variables, spec, min_compress_size=least)
        )
        assert [tuple(r.shape) for r in reduced] == shapes
        np.testing.assert_allclose(reduced[0], (size - 1) / 2, rtol=1e-6)
    assert run(lambda: reduce([], [], spec)) == []
    assert run(lambda: reduce([None], variables[:1], spec)) == [None]


@pytest.mark.parametrize("spec, run", [("none", "eager"), ("int8", "function")], indirect=["run"])
def test_bfloat16_slices(spec, run, rank, size):
    variable = tf.Variable(tf.zeros([40, 50], tf.bfloat16))
    slices = tf.IndexedSlices(tf.ones([1, 50], tf.bfloat16), tf.constant([rank]), tf.constant([40, 50]))
    reduced = run(lambda: tf.convert_to_tensor(reduce([slices], [variable], spec)[0]))
    assert reduced.dtype == tf.bfloat16
    np.testing.assert_allclose(tf.cast(reduced[:size], tf.float32), 1 / size)


def optimizer_step(keras, gradients, variables, run, **options):
    opt = hvdc.DistributedOptimizer(keras.optimizers.SGD(1.0), **{"compression": "int8", **options})
    opt.build(variables)
    run(lambda: opt.apply_gradients(list(zip(gradients, variables))))
    return [v.numpy() for v in variables]


def test_gradients_of_a_wrong_kind(keras, run, rank):
    def step(gradient):
        return optimizer_step(keras, [gradient], [tf.Variable(tf.zeros([40, 50]), name="kernel")], run)

    refused("No gradients provided for any variable: the loss depends on none", lambda: step(None))
    refused(r"kernel has shape \(3, 3\), the variable \(40, 50\)", lambda: step(tf.ones([3, 3])))
    refused("the gradient of kernel must be a tensor, got 'x'", lambda: step("x"))
    np.testing.assert_allclose(step(np.full((40, 50), rank, np.float32)), [np.full((40, 50), -0.5)], rtol=1e-5)


def test_one_rank_without_gradients(keras, run, rank):
    gradients = [None if rank == 0 else ones(rank)]
    with pytest.raises(ValueError, match="ranks disagree on"):
        optimizer_step(keras, gradients, [tf.Variable(tf.zeros([40, 50]))], run)


@pytest.mark.parametrize("signature", [[None, 50], [40, None], None])
def test_gradients_of_unknown_shape(signature, keras, rank, size):
    for spec in ("none", "int8"):
        variable = tf.Variable(tf.zeros([40, 50]))
        opt = hvdc.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=spec)
        opt.build([variable])

        @tf.function(input_signature=[tf.TensorSpec(signature, tf.float32)])
        def step(gradient):
            opt.apply_gradients([(gradient, variable)])

        step(ones(rank))
        np.testing.assert_allclose(variable, -(size - 1) / 2, rtol=1e-5)


def test_variables_of_unknown_shape(rank):
    variable = tf.Variable(tf.zeros([40, 50]), shape=[None, 50], name="kernel")
    step = tf.function(lambda g: reduce([g], [variable]), input_signature=[tf.TensorSpec([None, 50])])
    refused(r"the gradient of kernel has the unknown shape \(None, 50\)", lambda: step(ones(rank)))


# Models


def make(keras, **options):
    keras.utils.set_random_seed(0)  # the ranks begin with the same weights
    return keras.Sequential(
        [keras.layers.Input((30,)), keras.layers.Dense(40, **options), keras.layers.Dense(1, **options)]
    )


def fit(model, optimizer, rank):
    x = np.random.default_rng(rank).standard_normal((32, 30)).astype("float32")
    model.compile(optimizer, loss="mse")
    model.fit(x, x[:, :1], batch_size=16, verbose=0, shuffle=False)


@pytest.mark.parametrize("spec", ["none", "int8"])
def test_a_model_with_nothing_to_train(spec, keras, rank):
    model = make(keras, trainable=False)
    before = [np.array(w) for w in model.get_weights()]
    fit(model, hvdc.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=spec), rank)
    assert all((a == b).all() for a, b in zip(before, model.get_weights()))


def test_layers_frozen_and_thawed(keras, rank, gather):
    model = make(keras)
    model.set_weights([np.random.default_rng(0).standard_normal(w.shape) * 0.1 for w in model.get_weights()])
    opt = hvdc.DistributedOptimizer(keras.optimizers.SGD(0.01), compression="int8")
    fit(model, opt, rank)
    for trainable in (False, True):
        model.layers[0].trainable = trainable
        before = np.array(model.get_weights()[0])
        fit(model, opt, rank)
        assert (np.array(model.get_weights()[0]) == before).all() == (not trainable)
        everyone = gather(np.concatenate([np.ravel(w) for w in model.get_weights()]))
        np.testing.assert_array_equal(everyone, everyone[:1].repeat(len(everyone), 0))


def test_a_model_of_bfloat16(keras, rank, gather):
    model = make(keras, dtype="bfloat16")
    fit(model, hvdc.DistributedOptimizer(keras.optimizers.SGD(0.01), compression="int8"), rank)
    everyone = gather(np.concatenate([np.ravel(w).astype(np.float32) for w in model.get_weights()]))
    assert np.isfinite(everyone).all()
    np.testing.assert_array_equal(everyone, everyone[:1].repeat(len(everyone), 0))


def test_a_variable_that_came_later(keras, run, rank, size):
    variables = [tf.Variable(tf.zeros([40, 50]), name="old")]
    opt = hvdc.DistributedOptimizer(keras.optimizers.SGD(1.0), compression="int8")
    opt.build(list(variables))

    def step():
        opt.apply_gradients([(ones(rank), v) for v in variables])

    run(step)
    variables.append(tf.Variable(tf.zeros([40, 50]), name="new"))
    refused("built for other variables, new is not among them", lambda: run(step))
    variables.pop()
    run(step)
    np.testing.assert_allclose(variables[0], -(size - 1), rtol=1e-5)


def test_a_tape_follows_a_list_of_variables_that_grows(rank, size):
    variables = []
    for _ in range(3):
        variables.append(tf.Variable(tf.zeros([40, 50])))
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(v) * rank for v in variables])
        for gradient in hvdc.DistributedGradientTape(tape, compression="int8").gradient(loss, variables):
            np.testing.assert_allclose(gradient, (size - 1) / 2, rtol=1e-5)


def test_a_tape_is_wrapped_once():
    tape = hvdc.DistributedGradientTape(tf.GradientTape())
    refused("gradtape is distributed already", lambda: hvdc.DistributedGradientTape(tape))
    tape = hvd.DistributedGradientTape(tf.GradientTape())
    refused("leave hvd.DistributedGradientTape out", lambda: hvdc.DistributedGradientTape(tape))


def test_horovods_own_optimizer_is_not_wrapped(keras):
    optimizer = horovod.tensorflow.keras.DistributedOptimizer(keras.optimizers.SGD(0.1))
    refused("leave hvd.DistributedOptimizer out", lambda: hvdc.DistributedOptimizer(optimizer))


def test_many_tiny_tensors(rank, size):
    variables = [tf.Variable(tf.zeros([2, 3])) for _ in range(400)]
    gradients = [tf.fill([2, 3], float(rank)) for _ in variables]
    for least in (0, 1024):
        reduced = reduce(gradients, variables, "int8", min_compress_size=least)
        assert all(np.allclose(r, (size - 1) / 2, rtol=1e-5) for r in reduced[::100])
