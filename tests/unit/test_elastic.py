"""Elastic state without other ranks: who takes over what, which errors are Horovod's, callbacks, going back."""

import gc
import pickle
import socket
import threading

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from tensorflow import keras

import hvd_compress as hvdc
from hvd_compress.checkpoint import plan_state
from hvd_compress.checkpoint.plan_state import Member, PlanState
from hvd_compress.exchange import connections
from hvd_compress.frontends.elastic import failures, takeover
from hvd_compress.frontends.elastic.failures import horovod_errors

KERASES = {"keras": keras}
try:
    import tf_keras

    KERASES["tf_keras"] = tf_keras
except ImportError:  # TF 2.15: tf.keras is Keras 2
    pass


def test_ranks_are_connected_again_if_one_is_lost_meanwhile(monkeypatch, capsys):
    tried = []

    def init():
        tried.append("init")
        if len(tried) < 4:
            raise ValueError("Horovod initialization failed. Please check log messages above")

    monkeypatch.setattr(connections, "shutdown", lambda: tried.append("shutdown"))
    connections.connect(init)
    assert tried == ["init", "shutdown", "init", "shutdown", "init"]
    assert capsys.readouterr().err.count("a rank was lost while Horovod connected the ranks") == 2
    for text, times in (("Horovod initialization failed", 5), ("comm is of no use", 1)):
        tried.clear()

        def fails(text=text):
            tried.append("init")
            raise ValueError(text)

        with pytest.raises(ValueError, match=text):
            connections.connect(fails)
        assert tried.count("init") == times


def test_only_the_connections_of_horovod_are_cut():
    def pair():
        with socket.create_server(("127.0.0.1", 0)) as server:
            near = socket.create_connection(server.getsockname(), timeout=60)
            far = server.accept()[0]
        far.settimeout(60)
        return near, far

    earlier, made = pair(), []
    connections.connect(lambda: made.extend(pair()))
    later = pair()
    connections.cut()
    assert [end.recv(1) for end in made] == [b"", b""]
    for near, far in (earlier, later):
        near.sendall(b"x")
        assert far.recv(1) == b"x"
    connections.cut()  # nothing is left to be cut


def plan_states(seed, dtype=np.float32):
    random = np.random.default_rng(seed)
    members = [
        Member("dense/kernel", (3, 5), "dense"),
        Member("none", (), "none"),
        Member("b", (7,), "dense"),
    ]
    tensors = {i: random.normal(size=members[i].shape).astype(dtype) for i in (0, 2)}
    padding = {"residuals": [np.zeros(2, np.float32)]}
    named = {"step": np.asarray(seed)}
    return [PlanState(members, {"residuals": tensors}, padding, [[[0, 2], 1, [24]]], named)]


@pytest.mark.parametrize(
    "ranks, present, copied, heirs, lost",
    [
        (3, [0, 1, 2], True, {}, []),
        (3, [0, 2], True, {1: 2}, []),
        (3, [1, 2], True, {0: 1}, []),
        (3, [0, 1], True, {2: 0}, []),
        (3, [0], True, {2: 0}, [1]),  # rank 2 had the copy of rank 1
        (4, [1, 3], True, {0: 1, 2: 3}, []),
        (2, [0], False, {}, [1]),
        (1, [0], True, {}, []),
    ],
)
def test_who_takes_over(ranks, present, copied, heirs, lost):
    assert takeover.succession(ranks, present, copied) == (heirs, lost)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_copies_are_exact(dtype):
    sent, own = plan_states(1, dtype), plan_states(2, dtype)
    (found,) = takeover._deserialized(takeover._serialized(sent), own)
    for i, tensor in sent[0].tensors["residuals"].items():
        assert found.tensors["residuals"][i].dtype == dtype
        np.testing.assert_array_equal(found.tensors["residuals"][i], tensor)
    total = plan_state.merged([own[0], found])
    expected = own[0].tensors["residuals"][0].astype(np.float32) + sent[0].tensors["residuals"][0].astype(np.float32)
    np.testing.assert_array_equal(total.tensors["residuals"][0], expected.astype(dtype))


def test_copies_of_another_model_are_refused():
    with pytest.raises(RuntimeError, match="the rank before has other residuals: commit on all ranks"):
        takeover._deserialized(takeover._serialized(plan_states(1) + plan_states(2)), plan_states(1))


def test_a_rank_that_joins_owes_nothing():
    large = [Member("w", (1000, 1000), "dense")]
    state = PlanState(large, {"residuals": {0: np.ones([1000, 1000], np.float32)}}, {"residuals": []}, [], {})
    sent = pickle.dumps(takeover.outline([state]))
    assert len(sent) < 1000
    (outline,) = pickle.loads(sent)
    found = plan_state.zeroed(outline)
    np.testing.assert_array_equal(found.tensors["residuals"][0], np.zeros([1000, 1000], np.float32))
    assert found.members == large


@pytest.mark.parametrize(
    "message",
    ["{{node hvdc_0_SGD_0_0_bucket_0_int8}} Read error", "Horovod has been shut down.", "gloo: timeout"],
)
def test_errors_of_horovod(message):
    with pytest.raises(HorovodInternalError), horovod_errors():
        raise tf.errors.UnknownError(None, None, message)


@pytest.mark.parametrize(
    "error",
    [
        tf.errors.UnknownError(None, None, "KeyError: 'label' in py_function"),
        tf.errors.UnknownError(None, None, 'File "/home/me/horovod/data.py", line 1, in load: KeyError'),
        tf.errors.InvalidArgumentError(None, None, "Horovod: gradients are not finite"),
        ValueError("Horovod"),
    ],
)
def test_other_errors_stay_what_they_are(error):
    with pytest.raises(type(error)) as info, horovod_errors():
        raise error
    assert info.value is error


class Held:
    """Says which thread frees it."""

    def __init__(self, freed):
        self.freed, self.itself = freed, self  # only a garbage collection frees it

    def __del__(self):
        self.freed.append(threading.current_thread())


@pytest.mark.parametrize("cause", [tf.errors.UnknownError(None, None, "gloo: lost"), HostsUpdatedInterrupt(False)])
def test_what_a_failed_call_held_is_freed_in_another_thread(cause, monkeypatch):
    """Destroying a dataset's iterator may take a minute."""
    freed, caught = [], []

    def run_fn(function, reset):
        def wrapper(state):
            try:
                function(state)
            except (HorovodInternalError, HostsUpdatedInterrupt) as error:
                caught.append(type(error))

        return wrapper

    def training(state):
        held = Held(freed)
        if held is not state:
            raise cause

    monkeypatch.setattr(failures, "run_fn", run_fn)
    gc.disable()  # it would also free what another thread is about to free
    try:
        failures.run(training)(None)
        for thread in threading.enumerate():
            if thread.name == "hvd_compress release":
                thread.join(60)
    finally:
        gc.enable()
    assert caught == [HostsUpdatedInterrupt if isinstance(cause, HostsUpdatedInterrupt) else HorovodInternalError]
    assert [thread.name for thread in freed] == ["hvd_compress release"]


class State:
    def __init__(self, **values):
        self.__dict__.update(values)
        self.commits = []

    def commit(self):
        self.commits.append((self.epoch, self.batch))


@pytest.fixture(params=KERASES)
def package(request):
    return KERASES[request.param]


def make_model(package):
    model = package.Sequential([package.layers.Input([2]), package.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def test_callbacks_count_and_commit_over_resets(package):
    model = make_model(package)
    state = State(epoch=0, batch=0)
    callbacks = [
        hvdc.elastic.UpdateBatchStateCallback(state),
        hvdc.elastic.UpdateEpochStateCallback(state),
        hvdc.elastic.CommitStateCallback(state, batches_per_commit=3),
    ]

    class Stop(package.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if (state.epoch, state.batch) == (1, 2):
                raise KeyboardInterrupt

    def fit(epochs, extra=()):
        return model.fit(np.ones([10, 2]), np.ones([10, 1]), 2, epochs, verbose=0, callbacks=[*callbacks, *extra])

    with pytest.raises(KeyboardInterrupt):
        fit(3, [Stop()])
    assert state.commits == [(0, 3), (1, 0)]
    assert (state.epoch, state.batch) == (1, 2)
    # After a reset the rest of that epoch, 3 batches, and one more epoch.
    history = fit(3 - state.epoch)
    assert state.commits == [(0, 3), (1, 0), (1, 5), (2, 0), (2, 3), (3, 0)]
    assert len(history.history["loss"]) == 2
    assert int(model.optimizer.iterations) == 7 + 3 + 5


@pytest.mark.parametrize("first", [True, False])
def test_a_cut_epoch_does_not_hide_who_else_stops(package, first):
    class Stop(package.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = True

    model = make_model(package)
    callbacks = [Stop(), hvdc.elastic.UpdateBatchStateCallback(State(epoch=0, batch=3))]
    callbacks = callbacks if first else callbacks[::-1]
    history = model.fit(np.ones([10, 2]), np.ones([10, 1]), 2, 5, verbose=0, callbacks=callbacks)
    assert len(history.history["loss"]) == 1 and int(model.optimizer.iterations) == 2


@pytest.mark.parametrize("batches", [0, -1, 1.5, True])
def test_batches_per_commit(batches):
    with pytest.raises(ValueError, match="batches_per_commit must be a whole number from 1 on"):
        hvdc.elastic.CommitStateCallback(None, batches)


@pytest.mark.parametrize("elastic, batches", [("1", 0), ("0", 2)])
def test_checkpoints_are_counted_from_a_reset_on(elastic, batches, tmp_path, monkeypatch):
    # A rank that has joined has counted none. All ranks must save in the same step.
    monkeypatch.setenv("HOROVOD_ELASTIC", elastic)
    callback = hvdc.callbacks.ResidualCheckpoint(tmp_path, save_freq=5, resume=False)
    for batch in range(2):
        callback.on_train_batch_end(batch)
    callback.on_train_begin()
    assert callback._batches == batches


def test_what_a_state_needs():
    model = keras.Sequential([keras.layers.Dense(1)])
    with pytest.raises(ValueError, match="Model must be built first"):
        hvdc.elastic.KerasState(model)
    model.build([None, 2])
    with pytest.raises(ValueError, match="no optimizer: compile it, or pass the optimizer"):
        hvdc.elastic.KerasState(model)
