"""What `auto` expects before its first step."""

from types import SimpleNamespace

import numpy as np
import pytest

import hvd_compress as hvdc
from hvd_compress.auto import start
from hvd_compress.auto.traces import Traces
from hvd_compress.auto.usual_progress import assumed, at_least, usual
from hvd_compress.cost import Calibration, Link


def test_a_first_choice_counts_with_the_usual_progress():
    assert assumed(0.75, "hybrid") == usual(0.75, "hybrid") == pytest.approx(0.25**0.36)
    # powersgd takes seconds to compile.
    assert at_least(0.97) < assumed(0.97, "powersgd") < usual(0.97, "powersgd")
    assert assumed(0.12, "hadamard", normalized=True) == pytest.approx(0.8 * usual(0.12, "hadamard"))


@pytest.mark.parametrize(
    ("rate", "burst", "seconds"),
    [
        (1e8, 250e3, 0.02),  # measured
        (1e9, 0.0, 0.0),  # a calibration would have seen it
        (1e7, 0.0, 8 * 2**20 / 1e7),  # too slow for a calibration to see it: up to 1 MB
    ],
)
def test_what_a_burst_may_hide(rate, burst, seconds):
    links = {"allreduce": Link(1e-4, 8 / rate, burst=burst), "alltoall": Link(1e-4, 4 / rate)}
    assert start._burst(Calibration(2, links, {})) == pytest.approx(seconds)


def test_a_new_model_wide_candidate_lengthens_a_trace():
    """By kernels for each shape of a matrix."""
    dense = [(784, 256), (256,), (256, 256), (256, 256), (3, 3, 8, 16)]
    power_sgd, flat = (hvdc.Compression.parse(spec) for spec in ("powersgd:rank=2", "int8"))
    seconds = [start._compile_seconds(candidate, dense) for candidate in (flat, flat, power_sgd)]
    assert seconds == [0.0, 0.0, pytest.approx(3 * 0.8)]
    traces = SimpleNamespace(_predictions=SimpleNamespace(compile_seconds=seconds), candidates=[0])
    costs = [Traces._trace_cost(traces, more, 2.0) for more in ([], [1], [2], [1, 2])]
    np.testing.assert_allclose(costs, [3.0, 6.0, 8.4, 11.4])
    traces.candidates = [2]  # the first trace has already compiled it
    assert Traces._trace_cost(traces, [1], 2.0) == 6.0
