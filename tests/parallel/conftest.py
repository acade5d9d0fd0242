"""Every rank runs the same pytest: `horovodrun -np 2 python -m pytest tests/parallel`."""

import json
import os
import tempfile

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import horovod.tensorflow as hvd
import introspect
import numpy as np
import pytest
import tensorflow as tf

tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(2)
gpus = tf.config.list_physical_devices("GPU")
for gpu in gpus:  # the ranks share them
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.experimental.enable_tensor_float_32_execution(False)
    # On a GPU, Keras 3 would compile steps with XLA, where Horovod's collectives do not exist.
    tf.keras.Model._resolve_auto_jit_compile = lambda self: False


def pytest_configure(config):
    if config.option.basetemp is None:  # the ranks of one machine would clean up each other's
        config.option.basetemp = tempfile.mkdtemp(prefix="hvd_compress_")
    size = int(os.environ.get("HOROVOD_SIZE", "1"))
    sets = [hvd.ProcessSet(range(0, size, 2)), hvd.ProcessSet(range(1, size, 2))] if size > 1 else None
    # Of four ranks: the workers of two hosts, of which the even and the odd ranks are those of one place.
    hosts = [hvd.ProcessSet([0, 1]), hvd.ProcessSet([2, 3])] if size == 4 else []
    hvd.init(process_sets=sets and sets + hosts)
    config.hvdc_process_sets, config.hvdc_hosts = sets, hosts


@pytest.hookimpl(tryfirst=True)  # before those with the marker are left out
def pytest_collection_modifyitems(items):
    """Keras 2 beside Keras 3 is slow: TensorFlow 2.15, which has Keras 2 only, runs the same tests."""
    for item in items:
        if "tf_keras" in item.name:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def rank():
    return hvd.rank()


@pytest.fixture(scope="session")
def size():
    return hvd.size()


@pytest.fixture(scope="session")
def process_sets(request):
    """The sets of even and of odd ranks."""
    return request.config.hvdc_process_sets


@pytest.fixture
def two_hosts(request, monkeypatch):
    """As if `hvdc.init()` had found two hosts of two workers; needs four ranks."""
    (local,) = [each for each in request.config.hvdc_hosts if each.included()]
    (across,) = [each for each in request.config.hvdc_process_sets if each.included()]
    return introspect.set_hosts(monkeypatch, local, across)


@pytest.fixture(scope="session")
def costs_file(size, tmp_path_factory):
    """A calibration of all ranks, at 1 Gbit/s: `auto` has none to make, and what it begins with is always the same."""
    link = {"alpha": 1e-4, "beta": 8e-9, "gamma": 0.0, "burst": 0.0}
    kernel = {"call": 1e-5, "encode": 1e-9, "decode": 1e-10, "decode_rank": 1e-10}
    names = ["fp16", "bf16", "quantize", "int2", "hadamard", "onebit", "topk", "block_topk", "hybrid", "powersgd"]
    calibration = {
        "format": "hvd_compress calibration 1",
        "ranks": size,
        "links": dict.fromkeys(["allreduce", "allgather", "alltoall"], link),
        "kernels": {"none": dict.fromkeys(kernel, 0.0), **dict.fromkeys(names, kernel)},
    }
    if size == 4:
        inside, across = (dict.fromkeys([name, "allgather"], link) for name in ("reduce_scatter", "alltoall"))
        calibration["levels"] = {"hosts": 2, "workers": 2, "inside": inside, "across": across}
    path = tmp_path_factory.mktemp("calibration") / "costs.json"
    path.write_text(json.dumps(calibration))
    return path


@pytest.fixture
def fixed_costs(costs_file, monkeypatch):
    """`auto` takes `costs_file`."""
    monkeypatch.setenv("HVD_COMPRESS_CALIBRATION", str(costs_file))


@pytest.fixture
def xla_kernels(monkeypatch):
    """The kernels of hosts with a GPU."""
    monkeypatch.setenv("HVD_COMPRESS_KERNELS", "xla")


@pytest.fixture(scope="session", autouse=True)
def all_candidates():
    """Steps of `auto` are traced with all candidates from the beginning, unless a test says otherwise."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        introspect.trace_all_candidates(monkeypatch, True)
        yield


@pytest.fixture
def gather():
    """Collects a NumPy array of every rank: [ranks, ...]."""

    def all_ranks(array):
        return hvd.allgather(tf.constant(np.asarray(array)[None])).numpy()

    return all_ranks


@pytest.fixture(autouse=True)
def same_test_on_all_ranks(request):
    """A rank that runs ahead, or another test, is found here rather than as a hang later."""
    yield
    names = hvd.allgather_object(request.node.nodeid)
    assert len(set(names)) == 1, f"ranks run different tests: {names}"
