"""What `auto` expects before its first step."""

from types import SimpleNamespace

import numpy as np
import pytest

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
    traces = SimpleNamespace(_auto=SimpleNamespace(model_wide_candidates=[False, False, True]), candidates=[0])
    factors = [Traces._trace_factor(traces, more) for more in ([], [1], [2], [1, 2])]
    np.testing.assert_allclose(factors, [1.5, 3.0, 4.5, 6.0])
    traces.candidates = [2]  # the first trace has already compiled it
    assert Traces._trace_factor(traces, [1]) == 3.0
