"""Training that is interrupted, saved and resumed, against training that is not; different data on each rank."""

import os
import re
import shutil
import zipfile
from pathlib import Path

import horovod.tensorflow as hvd
import introspect
import numpy as np
import pytest
import tensorflow as tf
from marks import slow
from tensorflow import keras as tf_dot_keras

import hvd_compress as hvdc
from hvd_compress.checkpoint import files, plan_state

KERASES = {"keras": tf_dot_keras}
try:
    import tf_keras

    KERASES["tf_keras"] = tf_keras
except ImportError:  # TF 2.15: tf.keras is Keras 2
    pass
IS_KERAS3 = hasattr(tf_dot_keras.optimizers.Optimizer, "stateless_apply")
pytestmark = pytest.mark.usefixtures("fixed_costs")
CONFIGURATIONS = {
    "int8": {"compression": "int8"},
    "hybrid": {"compression": "hybrid:ratio=0.05,bits=4"},
    "momentum": {"compression": "topk:ratio=0.05", "momentum_correction": 0.9},
    "bfloat16": {"compression": "topk:ratio=0.05", "residual_dtype": "bfloat16"},
    "padding": {"compression": "onebit"},  # which leaves a residual between and after the gradients
    "random": {"compression": "randomk:ratio=0.1"},  # draws by the step
    "whole": {"compression": "block_sparse:ratio=0.1,block=4"},
    "factors": {"compression": "powersgd:rank=2"},
    "factors of auto": {"compression": "auto:candidates=(powersgd:rank=2)"},
    "buckets": {"compression": "int8", "bucket_bytes": 4096, "op": hvd.Sum},
    "delay": {"compression": "randomk:ratio=0.1", "delay": 1, "delay_warmup": 1},
    "local steps": {"compression": "hybrid:ratio=0.05,bits=4", "local_steps": 3},  # an epoch ends within a round
}
STEPS = 4  # per epoch


@pytest.fixture
def shared(tmp_path):
    """A directory that all ranks see."""
    return hvd.broadcast_object(str(tmp_path), 0)


def make_model(keras, optimizer=None, name=None, **options):
    keras.utils.set_random_seed(7)
    layers = [keras.layers.Dense(67, activation="relu"), keras.layers.Dense(33, activation="relu", name=name)]
    model = keras.Sequential([keras.Input((24,)), *layers, keras.layers.Dense(4)])
    optimizer = optimizer or keras.optimizers.SGD(0.02, momentum=0.5)
    model.compile(optimizer=hvdc.DistributedOptimizer(optimizer, **options), loss="mse")
    return model


def data(rank):
    rng = np.random.default_rng(rank)
    x = rng.standard_normal((8 * STEPS, 24)).astype(np.float32)
    return x, (x[:, :4] + 0.1 * rng.standard_normal((8 * STEPS, 4))).astype(np.float32)


def fit(model, rank, epochs, start=0, callbacks=()):
    options = {"batch_size": 8, "verbose": 0, "shuffle": False, "callbacks": list(callbacks)}
    return model.fit(*data(rank), epochs=epochs, initial_epoch=start, **options)


def plans(model):
    return introspect.plans_of(model.optimizer)


def state_bytes(model):
    """Everything that a rank keeps, as it is in memory."""
    return [variable.numpy().tobytes() for plan in plans(model) for variable in introspect.state_variables(plan)]


def restart(keras, model, **options):
    """A new process, as far as that can be had in one: model and optimizer of its own, from what was saved."""
    new = make_model(keras, **options)
    new.set_weights(model.get_weights())
    new.optimizer.build(new.trainable_variables)
    for variable, old in zip(variables_of(new.optimizer), variables_of(model.optimizer)):
        variable.assign(np.asarray(old))
    return new


def variables_of(optimizer):
    return optimizer.variables() if callable(optimizer.variables) else optimizer.variables


def one_line(error):
    text = str(error.value)
    assert "\n" not in text
    unnumbered = re.sub(r"dense_\d+", "dense", text)  # ranks may have made different numbers of layers before
    assert len(set(hvd.allgather_object(unnumbered))) == 1, "ranks raise different errors"
    return text


def fails(model, directory, rank, match):
    """Training does not start, with the same line on all ranks."""
    before = model.get_weights()
    with pytest.raises(ValueError, match=match) as error:
        fit(model, rank, 2, 1, [hvdc.callbacks.ResidualCheckpoint(directory)])
    for old, new in zip(before, model.get_weights()):
        np.testing.assert_array_equal(old, new)
    return one_line(error)


@pytest.fixture(scope="module", params=sorted(KERASES))
def uninterrupted(request, rank):
    """A Keras, and for each number of epochs what a run with hybrid that is never saved has then."""
    keras = KERASES[request.param]
    model, found = make_model(keras, **CONFIGURATIONS["hybrid"]), {}
    for start, epochs in ((0, 2), (2, 4)):
        fit(model, rank, epochs, start)
        found[epochs] = state_bytes(model), model.get_weights()
    return keras, found


def test_a_resumed_run_continues_bit_identically(uninterrupted, rank, shared):
    keras, options = uninterrupted[0], CONFIGURATIONS["hybrid"]
    state, weights = uninterrupted[1][2]
    first = make_model(keras, **options)
    fit(first, rank, 1, callbacks=[hvdc.callbacks.ResidualCheckpoint(shared)])
    second = restart(keras, first, **options)
    fit(second, rank, 2, 1, [hvdc.callbacks.ResidualCheckpoint(shared)])
    assert state_bytes(second) == state
    for ours, theirs in zip(second.get_weights(), weights):
        np.testing.assert_array_equal(ours, theirs)

    # The test could fail: without the residuals the run goes elsewhere.
    second.set_weights(first.get_weights())
    for variable, old in zip(variables_of(second.optimizer), variables_of(first.optimizer)):
        variable.assign(np.asarray(old))
    for variable in introspect.residual_variables(plans(second)[0]):
        variable.assign(tf.zeros_like(variable))
    fit(second, rank, 2, 1, [hvdc.callbacks.ResidualCheckpoint(shared, resume=False)])
    assert any((a != b).any() for a, b in zip(second.get_weights(), weights))


SHAPES = [(24, 67), (67,), (67, 33), (33,), (33, 4), (4,)]  # of the model


class Loop:
    """Steps of a custom loop."""

    def __init__(self, **options):
        rng = np.random.default_rng(0)
        self.weights = [tf.Variable(rng.standard_normal(s).astype(np.float32), name="w") for s in SHAPES]
        sgd = tf_dot_keras.optimizers.SGD(0.02, momentum=0.5)
        self.optimizer = hvdc.DistributedOptimizer(sgd, **options)
        self.optimizer.build(self.weights)

        @tf.function
        def step(*gradients):
            self.optimizer.apply_gradients(zip(gradients, self.weights))

        self._step = step

    def train(self, rank, steps):
        for step in steps:
            rng = np.random.default_rng([rank, step])
            self._step(*(tf.constant(rng.standard_normal(s), tf.float32) for s in SHAPES))

    def restarted(self, **options):
        """A new process, as far as that can be had in one."""
        new = Loop(**options)
        theirs = [*self.weights, *variables_of(self.optimizer)]
        for variable, old in zip([*new.weights, *variables_of(new.optimizer)], theirs):
            variable.assign(np.asarray(old))
        return new


@pytest.mark.parametrize(
    "name",
    ["bfloat16", "padding", "random", "factors", "delay", *slow("momentum", "whole", "factors of auto", "buckets")],
)
def test_whatever_is_kept_is_taken_up_to_the_bit(name, rank, shared):
    """What a run goes on with after a save is what a new one goes on with after loading it."""
    options = CONFIGURATIONS[name]
    first = Loop(**options)
    first.train(rank, range(STEPS))
    hvdc.save_residuals(first.optimizer, shared)
    second = first.restarted(**options)
    assert hvdc.load_residuals(second.optimizer, shared, second.weights) == STEPS
    for each in (first, second):
        each.train(rank, range(STEPS, 2 * STEPS))
    assert state_bytes(second) == state_bytes(first)
    for ours, theirs in zip(second.weights, first.weights):
        np.testing.assert_array_equal(ours, theirs)


def test_sums_of_passes_before_an_exchange_are_saved_too(rank, shared):
    """An epoch ends in the middle of 3 passes: 4 passes, 8 in all."""
    keras, options = KERASES["keras"], {**CONFIGURATIONS["int8"], "backward_passes_per_step": 3}
    first = make_model(keras, **options)
    fit(first, rank, 1, callbacks=[hvdc.callbacks.ResidualCheckpoint(shared)])
    second = restart(keras, first, **options)
    fit(second, rank, 2, 1, [hvdc.callbacks.ResidualCheckpoint(shared)])
    fit(first, rank, 2, 1)
    assert second.optimizer._agg_helper.counter.numpy() == 8 % 3
    assert state_bytes(second) == state_bytes(first)
    for ours, theirs in zip(second.get_weights(), first.get_weights()):
        np.testing.assert_array_equal(ours, theirs)


def test_each_rank_may_have_a_directory_of_its_own(rank, tmp_path):
    keras, options = KERASES["keras"], CONFIGURATIONS["int8"]
    first = make_model(keras, **options)
    fit(first, rank, 1, callbacks=[hvdc.callbacks.ResidualCheckpoint(tmp_path / "residuals")])
    assert len(list((tmp_path / "residuals" / "save-00000001").glob("*.npz"))) == 1
    second = restart(keras, first, **options)
    fit(second, rank, 2, 1, [hvdc.callbacks.ResidualCheckpoint(tmp_path / "residuals")])
    fit(first, rank, 2, 1)
    assert state_bytes(second) == state_bytes(first)


def test_the_newest_two_are_kept_and_the_one_of_the_models_step_is_taken(rank, shared, gather):
    keras, options = KERASES["keras"], CONFIGURATIONS["int8"]
    model = make_model(keras, **options)
    states, copies = [], []

    class Record(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            states.append(state_bytes(self.model))
            copies.append(restart(keras, self.model, **options))

    fit(model, rank, 3, callbacks=[hvdc.callbacks.ResidualCheckpoint(shared), Record()])
    hvd.allgather_object(0)  # the other rank may still be deleting
    assert sorted(os.listdir(shared)) == ["save-00000002", "save-00000003"]
    # The model was saved an epoch earlier: the save before the newest is its own.
    assert hvdc.load_residuals(copies[1].optimizer, shared) == 2 * STEPS
    fit(copies[1], rank, 3, 2)
    assert state_bytes(copies[1]) == states[2]
    line = fails(copies[0], shared, rank, "restore the model of one of these steps")
    assert f"[{2 * STEPS}, {3 * STEPS}]" in line and f"step {STEPS}" in line


def test_save_freq_counts_batches_over_epochs(rank, shared):
    keras = KERASES["keras"]
    model = make_model(keras, **CONFIGURATIONS["int8"])
    seen = []

    class Record(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(len(files.complete(shared)))

    callback = hvdc.callbacks.ResidualCheckpoint(shared, save_freq=3, max_to_keep=9)
    fit(model, rank, 2, callbacks=[callback, Record()])
    if rank == 0:
        assert seen == [0, 0, 1, 1, 1, 2, 2, 2]
        assert [files.read_manifest(shared, n)["step"] for n in files.complete(shared)] == [3, 6]


@pytest.mark.parametrize("save_freq", [0, -1, True, 1.5, "batch"])
def test_arguments_are_checked(save_freq):
    with pytest.raises(ValueError, match="save_freq must be"):
        hvdc.callbacks.ResidualCheckpoint("x", save_freq=save_freq)
    with pytest.raises(ValueError, match="max_to_keep must be"):
        hvdc.callbacks.ResidualCheckpoint("x", max_to_keep=0)
    with pytest.raises(TypeError, match="residuals are kept by hvdc.DistributedOptimizer"):
        hvdc.save_residuals(KERASES["keras"].optimizers.SGD(), "x")


@pytest.fixture(scope="module")
def saved(tmp_path_factory, rank):
    """A trained model and its checkpoint, to copy."""
    directory = hvd.broadcast_object(str(tmp_path_factory.mktemp("saved")), 0)
    model = make_model(KERASES["keras"], **CONFIGURATIONS["int8"])
    fit(model, rank, 1, callbacks=[hvdc.callbacks.ResidualCheckpoint(directory)])
    return model, directory


@pytest.fixture
def copied(saved, shared, rank):
    """A restarted model, and a copy of its checkpoint; what rank 0 does to it comes before the others read."""
    model, directory = saved
    if rank == 0:
        shutil.copytree(directory, shared, dirs_exist_ok=True)
    hvd.allgather_object(0)
    return restart(KERASES["keras"], model, **CONFIGURATIONS["int8"]), shared


def only_on_rank_0(rank, action, *arguments):
    if rank == 0:
        action(*arguments)
    hvd.allgather_object(0)


def test_a_missing_file_of_one_rank_is_found_by_all(copied, rank):
    model, directory = copied
    only_on_rank_0(rank, os.unlink, files.rank_path(directory, 1, 1, 2))
    line = fails(model, directory, rank, "rank-1-of-2.npz is missing: each rank needs the file that it wrote")
    assert line.startswith("residual checkpoint, rank 1: ")


@pytest.mark.parametrize("victim", [0, 1])
def test_a_damaged_file_of_one_rank_is_found_by_all(victim, copied, rank):
    model, directory = copied
    path = files.rank_path(directory, 1, victim, 2)
    size = os.path.getsize(path)
    only_on_rank_0(rank, os.truncate, path, size // 2)
    fails(model, directory, rank, f"rank-{victim}-of-2.npz is damaged or cut short")


def read_rank(path):
    return files.read_rank(path, lambda metadata: plan_state.PlanState.names(metadata["plans"]))


PADDING = "0.padding.residuals.0"


def rewrite(path, change):
    metadata, arrays = read_rank(path)
    tensor = next(name for name in arrays if ".residuals." in name and "padding" not in name)
    change(metadata, arrays, tensor)
    directory, number = os.path.split(os.path.dirname(path))
    files.write_rank(directory, int(number.partition("-")[2]), metadata, arrays)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda _, arrays, name: arrays.update({name: arrays[name][:-1]}), "has the shape"),
        (lambda _, arrays, name: arrays.update({name: arrays[name].astype(np.int32)}), "is of type int32"),
        (lambda _, arrays, name: arrays.update({name: arrays[name] * np.nan}), "is not finite"),
        (lambda _, arrays, name: arrays.update({"0.named.step": np.array(-3)}), "the number of steps is -3"),
        (lambda _, arrays, name: arrays.update({"0.named.step": np.array([1, 2])}), r"number of steps is \[1, 2\]"),
        (lambda metadata, arrays, name: arrays.pop(name), "its entries do not fit together"),
        (lambda _, arrays, name: arrays.update({"0.named.step": np.array("3")}), "step is of type <U1"),
        (
            lambda _, arrays, name: arrays.update({PADDING: arrays[PADDING] * np.nan}),
            "padding of residuals is not finite",
        ),
        (
            lambda _, arrays, name: arrays.update({PADDING: arrays[PADDING].astype(str)}),
            "padding of residuals is of type",
        ),
        (lambda _, arrays, name: arrays.update({PADDING: arrays[PADDING][:, None]}), "must have one dimension"),
        (lambda _, arrays, name: arrays.update({PADDING: arrays[PADDING][:-1]}), "do not belong to the same training"),
        (lambda metadata, *_: metadata["plans"][0]["pieces"][0].reverse(), "do not belong to the same training"),
        (lambda metadata, arrays, name: metadata.update(plans=[]), "do not belong to the same training"),
        (lambda _, arrays, name: arrays.update({"0.named.step": np.array(99)}), "do not belong to the same training"),
    ],
)
def test_a_wrong_value_in_the_file_of_one_rank_is_found_by_all(change, message, copied, rank):
    model, directory = copied
    only_on_rank_0(rank, rewrite, files.rank_path(directory, 1, 1, 2), change)
    fails(model, directory, rank, message)


@pytest.mark.parametrize("made", [False, True], ids=["new plan", "old plan"])
def test_what_does_not_fit_one_rank_is_found_by_all_as_it_is_restored(made, rank, shared):
    """Files that agree with each other, and what waits of one rank has another shape than its bucket."""
    options = CONFIGURATIONS["delay"]
    first = Loop(**options)
    first.train(rank, range(STEPS))
    hvdc.save_residuals(first.optimizer, shared)

    def shorten(_, arrays, name):
        waiting = next(name for name in arrays if ".waiting." in name and arrays[name].ndim)
        arrays[waiting] = arrays[waiting][:-1]

    only_on_rank_0(rank, rewrite, files.rank_path(shared, 1, 1, 2), shorten)
    second = first.restarted(**options)
    if made:
        second.train(rank, range(STEPS, STEPS + 1))
        second.optimizer.iterations.assign(STEPS)

    def resume():
        hvdc.load_residuals(second.optimizer, shared, second.weights)
        assert not made
        second.train(rank, range(STEPS, STEPS + 1))

    with pytest.raises(ValueError, match="what waits for the next step .* fits this run on some ranks only") as error:
        resume()
    one_line(error)


@pytest.mark.parametrize("names", [("tower_1", "tower_2"), ("tower_2", "tower_1")])
def test_layers_in_another_order_do_not_swap_their_residuals(names, rank, shared):
    keras, options = KERASES["keras"], CONFIGURATIONS["int8"]

    def towers(*names):
        keras.utils.set_random_seed(7)
        model = keras.Sequential([keras.Input((24,)), *[keras.layers.Dense(24, name=name) for name in names]])
        model.add(keras.layers.Dense(4))
        model.compile(hvdc.DistributedOptimizer(keras.optimizers.SGD(0.02), **options), loss="mse")
        return model

    fit(towers("tower_5", "tower_10"), rank, 1, callbacks=[hvdc.callbacks.ResidualCheckpoint(shared)])
    resumed = towers(*names)
    resumed.optimizer.build(resumed.trainable_variables)
    resumed.optimizer.iterations.assign(STEPS)
    assert hvdc.load_residuals(resumed.optimizer, shared) == STEPS
    if names == ("tower_1", "tower_2"):  # Keras has counted from another number, and that is all
        fit(resumed, rank, 2, 1)
        assert not introspect.pending_states(resumed.optimizer)
    else:
        with pytest.raises(ValueError, match="belong to other gradients") as error:
            fit(resumed, rank, 2, 1)
        one_line(error)


def test_another_model_or_other_settings_are_found_by_all(saved, shared, rank):
    keras, (model, directory) = KERASES["keras"], saved
    other = restart(keras, model, name="head", **CONFIGURATIONS["int8"])
    fails(other, directory, rank, "belongs to another model: it has .*kernel of shape .*67, 33")
    for option, value in (
        ("compression", "int4"), ("min_compress_size", 2000), ("gradient_predivide_factor", 2.0),
        ("error_feedback", False), ("sparse_as_dense", True),
    ):  # fmt: skip
        other = restart(keras, model, **{**CONFIGURATIONS["int8"], option: value})
        fails(other, directory, rank, f"was saved with {option}=")
    # What changes only how residuals cross or are kept does not matter.
    for options in ({"bucket_bytes": 4096}, {"residual_dtype": "bfloat16"}, {"residual_decay": 0.5}):
        other = restart(keras, model, **CONFIGURATIONS["int8"], **options)
        assert hvdc.load_residuals(other.optimizer, directory, other.trainable_variables) == STEPS
    fit(other, rank, 2, 1)


def test_another_model_is_found_in_the_first_step_where_no_variables_are_named(saved, rank):
    keras, (model, directory) = KERASES["keras"], saved
    other = restart(keras, model, **CONFIGURATIONS["int8"])
    other.layers[0].trainable = False
    other.compile(optimizer=other.optimizer, loss="mse")
    assert hvdc.load_residuals(other.optimizer, directory) == STEPS
    with pytest.raises(ValueError, match="belong to other gradients") as error:
        fit(other, rank, 2, 1)
    one_line(error)


def test_another_format_version_is_found_by_all(copied, rank, monkeypatch):
    model, directory = copied
    monkeypatch.setattr(files, "VERSION", 2)
    fails(model, directory, rank, "is of format version 1, and this hvd_compress reads 2")


def test_ranks_at_different_steps_are_found_by_all(copied, rank):
    model, directory = copied
    if rank == 1:
        model.optimizer.iterations.assign(0)
    fails(model, directory, rank, "the ranks are at different steps")


@pytest.mark.parametrize("victim, file", [(1, "rank-1-of-2.npz"), (0, "manifest.json")])
def test_a_rank_that_cannot_write_stops_all_and_the_last_save_stays(victim, file, copied, rank, monkeypatch):
    model, directory = copied
    before, write = files.numbers(directory), files._write

    def full(path, function):
        if path.endswith(file):
            Path(path + ".tmp").write_bytes(b"the part for which there was room")
            raise OSError(28, "No space left on device")
        write(path, function)

    if rank == victim:
        monkeypatch.setattr(files, "_write", full)
    with pytest.raises(RuntimeError, match=f"rank {victim}: .*No space left on device") as error:
        hvdc.save_residuals(model.optimizer, directory, step=100)
    one_line(error)
    monkeypatch.undo()
    hvd.allgather_object(0)
    assert files.numbers(directory) == before  # the failed save takes no room
    assert hvdc.load_residuals(model.optimizer, directory) == STEPS


def test_an_unfinished_first_save_is_no_save(rank, shared, recwarn):
    model = make_model(KERASES["keras"], **CONFIGURATIONS["int8"])
    assert hvdc.load_residuals(model.optimizer, shared) is None
    assert not [w for w in recwarn if "residual" in str(w.message)]
    hvd.allgather_object(0)
    only_on_rank_0(rank, os.makedirs, os.path.join(shared, "save-00000001"))
    assert hvdc.load_residuals(model.optimizer, shared) is None
    warned = [w for w in recwarn if "holds no complete save" in str(w.message)]
    assert len(warned) == (1 if rank == 0 else 0)


def test_loading_into_a_plan_that_exists_already(saved, rank):
    model, directory = saved
    other = restart(KERASES["keras"], model, **CONFIGURATIONS["int8"])
    fit(other, rank, 2, 1)
    assert state_bytes(other) != state_bytes(model)
    assert hvdc.load_residuals(other.optimizer, directory, step=STEPS) == STEPS
    assert state_bytes(other) == state_bytes(model)


def test_a_save_before_the_first_step_holds_what_was_loaded(saved, shared, rank):
    model, directory = saved
    other = restart(KERASES["keras"], model, **CONFIGURATIONS["int8"])
    hvdc.load_residuals(other.optimizer, directory)
    hvdc.save_residuals(other.optimizer, shared)
    first, second = (read_rank(files.rank_path(d, 1, rank, 2))[1] for d in (directory, shared))
    assert sorted(first) == sorted(second) and len(first) > 3
    for name in first:
        np.testing.assert_array_equal(first[name], second[name])


# Another number of ranks


def kernels(state, field="residuals"):
    return [state.tensors[field][i].astype(np.float64) for i in sorted(state.tensors[field])]


def write_as(directory, ranks, states, manifest):
    """A complete save of `ranks` ranks, by hand."""
    manifest = {**manifest, "ranks": ranks, "save": "by hand"}
    for rank, state in enumerate(states):
        packed, arrays = state.packed("0")
        files.write_rank(directory, 1, {**manifest, "rank": rank, "plans": [packed]}, arrays)
    files.write_manifest(directory, 1, manifest)


@pytest.mark.parametrize(("name", "old"), [("int8", 1), *slow(("momentum", 3), ("bfloat16", 4))])
def test_the_sum_over_ranks_is_kept_on_another_number_of_ranks(name, old, rank, size, shared, tmp_path, gather):
    keras, options = KERASES["keras"], CONFIGURATIONS[name]
    model = make_model(keras, **options)
    fit(model, rank, 1, callbacks=[hvdc.callbacks.ResidualCheckpoint(tmp_path)])
    template = introspect.saved_state(plans(model)[0])
    number = files.complete(tmp_path)[-1] if rank == 0 else None
    manifest = hvd.broadcast_object(files.read_manifest(tmp_path, number) if rank == 0 else None, 0)

    def of(q):
        rng = np.random.default_rng(q)
        random = {
            field: {i: (rng.standard_normal(t.shape) / 8).astype(t.dtype) for i, t in held.items()}
            for field, held in template.tensors.items()
        }
        return introspect.state_with(template, random)

    only_on_rank_0(rank, lambda: write_as(shared, old, [of(q) for q in range(old)], manifest))

    resumed = restart(keras, model, **options)
    fresh = model  # whose plan is there already
    for target in (resumed, fresh):
        assert hvdc.load_residuals(target.optimizer, shared, target.trainable_variables, step=STEPS) == STEPS
    loaded = introspect.saved_state(plans(fresh)[0])
    assert int(loaded.replicated_state["step"]) == STEPS
    rounding = 2**-7 if name == "bfloat16" else 1e-6
    for field in template.tensors:
        for mine, *theirs in zip(kernels(loaded, field), *[kernels(of(q), field) for q in range(old)]):
            np.testing.assert_allclose(gather(mine).sum(0), np.sum(theirs, 0), atol=rounding)
            np.testing.assert_allclose(mine, np.sum([np.zeros_like(mine), *theirs[rank::size]], 0), atol=rounding)
    # Nothing of it lies where no gradient does.
    for free in loaded.padding.values():
        assert all((part == 0).all() for part in free)
    fit(resumed, rank, 2, 1)
    fit(fresh, rank, 2, 1)
    assert not introspect.pending_states(resumed.optimizer)


def test_another_number_of_ranks_needs_all_files(saved, shared, rank):
    model, directory = saved
    only_on_rank_0(rank, shutil.copytree, directory, os.path.join(shared, "copy"))
    directory = os.path.join(shared, "copy")
    manifest = files.read_manifest(directory, 1)
    hvd.allgather_object(0)
    only_on_rank_0(rank, files.write_manifest, directory, 1, {**manifest, "ranks": 3})
    other = restart(KERASES["keras"], model, **CONFIGURATIONS["int8"])
    fails(other, directory, rank, "2 ranks instead of 3 need a file system that all of them share")


def test_residual_mass_that_was_taken_over_reaches_the_weights(rank, size, shared):
    """From 4 ranks to 2, with op Sum and gradients of zero: the weights move by the sum of all four."""
    options = {"compression": "topk:ratio=0.5", "op": hvd.Sum, "min_compress_size": 0}

    def new():
        weight = tf.Variable(np.zeros((40, 50), np.float32), name="weight")
        return weight, hvdc.DistributedOptimizer(tf_dot_keras.optimizers.SGD(1.0), **options)

    weight, optimizer = new()
    zeros = tf.zeros((40, 50))
    optimizer.apply_gradients([(zeros, weight)])
    hvdc.save_residuals(optimizer, shared)
    state = introspect.saved_state(introspect.plan_of(optimizer))
    number = files.complete(shared)[-1]
    manifest = files.read_manifest(shared, number)
    residuals = np.random.default_rng(0).standard_normal((4, 40, 50)).astype(np.float32)
    states = [introspect.state_with(state, {"residuals": {0: r}}) for r in residuals]
    only_on_rank_0(rank, lambda: write_as(os.path.join(shared, "four"), 4, states, manifest))
    weight, optimizer = new()
    optimizer.iterations.assign(1)
    assert hvdc.load_residuals(optimizer, os.path.join(shared, "four"), [weight]) == 1
    for _ in range(2):
        optimizer.apply_gradients([(zeros, weight)])
    np.testing.assert_allclose(weight.numpy(), -residuals.sum(0), atol=1e-5)


@pytest.mark.np4
@pytest.mark.parametrize("name", ["dgc", "OneBitAdam"])
def test_from_four_ranks_to_two_and_back(name, process_sets, rank, size, shared, gather):
    """Two jobs of two ranks each go on from one of four, and then four from one of these."""
    keras = KERASES["keras"]
    if name == "OneBitAdam" and not IS_KERAS3:
        pytest.skip("a Keras 3 optimizer")
    steps, two = 5, process_sets[rank % 2]

    def begin(older=None, group=hvd.global_process_set):
        weights = [tf.Variable(np.ones(shape, np.float32), name="w") for shape in [(40, 50), (30,)]]
        if name == "dgc":
            dgc = hvdc.Compression.dgc(0.01, clipnorm=1.0, warmup_epochs=1, steps_per_epoch=2 * steps)
            optimizer = hvdc.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=dgc, process_set=group)
        else:
            optimizer = hvdc.optimizers.OneBitAdam(0.01, freeze_step=3, process_set=group)
        optimizer.build(weights)
        if older is not None:
            for new, old in zip([*weights, *variables_of(optimizer)], older):
                new.assign(np.asarray(old))
        return weights, optimizer

    def train(weights, optimizer, seed):
        random = np.random.default_rng([seed, rank])
        for _ in range(steps):
            gradients = [tf.constant(random.standard_normal(w.shape), tf.float32) for w in weights]
            optimizer.apply_gradients(zip(gradients, weights))
        return [v.numpy() for v in [*weights, *variables_of(optimizer)]]

    def state(optimizer, shared_by):
        """What the ranks of `shared_by` keep, summed; and what is alike on all of them."""
        (found,) = introspect.pending_states(optimizer) or introspect.saved_states(optimizer)
        everyone = [each for r, each in enumerate(hvd.allgather_object(found)) if r in shared_by]
        sums = [
            np.sum([each.tensors[field][i].astype(np.float64) for each in everyone], 0)
            for field in sorted(found.tensors)
            for i in sorted(found.tensors[field])
        ]
        named = [np.asarray(found.replicated_state[key]) for key in sorted(found.replicated_state)]
        return [*sums, *named]

    mine, everybody = range(rank % 2, size, 2), range(size)
    first = begin()
    after = train(*first, 0)
    hvdc.save_residuals(first[1], f"{shared}/four")
    saved = state(first[1], everybody)
    assert all(np.abs(tensor).max() > 0.01 for tensor in saved[:1])

    second = begin(after, two)
    assert hvdc.load_residuals(second[1], f"{shared}/four", second[0]) == steps
    for now, then in zip(state(second[1], mine), saved):
        np.testing.assert_allclose(now, then, atol=1e-5)
    after = train(*second, 1)
    hvdc.save_residuals(second[1], f"{shared}/two_{rank % 2}")
    saved = hvd.broadcast_object(state(second[1], mine), 0)
    for tensor in after:
        np.testing.assert_array_equal(*gather(tensor)[rank % 2 :: 2])

    third = begin(hvd.broadcast_object(after, 0))
    assert hvdc.load_residuals(third[1], f"{shared}/two_0", third[0]) == 2 * steps
    for now, then in zip(state(third[1], everybody), saved):
        np.testing.assert_allclose(now, then, atol=1e-5)
    for tensor in train(*third, 2):
        everyone = gather(tensor)
        assert (everyone == everyone[0]).all()
    plan = introspect.plan_of(third[1])
    assert introspect.steps_made(plan) == 3 * steps
    assert introspect.progress(plan) == pytest.approx(1.5 if name == "dgc" else 1.0)
    if name == "OneBitAdam":
        assert third[1].frozen_at == 3


def test_one_rank_says_that_residuals_are_left_out(process_sets, rank, size, saved):
    """A process set of one: its reducer reduces nothing."""
    if size != 2:
        pytest.skip("sets of one rank")
    model, directory = saved
    own = process_sets[rank]
    before = sorted(os.listdir(directory))
    other = restart(KERASES["keras"], model, **CONFIGURATIONS["int8"], process_set=own)
    with pytest.warns(UserWarning, match="one rank sends nothing, the residuals saved there are left out"):
        fit(other, rank, 2, 1, [hvdc.callbacks.ResidualCheckpoint(directory)])
    assert sorted(os.listdir(directory)) == before
    hvd.allgather_object(0)


# The tape, and what other files and messages contain


def test_residuals_of_a_tape(rank, size, shared):
    def run(weight, steps):
        for step in steps:
            pull = np.random.default_rng([rank, step]).standard_normal((40, 50)).astype(np.float32)
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(weight * pull)
            gradient = hvdc.DistributedGradientTape(tape, compression="topk:ratio=0.1").gradient(loss, [weight])
            weight.assign_sub(gradient[0])
        return weight.numpy()

    def settings():
        return hvdc.DistributedGradientTape(tf.GradientTape(), compression="topk:ratio=0.1")

    def new():
        return tf.Variable(np.zeros((40, 50), np.float32), name="weight")

    expected = run(new(), range(5))
    first = new()
    run(first, range(3))
    hvdc.save_residuals(settings(), shared, [first])
    second = new()
    second.assign(first)
    assert hvdc.load_residuals(settings(), shared, [second]) == 3
    np.testing.assert_array_equal(run(second, range(3, 5)), expected)

    with pytest.raises(ValueError, match="and the model is at step 7"):
        hvdc.load_residuals(settings(), shared, [new()], step=7)
    with pytest.raises(ValueError, match="pass them, as a list, as `variables`"):
        hvdc.save_residuals(settings(), shared)


@pytest.mark.skipif(not IS_KERAS3, reason="saves in Keras 3's format")
def test_the_saved_model_and_the_broadcast_have_no_residuals(rank, size, shared, tmp_path, gather):
    keras, options = tf_dot_keras, CONFIGURATIONS["momentum"]
    model = make_model(keras, **options)
    fit(model, rank, 1, callbacks=[hvdc.callbacks.ResidualCheckpoint(shared)])
    path = tmp_path / "model.keras"
    model.save(path)
    plain = make_model(keras, **options)
    plain.compile(optimizer=keras.optimizers.SGD(0.02, momentum=0.5), loss="mse")
    plain.optimizer.build(plain.trainable_variables)
    plain.save(tmp_path / "plain.keras")
    sizes = [zipfile.ZipFile(p).getinfo("model.weights.h5").file_size for p in (path, tmp_path / "plain.keras")]
    assert sizes[0] == sizes[1]

    loaded = keras.models.load_model(path)
    assert type(loaded.optimizer) is keras.optimizers.SGD
    assert len(loaded.optimizer.variables) == len(plain.optimizer.variables)
    loaded.compile(optimizer=hvdc.DistributedOptimizer(loaded.optimizer, **options), loss="mse")
    callbacks = [
        hvdc.callbacks.BroadcastGlobalVariablesCallback(0),
        hvdc.callbacks.ResidualCheckpoint(shared),
    ]
    fit(loaded, rank, 3, 1, callbacks)
    # Bit-identical: the broadcast has left each rank its own residuals.
    fit(model, rank, 3, 1)
    assert state_bytes(loaded) == state_bytes(model)
    residuals = gather(introspect.residual_variables(plans(loaded)[0])[0].numpy())
    assert (residuals[0] != residuals[1]).any()


@pytest.mark.skipif(not IS_KERAS3, reason="restores in Keras 3's format")
@pytest.mark.parametrize("name", ["hybrid", "local steps"])
def test_behind_keras_backup_and_restore(name, rank, shared, tmp_path):
    """A job that dies in its third epoch, with the callbacks in the order that the documentation tells."""
    keras, options = KERASES["keras"], CONFIGURATIONS[name]
    uninterrupted = make_model(keras, **options)
    fit(uninterrupted, rank, 4, callbacks=[hvdc.callbacks.BroadcastGlobalVariablesCallback(0)])

    class Dies(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if self.model.optimizer.iterations == 2 * STEPS + 2:
                raise InterruptedError

    def callbacks():
        return [
            keras.callbacks.BackupAndRestore(str(tmp_path / "backup")),
            hvdc.callbacks.BroadcastGlobalVariablesCallback(0),
            hvdc.callbacks.ResidualCheckpoint(shared),
        ]

    with pytest.raises(InterruptedError):
        fit(make_model(keras, **options), rank, 4, callbacks=[*callbacks(), Dies()])
    resumed = make_model(keras, **options)
    fit(resumed, rank, 4, callbacks=callbacks())
    assert state_bytes(resumed) == state_bytes(uninterrupted)
    for value, expected in zip(resumed.get_weights(), uninterrupted.get_weights()):
        np.testing.assert_array_equal(value, expected)


def test_process_sets_with_directories_of_their_own(process_sets, rank, size, tmp_path):
    """Ranks outside of the set take no part."""
    if size != 2:
        pytest.skip("sets of one rank")
    outside = process_sets[1 - rank]
    model = make_model(KERASES["keras"], compression="int8", process_set=outside)
    hvdc.save_residuals(model.optimizer, tmp_path)
    assert hvdc.load_residuals(model.optimizer, tmp_path) is None
    assert os.listdir(tmp_path) == []
