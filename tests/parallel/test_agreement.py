"""Ranks that disagree get the same error on every rank, instead of a hang; afterwards Horovod still works."""

import tempfile
import time
import types

import horovod
import horovod.tensorflow as hvd
import introspect
import numpy as np
import pytest
import tensorflow as tf
from test_optimizer import IS_KERAS3, KERASES, make_data, make_model

import hvd_compress as hvdc
from hvd_compress.common import determinism, devices
from hvd_compress.elastic import CommitStateCallback, UpdateEpochStateCallback
from hvd_compress.engine import agreement
from hvd_compress.kernels import native


def reduce(gradients=None, variables=None, compressor="int8", **options):
    """One step of a reducer with these settings."""
    variables = variables or [tf.Variable(tf.zeros([40, 50]), name="dense/kernel")]
    gradients = gradients or [tf.zeros(v.shape, v.dtype) for v in variables]
    return introspect.new_reducer(compressor, **options)(gradients, variables)


def error_on_all_ranks(step):
    """The text of the error that `step` raises, which must be the same on all ranks."""
    with pytest.raises(ValueError) as info:
        step()
    texts = hvd.allgather_object(str(info.value))  # also: collectives still work
    assert set(texts) == {texts[0]} and "\n" not in texts[0]
    assert texts[0].endswith("; start all ranks with the same code and environment")
    (result,) = reduce([tf.fill([40, 50], float(hvd.rank()))])
    np.testing.assert_allclose(result, (hvd.size() - 1) / 2, atol=0.01)
    return texts[0]


@pytest.mark.parametrize(
    ("what", "values"),
    [
        ("compressor", (hvdc.Compression.int8, hvdc.Compression.int4)),
        ("compressor", (hvdc.Compression.none, hvdc.Compression.topk(0.01))),
        ("bucket_bytes", (1000000, 2000000)),
        ("min_compress_size", (0, 1024)),
        ("residual_decay", (1.0, 0.5)),
        ("residual_dtype", ("float32", "bfloat16")),
        ("gradient_predivide_factor", (1.0, 2.0)),
        ("sparse_as_dense", (False, True)),
        ("groups", (None, 3)),
        ("name", ("DistributedAdam", "DistributedSGD")),
        ("backward_passes_per_step", (1, 2)),
        ("average_aggregated_gradients", (False, True)),
        ("delay", (0, 1)),
    ],
)
def test_settings(what, values, rank):
    text = error_on_all_ranks(lambda: reduce(**{what: values[min(rank, 1)]}))
    error_text = {"compressor": "compression"}.get(what, what)
    assert f"ranks disagree on {error_text}: rank 0 has {values[0]}, rank 1 has {values[1]};" in text


class RowsOnly(hvdc.Compressor):
    """Halves dense gradients, and quantizes rows."""

    def compress(self, tensor):
        return tensor / 2, None

    def decompress(self, payload, ctx):
        return payload * 2

    def for_rows(self):
        return hvdc.Compression.int8


@pytest.mark.skipif(native.library() is None, reason="the native kernels are not built")
@pytest.mark.parametrize("compressor", ["int8", "auto", RowsOnly()], ids=str)
def test_kernels(compressor, rank, monkeypatch):
    with monkeypatch.context() as context:
        context.setenv(native.VARIABLE, native.KINDS[min(rank, 1)])
        with pytest.raises(ValueError, match="rank 0 has native .*, rank 1 has xla"):
            reduce(compressor=compressor)
    reduce(compressor=compressor)


def test_gpu_on_one_rank(rank, monkeypatch):
    def step():
        with monkeypatch.context() as context:
            context.setattr(devices, "has_gpu", lambda: rank == 0)
            reduce()

    text = error_on_all_ranks(step)
    assert "ranks disagree on the device: rank 0 has a GPU, rank 1 has the CPU;" in text


def test_op(rank):
    text = error_on_all_ranks(lambda: reduce(op=hvd.Sum if rank == 0 else hvd.Average))
    assert "ranks disagree on op: rank 0 has Sum, rank 1 has Average;" in text


def test_devices_may_differ(rank):
    reduce(device_dense="/cpu:0" if rank == 0 else "/CPU:0")


@pytest.mark.parametrize(
    ("shapes", "dtypes", "names", "message"),
    [
        (
            ([40, 50], [40, 51]),
            None,
            None,
            "gradient 1: rank 0 has a/kernel float32 (40, 50), rank 1 has a/kernel",
        ),
        (None, ("float32", "float16"), None, "float32 (40, 50), rank 1 has a/kernel float16 (40, 50);"),
        (
            None,
            None,
            ("conv/kernel", "dense/kernel"),
            "rank 0 has conv/kernel float32 (40, 50), rank 1 has dense/",
        ),
    ],
)
def test_models(shapes, dtypes, names, message, rank):
    own = tf.Variable(
        tf.zeros((shapes or [[40, 50]] * 2)[min(rank, 1)], (dtypes or ["float32"] * 2)[min(rank, 1)]),
        name=(names or ["a/kernel"] * 2)[min(rank, 1)],
    )
    same = tf.Variable(tf.zeros([3]), name="bias")
    assert message in error_on_all_ranks(lambda: reduce(variables=[same, own]))


def test_number_of_gradients(rank):
    variables = [tf.Variable(tf.zeros([40, 50]), name=f"layer{i}") for i in range(2 + (rank == 0))]
    text = error_on_all_ranks(lambda: reduce(variables=variables))
    assert "ranks disagree on the number of gradients: rank 0 has 3, rank 1 has 2;" in text


def test_a_gradient_that_only_some_ranks_have(rank):
    variables = [tf.Variable(tf.zeros([40, 50]), name=name) for name in ("a", "b")]
    gradients = [tf.zeros([40, 50]), None if rank == 0 else tf.zeros([40, 50])]
    text = error_on_all_ranks(lambda: reduce(gradients, variables))
    assert "gradient 1: rank 0 has no gradient of b, rank 1 has b float32 (40, 50);" in text
    slices = tf.IndexedSlices(tf.zeros([1, 50]), tf.constant([0]), tf.constant([40, 50]))
    gradients = [tf.zeros([40, 50]), slices if rank == 0 else tf.zeros([40, 50])]
    text = error_on_all_ranks(lambda: reduce(gradients, variables))
    assert "gradient 1: rank 0 has b IndexedSlices of float32 (40, 50), rank 1 has b float32 (40, 50);" in text


def test_layers_of_one_class_may_be_numbered_otherwise(rank):
    names = ["model/dense/kernel", "model_1/dense_12/kernel"]
    variable = tf.Variable(tf.zeros([40, 50]), name=names[min(rank, 1)])
    reduce(variables=[variable])


def test_layers_numbered_in_another_order(rank):
    order = [1, 2] if rank == 0 else [2, 1]
    variables = [tf.Variable(tf.zeros([40, 50]), name=f"tower_{n}/kernel") for n in order]
    text = error_on_all_ranks(lambda: reduce(variables=variables))
    assert "gradient 0: rank 0 has tower_1/kernel float32 (40, 50), rank 1 has tower_2/kernel float32" in text
    # As Keras names the layers of a second model.
    variables = [
        tf.Variable(tf.zeros([40, 50]), name=n) for n in (["dense", "dense_1"], ["dense_9", "dense_10"])[min(rank, 1)]
    ]
    reduce(variables=variables)


def test_a_rank_says_that_it_waits(rank, monkeypatch, capfd):
    monkeypatch.setattr(agreement, "_PATIENCE", 0.5 if rank else 60.0)
    if rank == 0:
        time.sleep(3.0)
    reduce()
    assert ("has waited for 0.5 s to agree with the other ranks" in capfd.readouterr().err) == (rank > 0)


@pytest.mark.parametrize("option", ["backward_passes_per_step", "average_aggregated_gradients"])
def test_passes_of_an_optimizer(option, rank):
    keras = KERASES["keras"]
    values = {"backward_passes_per_step": (1, 2), "average_aggregated_gradients": (False, True)}[option]
    options = {"backward_passes_per_step": 2, option: values[min(rank, 1)]}
    variable = tf.Variable(tf.zeros([40, 50]))
    opt = hvdc.DistributedOptimizer(keras.optimizers.SGD(0.1), compression="int8", **options)

    @tf.function
    def step():
        opt.apply_gradients([(tf.ones([40, 50]), variable)])

    text = error_on_all_ranks(step)
    assert f"disagree on {option}: rank 0 has {values[0]}, rank 1 has {values[1]};" in text


INNER = [  # optimizers of the first rank and of the others, and what the error says
    (("SGD", {}), ("Adam", {}), "the optimizer: rank 0 has SGD, rank 1 has Adam;"),
    (("SGD", {"clipnorm": 1.0}), ("SGD", {}), "the optimizer's clipnorm: rank 0 has 1.0, rank 1 has None;"),
    (("SGD", {}), ("SGD", {"weight_decay": 0.1}), "the optimizer's weight_decay: rank 0 has None, rank 1 has 0.1;"),
    (("Adam", {"beta_1": 0.8}), ("Adam", {}), "the optimizer's beta_1: rank 0 has 0.8, rank 1 has 0.9;"),
    (
        ("SGD", {"gradient_accumulation_steps": 2}),
        ("SGD", {}),
        "the optimizer's gradient_accumulation_steps: rank 0 has 2, rank 1 has None;",
    ),
]


@pytest.mark.parametrize(("first", "others", "message"), INNER if IS_KERAS3 else INNER[:-1])
@pytest.mark.parametrize("options", [{}, {"local_steps": 1}], ids=str)
def test_inner_optimizers(first, others, message, options, rank):
    name, config = others if rank else first
    inner = getattr(KERASES["keras"].optimizers, name)(0.1, **config)
    opt = hvdc.DistributedOptimizer(inner, name="one", **options)
    variable = tf.Variable(tf.zeros([40, 50]))

    @tf.function
    def step():
        opt.apply_gradients([(tf.ones([40, 50]), variable)])

    assert f"ranks disagree on {message}" in error_on_all_ranks(step)


def test_what_may_differ_of_optimizers(rank):
    """Learning rates, which callbacks change, names, and what an optimizer without a configuration has."""
    keras = KERASES["keras"]

    class Own(keras.optimizers.SGD):
        def get_config(self):
            raise NotImplementedError

    variable = tf.Variable(tf.zeros([40, 50]))
    for inner in (keras.optimizers.SGD(0.1 * (rank + 1), name=f"sgd_{rank}"), Own(0.1)):
        opt = hvdc.DistributedOptimizer(inner, name="one", compression="int8")
        opt.apply_gradients([(tf.ones([40, 50]), variable)])


@pytest.mark.skipif(not IS_KERAS3, reason="OneBitAdam needs Keras 3")
@pytest.mark.parametrize(("what", "values"), [("freeze_step", (2, 3)), ("beta_1", (0.8, 0.9)), ("beta_2", (0.9, 0.99))])
def test_onebit_adam(what, values, rank):
    opt = hvdc.optimizers.OneBitAdam(0.1, **{what: values[min(rank, 1)]})
    variable = tf.Variable(tf.zeros([40, 50]))
    text = error_on_all_ranks(lambda: opt.apply_gradients([(tf.ones([40, 50]), variable)]))
    assert f"disagree on the optimizer's {what}: rank 0 has {values[0]}, rank 1 has {values[1]};" in text


@pytest.mark.parametrize(("package", "where"), [("hvd_compress", agreement), ("TensorFlow", tf), ("Horovod", horovod)])
def test_versions(package, where, rank, monkeypatch):
    version = where.__version__
    with monkeypatch.context() as patch:
        if rank > 0:
            patch.setattr(where, "__version__", "99.1")
        with pytest.raises(ValueError) as info:
            reduce()
    text = f"ranks disagree on the version of {package}: rank 0 has {version}, "
    assert str(info.value).startswith(text) and "99.1;" in str(info.value)


def test_deterministic_operations(rank, monkeypatch):
    with monkeypatch.context() as context:
        context.setattr(determinism, "is_enabled", lambda: rank == 0)
        with pytest.raises(ValueError, match="whether operations are deterministic: rank 0 has True, rank 1 has False"):
            reduce(compressor="auto")
    reduce()


def test_environment(rank, monkeypatch):
    monkeypatch.setenv("HVD_COMPRESS", "int8" if rank == 0 else "onebit")
    with pytest.raises(ValueError) as info:
        hvdc.DistributedOptimizer(KERASES["keras"].optimizers.SGD(1.0)).apply_gradients(
            [(tf.zeros([40, 50]), tf.Variable(tf.zeros([40, 50])))]
        )
    assert "environment variable HVD_COMPRESS: rank 0 has int8, rank 1 has onebit;" in str(info.value)


def test_environment_of_buckets(rank, monkeypatch):
    monkeypatch.setenv("HVD_COMPRESS_BUCKET_BYTES", str((rank + 1) * 2**20))
    with pytest.raises(ValueError) as info:
        hvdc.DistributedOptimizer(KERASES["keras"].optimizers.SGD(1.0)).apply_gradients(
            [(tf.zeros([40, 50]), tf.Variable(tf.zeros([40, 50])))]
        )
    text = "environment variable HVD_COMPRESS_BUCKET_BYTES: rank 0 has 1048576, rank 1 has 2097152;"
    assert text in str(info.value)


def test_what_was_trained_before(rank):
    """It is part of the names of collectives: with other names, ranks would not find each other."""
    made = introspect.reducers_made()
    introspect.set_reducers_made(1000 + min(rank, 1))
    try:
        with pytest.raises(ValueError, match="disagree on how many optimizers and models.*hvdc_1000_.*hvdc_1001_"):
            reduce()
    finally:
        introspect.set_reducers_made(made)


@pytest.mark.parametrize("way", ["apply_gradients", "fit", "tape", "tape in a function"])
def test_every_way_to_train(way, rank):
    keras = KERASES["keras"]
    spec = "int8" if rank == 0 else "int4"
    variable = tf.Variable(tf.zeros([40, 50]))

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable)
        return hvdc.DistributedGradientTape(tape, compression=spec).gradient(loss, [variable])

    def fit():
        model = make_model(keras, seed=0)
        model.compile(hvdc.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=spec), loss="mse")
        model.fit(*make_data(0), verbose=0)

    def apply_gradients():
        opt = hvdc.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=spec)
        opt.apply_gradients([(tf.zeros([40, 50]), variable)])

    ways = {
        "apply_gradients": apply_gradients, "fit": fit, "tape": step,
        "tape in a function": tf.function(step, autograph=False),
    }  # fmt: skip
    text = error_on_all_ranks(ways[way])
    assert "ranks disagree on compression: rank 0 has int8, rank 1 has int4;" in text


def fitting(optimizer, frozen=False, model=None):
    """A model (a new one by default) compiled for `fit`, whose first layer may be frozen."""
    model = model or make_model(KERASES["keras"], seed=0)
    model.layers[0].trainable = not frozen
    model.compile(optimizer, loss="mse", jit_compile=False)
    return model


def fit(model, *callbacks):
    model.fit(*make_data(hvd.rank()), batch_size=32, verbose=0, callbacks=callbacks)


def error_of_fit(model, *callbacks):
    """The error at the beginning of `fit`, the same on all ranks, before the first step."""
    steps = []
    seen = KERASES["keras"].callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs: steps.append(batch))
    text = error_on_all_ranks(lambda: fit(model, *callbacks, seen))
    assert not steps
    return text


def sgd(**options):
    return hvdc.DistributedOptimizer(KERASES["keras"].optimizers.SGD(0.1), name="one", **options)


def broadcast():
    return hvdc.callbacks.BroadcastGlobalVariablesCallback(0)


def test_a_layer_that_one_rank_freezes_between_two_fits(rank):
    """Also where both lists of variables were trained before, so that no rank makes a plan."""
    first, optimizer = broadcast(), sgd(compression="int8")
    model = fitting(optimizer)
    fit(model, first)
    fit(fitting(optimizer, frozen=True, model=model), first)
    text = error_of_fit(fitting(optimizer, frozen=rank > 0, model=model), first)
    assert "ranks disagree on the number of trained variables: rank 0 has 6, rank 1 has 4;" in text
    fit(fitting(optimizer, model=model), first)
    text = error_of_fit(fitting(optimizer, frozen=rank > 0), broadcast())  # in a first fit
    assert "the number of trained variables: rank 0 has 6, rank 1 has 4;" in text


@pytest.mark.parametrize("follows_epochs", ["dgc", "schedule:(0=int8|30%=int4)"])
@pytest.mark.parametrize("callback", [broadcast, lambda: UpdateEpochStateCallback(types.SimpleNamespace(epoch=0))])
def test_epochs_that_only_one_rank_follows(follows_epochs, callback, rank):
    """It alone would gather the number of the epoch."""
    spec = "int8" if rank else follows_epochs
    text = error_of_fit(fitting(sgd(compression=spec)), callback())
    assert f"ranks disagree on compression: rank 0 has {hvdc.Compression.parse(follows_epochs).spec}, rank 1 " in text


@pytest.fixture
def same_number_of_reducers():
    """Also after tests in which only some ranks make one."""
    yield
    introspect.set_reducers_made(max(hvd.allgather_object(introspect.reducers_made())))


def test_local_steps_on_one_rank(rank):
    """Which would compare the number of batches by itself."""
    text = error_of_fit(fitting(sgd(local_steps=None if rank else 2)), broadcast())
    assert "ranks disagree on local_steps: rank 0 has 2, rank 1 has None;" in text


@pytest.mark.usefixtures("same_number_of_reducers")
def test_a_plain_optimizer_on_one_rank_in_a_later_fit(rank):
    first, model = broadcast(), fitting(sgd())
    fit(model, first)
    plain = fitting(KERASES["keras"].optimizers.SGD(0.1), model=model) if rank else model
    with pytest.raises(ValueError, match="the model's optimizer is distributed: rank 0 has True, rank 1 has False;"):
        fit(plain, first)


@pytest.mark.usefixtures("same_number_of_reducers")
def test_a_plain_optimizer_on_one_rank(rank):
    plain = KERASES["keras"].optimizers.SGD(0.1)
    with pytest.raises(ValueError, match="the model's optimizer is distributed: rank 0 has True, rank 1 has False;"):
        fit(fitting(plain if rank else sgd()), broadcast())


def test_a_callback_that_has_broadcast_on_one_rank(rank):
    first, model = broadcast(), fitting(sgd())
    fit(model, first)
    text = error_of_fit(model, broadcast() if rank else first)
    assert "whether they have broadcast the model before: rank 0 has True, rank 1 has False;" in text


@pytest.mark.usefixtures("same_number_of_reducers")
def test_process_sets_in_fit(rank, size, process_sets):
    even, _ = process_sets
    model = fitting(sgd(process_set=hvd.global_process_set if rank else even))
    text = error_of_fit(model, broadcast())
    assert f"process_set: rank 0 has {even.ranks}, rank 1 has {list(range(size))};" in text
    # Those outside of it may do as they like.
    fit(fitting(KERASES["keras"].optimizers.SGD(0.1) if rank else sgd(process_set=even)), broadcast())


@pytest.mark.skipif(not IS_KERAS3, reason="in Keras 2, an optimizer has variables for each that it trains")
def test_local_variables_may_differ_in_fit(rank):
    optimizer, model = sgd(compression="int8"), make_model(KERASES["keras"], seed=0)
    if rank:
        model.layers[0].trainable = False
    for variable in [] if rank else model.layers[0].trainable_variables:
        optimizer.register_local_var(variable)
    model.compile(optimizer, loss="mse", jit_compile=False)
    fit(model, broadcast())


def saving(**options):
    return hvdc.callbacks.ResidualCheckpoint(tempfile.mkdtemp(), **options)


CALLBACKS = [
    (hvdc.callbacks.CompressionGuard, "every", (10, 20)),
    (hvdc.callbacks.CompressionGuard, "calm", (10, 20)),
    (hvdc.callbacks.CompressionGuard, "milder", (["int8"], ["none"])),
    (hvdc.callbacks.CompressionGuard, "monitor", (None, "loss")),
    (hvdc.callbacks.CompressionGuard, "mode", ("min", "max")),
    (saving, "save_freq", (10, 20)),
    (saving, "max_to_keep", (2, 3)),
    (saving, "resume", (True, False)),
    (lambda **options: CommitStateCallback(None, **options), "batches_per_commit", (1, 2)),
]


@pytest.mark.parametrize(("make", "argument", "values"), CALLBACKS)
def test_arguments_of_callbacks(make, argument, values, rank):
    callback = make(**{argument: values[min(rank, 1)]})
    callback.set_model(fitting(sgd(compression="int8")))
    text = error_on_all_ranks(callback.on_train_begin)
    what = f"ranks disagree on {type(callback).__name__}'s {argument}: "
    assert f"{what}rank 0 has {values[0]!r}, rank 1 has {values[1]!r};" in text


def test_a_model_that_has_trained_on_one_rank(rank):
    """The others alone would look for a save."""
    optimizer, callback = sgd(compression="int8"), saving()
    introspect.set_pending(optimizer, [] if rank else [None])
    callback.set_model(fitting(optimizer))
    text = error_on_all_ranks(callback.on_train_begin)
    assert "'s model has trained in this process: rank 0 has True, rank 1 has False;" in text


def test_another_optimizer_class(rank):
    keras = KERASES["keras"]
    inner = keras.optimizers.SGD(0.1) if rank == 0 else keras.optimizers.Adam(0.1)
    opt = hvdc.DistributedOptimizer(inner, compression="none" if rank == 0 else "int8")
    variable = tf.Variable(tf.zeros([40, 50]))
    text = error_on_all_ranks(lambda: opt.apply_gradients([(tf.zeros([40, 50]), variable)]))
    assert "disagree on compression: rank 0 has none, rank 1 has int8;" in text


def test_agreeing_ranks_ask_once_per_list_of_variables(rank, size, monkeypatch):
    """Two models in one loop, as of a GAN, on optimizers and on tapes."""
    keras = KERASES["keras"]
    asked = []
    allgather = hvd.allgather

    def counted(tensor, name=None, **options):
        asked.append(name)
        return allgather(tensor, name=name, **options)

    monkeypatch.setattr(agreement.hvd, "allgather", counted)
    weights = [tf.Variable(tf.zeros([40, 50])), tf.Variable(tf.zeros([30, 60]))]
    optimizers = [hvdc.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=spec) for spec in ("int8", "none")]

    def step(pull):
        for opt, weight in zip(optimizers, weights):
            opt.apply_gradients([(tf.ones(weight.shape) * pull, weight)])
        for weight in weights:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(weight * pull)
            (gradient,) = hvdc.DistributedGradientTape(tape, compression="int4").gradient(loss, [weight])
            weight.assign_sub(gradient)

    for opt, weight in zip(optimizers, weights):
        opt.build([weight])
    for _ in range(3):
        step(tf.constant(float(rank)))
    assert asked.count("hvdc_agreement") == 4
    for weight in weights:
        np.testing.assert_allclose(weight.numpy(), -3 * (size - 1), atol=0.1)


@pytest.mark.np4
def test_process_sets_agree_among_themselves(rank, process_sets):
    even, odd = process_sets
    if rank % 2:
        reduce(process_set=odd)
    else:
        with pytest.raises(ValueError, match="rank 0 has int8, rank 2 has int4;"):
            reduce(process_set=even, compressor=hvdc.Compression.parse("int8" if rank == 0 else "int4"))
