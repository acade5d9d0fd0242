"""GPUs compute after a call has returned: whoever takes times waits for them. There is no GPU here: it is pretended."""

import numpy as np
import pytest
import tensorflow as tf

import hvd_compress as hvdc
from hvd_compress.common import devices
from hvd_compress.cost import defaults, measure_kernels
from hvd_compress.tools import timed_exchange, timing


@pytest.fixture
def waits(monkeypatch):
    """One entry for each time that the GPU is waited for."""
    times = []
    monkeypatch.setattr(devices, "has_gpu", lambda: True)
    monkeypatch.setattr(tf.test.experimental, "sync_devices", lambda: times.append(1))
    return times


def test_without_a_gpu_nothing_waits(monkeypatch):
    monkeypatch.setattr(tf.test.experimental, "sync_devices", lambda: pytest.fail("waited"))
    assert not devices.has_gpu()
    devices.wait()


def test_kernels(waits):
    calls = []
    measure_kernels._time_of(lambda: calls.append(len(waits)))
    # Nothing waits between calls.
    assert calls == [wait for wait in range(1 + measure_kernels._REPEATS) for _ in range(measure_kernels._CALLS_OF_GPU)]
    assert len(waits) == 1 + measure_kernels._REPEATS


def test_default_costs(monkeypatch):
    assert measure_kernels.default_costs() is defaults.CPU
    monkeypatch.setattr(devices, "has_gpu", lambda: True)
    assert measure_kernels.default_costs() is defaults.GPU
    assert defaults.GPU.kernels.keys() == defaults.CPU.kernels.keys()


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
