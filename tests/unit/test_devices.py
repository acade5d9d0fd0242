"""GPUs compute after a call has returned: whoever takes times waits for them. No test needs one: it is pretended."""

import numpy as np
import pytest
import tensorflow as tf

import hvd_compress as hvdc
from hvd_compress.common import devices
from hvd_compress.compressors.resolve import resolve
from hvd_compress.cost import calibrate, defaults, measure_kernels
from hvd_compress.engine.settings import Settings
from hvd_compress.tools import timed_exchange, timing


@pytest.fixture
def waits(monkeypatch):
    """One entry for each time that the GPU is waited for."""
    times = []
    monkeypatch.setattr(devices, "has_gpu", lambda: True)
    monkeypatch.setattr(tf.test.experimental, "sync_devices", lambda: times.append(1))
    return times


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: [])


def test_without_a_gpu_nothing_waits(no_gpu, monkeypatch):
    monkeypatch.setattr(tf.test.experimental, "sync_devices", lambda: pytest.fail("waited"))
    assert not devices.has_gpu()
    devices.wait()


def test_kernels(waits):
    calls = []
    measure_kernels._time_of(lambda: calls.append(len(waits)))
    # Nothing waits between calls.
    assert calls == [wait for wait in range(1 + measure_kernels._REPEATS) for _ in range(measure_kernels._CALLS_OF_GPU)]
    assert len(waits) == 1 + measure_kernels._REPEATS


def test_default_costs(no_gpu, monkeypatch):
    assert measure_kernels.default_costs() is defaults.CPU
    monkeypatch.setattr(devices, "has_gpu", lambda: True)
    assert measure_kernels.default_costs() is defaults.GPU
    assert defaults.GPU.kernels.keys() == defaults.CPU.kernels.keys()


def test_costs_of_chunks_on_a_gpu(no_gpu, monkeypatch):
    """They take the same time whatever their size; on a core, the time grows with the bytes."""
    compressor, sizes = resolve("int4"), (2**16, 2**23)
    on_core = [calibrate._default_cost(compressor, elements, 2, speed=1.0) for elements in sizes]
    assert on_core[0] == on_core[1]
    monkeypatch.setattr(devices, "has_gpu", lambda: True)
    small, large = (calibrate._default_cost(compressor, elements, 2, speed=1.0) for elements in sizes)
    assert large == defaults.GPU.kernels["int4"]
    assert small.call == large.call
    assert small.encode * sizes[0] == pytest.approx(large.encode * sizes[1])
    assert small.decode * sizes[0] == pytest.approx(large.decode * sizes[1])
    per_tensor = resolve("powersgd:rank=2")
    assert calibrate._default_cost(per_tensor, 2**16, 2, speed=1.0) == defaults.GPU.kernels["powersgd"]


@pytest.mark.parametrize(
    ("has_gpu", "device_dense", "on_gpu"), [(True, "", True), (True, "/cpu:0", False), (False, "", False)]
)
def test_where_gradients_are_compressed(has_gpu, device_dense, on_gpu, monkeypatch):
    monkeypatch.setattr(devices, "has_gpu", lambda: has_gpu)
    assert Settings(resolve("int8"), device_dense=device_dense).on_gpu == on_gpu


def test_what_bench_times(waits):
    calls = []
    run = timed_exchange.and_wait(lambda: calls.append(len(waits)))
    timing.interleave({"a": run, "b": run}, rounds=2)
    assert calls == [0, 1, 2, 3]
    assert len(waits) == 4


def test_compare(waits, monkeypatch):
    monkeypatch.setenv("HVD_COMPRESS_KERNELS", "xla")
    gradients = [np.random.default_rng(0).normal(size=[64, 64]).astype(np.float32)]
    hvdc.compare(gradients, ["int8"])
    assert waits
