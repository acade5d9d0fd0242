"""What `auto` expects before its first step."""

from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

import hvd_compress as hvdc
from hvd_compress.auto import policy, start, trace_worth, usual_progress
from hvd_compress.auto.predictions import Predictions
from hvd_compress.auto.progress import ROWS, Row
from hvd_compress.auto.usual_progress import assumed, at_least, hoped, usual
from hvd_compress.cost import Calibration, Link


def test_a_first_choice_counts_with_the_usual_progress():
    assert assumed(0.3, "quantize") == usual(0.3, "quantize") == pytest.approx(0.7**0.36)
    assert assumed(0.75, "hybrid") == usual(0.75, "hybrid")
    # powersgd takes seconds to compile.
    assert at_least(0.97) < assumed(0.97, "powersgd") < usual(0.97, "powersgd")
    assert usual(0.21, "int2") == pytest.approx(0.97, abs=0.002)
    assert at_least(0.21, "int2") == pytest.approx(0.79**0.5)
    assert assumed(0.21, "int2", normalized=True) == usual(0.21, "int2")
    assert assumed(0.12, "hadamard", normalized=True) == pytest.approx(0.8 * usual(0.12, "hadamard"))


@pytest.mark.parametrize(
    "milliseconds, expected",
    [
        ([1068, 297, 166, 108, 67, 47, 31, 25, 19], "hybrid:ratio=0.05,bits=4"),  # dense layers, 3.4M parameters
        ([666, 191, 110, 73, 49, 37, 27, 22, 16], "int2"),  # an autoencoder, 2.2M
    ],
)
def test_the_first_choice_is_what_was_best(milliseconds, expected):
    """With the exchanges that were predicted at 100 Mbit/s, and what each candidate loses of white noise."""
    auto, lost = hvdc.Compression.auto(), [0.0, 0.0, 0.01, 0.21, 0.62, 0.75, 0.92, 0.97, 0.99]
    progress = [assumed(share, candidate.name) for share, candidate in zip(lost, auto.candidates)]
    value = policy.Value(np.array(progress, np.float32), np.array(lost, np.float32))
    seconds = np.array([milliseconds], np.float32) / 1000.0
    (first,) = start._first_choice(auto, start._rules(auto), [1e7], seconds, value)
    assert auto.candidates[first].spec == expected


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
    assert seconds == [0.0, 0.0, pytest.approx(3 * 0.9)]
    predictions = SimpleNamespace(compile_seconds=seconds, rows_at=3)
    costs = [trace_worth.cost(predictions, [0], more, 2.0) for more in ([], [1], [2], [1, 2])]
    np.testing.assert_allclose(costs, [3.0, 6.0, 8.7, 11.7])
    # The first trace has already compiled it.
    assert trace_worth.cost(predictions, [2], [1], 2.0) == 6.0


def test_candidates_of_one_name_fare_alike():
    usual_progress, names = [1.0, 0.96, 0.7, 0.6, 0.4, 0.5], ["none", "hadamard", "hybrid", "hybrid", "hybrid", ""]
    assert hoped(usual_progress, names, {}) == usual_progress
    # hybrid makes the square of its usual progress.
    found = hoped(usual_progress, names, {3: 0.36})
    np.testing.assert_allclose(found, [1.0, 0.96, 0.49, 0.36, 0.16, 0.5])
    # What usually loses little tells nothing of others. Neither does one without a name, or without any progress.
    assert hoped([0.99, 0.94], ["quantize", "quantize"], {0: 0.9}) == [0.99, 0.94]
    assert hoped([0.5, 0.4], ["", ""], {0: 0.1}) == [0.5, 0.4]
    assert hoped([0.0, 0.5], ["mine", "mine"], {0: 0.02}) == [0.0, 0.5]
    # The mean of two.
    np.testing.assert_allclose(hoped([0.7, 0.6, 0.4], ["hybrid"] * 3, {0: 0.49, 1: 0.6})[2], 0.4**1.5)


def initial(choice, candidates):
    """`policy.initial`, NumPy arrays."""
    return policy.State(*(np.asarray(part) for part in policy.initial(tf.constant(choice), candidates)))


def case(step_seconds, usual_progress, compile_seconds, progress_in_use):
    """What `trace_worth.additions` needs of candidates like `none`, `hadamard`, two of `hybrid`, and `powersgd`.

    The third one is in use, and was measured. Steps take 10 ms besides the exchange, and the first trace 0.8 s.
    """
    count = len(step_seconds)
    encode = np.array([step_seconds], np.float32) - 0.01
    zeros, measured = np.zeros_like(encode), np.zeros([ROWS, count], np.float32)
    measured[[Row.GAIN, Row.WAY], 2] = progress_in_use
    measured[[Row.WHOLE_GAIN, Row.WHOLE_WAY, Row.ENERGY], 2] = 1.0
    measured[Row.OWN_GAIN, 2] = 100.0
    state = initial([2], count)._replace(rest=np.float32(0.01), progress=measured)
    predictions = Predictions(
        rules=policy.Rules([True] + [False] * (count - 1), [False] * (count - 1) + [True], 0.0),
        nbytes=[1e6], costs=policy.Costs(encode, zeros, zeros, zeros), burst=0.0,
        prior=policy.Value(np.full(count, 0.02, np.float32), np.zeros(count, np.float32)),
        usual=np.array(usual_progress, np.float32),
        names=["none", "hadamard", "hybrid", "hybrid", "powersgd"], row_savings=None,
        compile_seconds=compile_seconds, others={},
    )  # fmt: skip
    return predictions, state


def worth(predictions, state, steps, **traced):
    """What is worth a trace after so many steps."""
    usual = {"candidates": [2], "compresses_rows": True, "measures_later": False, "seconds": 0.0, "first_trace": 0.81}
    return trace_worth.additions(predictions, state, trace_worth.Traced(**{**usual, **traced}, steps=steps), None)


@pytest.mark.parametrize(
    "progress_in_use, step, expected",
    [
        (0.6, 4096, {4}),  # 50 ms for the progress of an uncompressed step; powersgd needs 40
        (0.6, 256, set()),  # that saves 2.6 s, and its kernels take 4.8 s more
        (0.3, 64, set()),  # 100 ms; hadamard needs 75, but a trace takes 2.4 s
        (0.3, 128, {1}),  # it saves 3.2 s; hybrid at 10% is expected to make 0.43 where it usually makes 0.7
        (0.3, 512, {4}),
    ],
)
def test_what_is_traced_pays_for_its_trace(progress_in_use, step, expected):
    of_step = [0.680, 0.072, 0.030, 0.045, 0.024]
    predictions, state = case(of_step, [1.0, 0.96, 0.6, 0.7, 0.6], [0.0, 0.0, 0.0, 0.0, 4.8], progress_in_use)
    assert worth(predictions, state, step) == expected


@pytest.mark.parametrize(
    "saved_by_rows, step, expected",
    [
        (0.01, 128, {5}),  # 1.28 s, and a trace takes 1.2 s
        (0.01, 64, set()),
        (0.01, 8192, {4, 5}),  # powersgd saves 10 ms, its kernels take 4.8 s, and its own part of the trace 1.2 s
        (0.0, 512, set()),
    ],
)
def test_compressed_rows_may_share_a_trace(saved_by_rows, step, expected):
    of_step = [0.680, 0.072, 0.030, 0.045, 0.024]
    predictions, state = case(of_step, [1.0, 0.96, 0.6, 0.7, 0.6], [0.0, 0.0, 0.0, 0.0, 4.8], 0.6)
    predictions = predictions._replace(row_savings=SimpleNamespace(now=lambda counts, link: saved_by_rows))
    assert worth(predictions, state, step, compresses_rows=False) == expected


@pytest.mark.parametrize("step, expected", [(8, set()), (16, {1, 3})])
def test_two_candidates_for_different_buckets_share_a_trace(step, expected):
    """Each alone saves nothing. Together they save 0.286 s per step, and their trace takes 3.6 s."""
    predictions, state = case([0.0] * 5, [1.0, 0.96, 0.6, 0.6, 0.6], [0.0] * 5, 0.6)
    encode = np.array([[9.0, 0.02, 0.1, 0.2, 0.0], [9.0, 0.2, 0.1, 0.02, 9.0]], np.float32)
    costs = policy.Costs(encode, *[np.zeros_like(encode)] * 3)
    predictions = predictions._replace(costs=costs, nbytes=[1e6, 1e6])
    state = initial([2, 2], 5)._replace(rest=state.rest, progress=state.progress)
    assert worth(predictions, state, step) == expected


def test_what_was_measured_before_a_restart_counts():
    of_step = [0.680, 0.072, 0.030, 0.045, 0.024]
    predictions, state = case(of_step, [1.0, 0.96, 0.6, 0.7, 0.6], [0.0, 0.0, 0.0, 0.0, 4.8], 0.3)
    assert worth(predictions, state, 112) == {1}
    sums = state.progress.copy()
    sums[:, 1] = sums[:, 2]  # no more than what is in use
    assert worth(predictions, state._replace(progress=sums), 112) == set()


def test_what_saves_less_than_a_traced_candidate_is_not_traced():
    of_step = [0.680, 0.072, 0.030, 0.045, 0.024]
    predictions, state = case(of_step, [1.0, 0.96, 0.6, 0.7, 0.6], [0.0] * 5, 0.2)
    assert worth(predictions, state, 512) == {4}
    sums = state.progress.copy()
    sums[:, 4] = sums[:, 2]
    sums[[Row.GAIN, Row.WAY], 4] = 0.6
    assert worth(predictions, state._replace(progress=sums), 512, candidates=[2, 4]) == set()


@pytest.mark.parametrize(
    "minutes, step, expected",
    [
        (0.5, 64, set()),  # a trace takes 1.2 s, which are 3% of 40 s
        (1.0, 64, {6}),
        (1.0, 4096, {4}),  # both candidates are measured then
    ],
)
def test_a_measurement_takes_a_small_share_of_the_time(minutes, step, expected):
    predictions, state = case([0.680, 0.072, 0.030, 0.045, 0.024], [1.0, 0.96, 0.6, 0.7, 0.6], [0.0] * 4 + [4.8], 0.6)
    assert worth(predictions, state, step, measures_later=True, seconds=60.0 * minutes) == expected


def test_a_trace_is_not_free_where_the_rest_of_a_step_takes_longer():
    predictions, state = case([9.060, 9.055, 9.031, 9.045, 9.024], [1.0, 1.0, 1.0, 1.0, 1.0], [0.0] * 5, 1.0)
    state = state._replace(rest=np.float32(9.0))
    assert worth(predictions, state, 64) == set()  # powersgd saves 0.4 s
    assert worth(predictions, state, 512) == {4}


def test_which_compressors_are_hardly_in_doubt():
    sure = []
    for spec in (
        "quantize:bits=3",
        "int2",
        "hadamard",
        "quantize:bits=2",
        "topk:ratio=0.1",
        "powersgd:rank=8",
        "onebit",
    ):
        compressor = hvdc.Compression.parse(spec)
        lost = start._lost(compressor, [(1024, 64)])
        usually, in_any_case = (progress(lost, compressor.name) for progress in (usual, at_least))
        if usually >= usual_progress.SURE_USUALLY and in_any_case >= usual_progress.SURE_AT_LEAST:
            sure.append(spec)
    assert sure == ["quantize:bits=3", "int2"]


def test_noise_says_nothing_of_others():
    predictions, state = case([0.680, 0.072, 0.030, 0.045, 0.024], [1.0, 0.96, 0.6, 0.7, 0.6], [0.0] * 5, 0.36)
    sums = state.progress.copy()
    known = predictions.hoped(state, [2]).progress
    sums[Row.VARIANCE] = 1.0
    noisy = predictions.hoped(state._replace(progress=sums), [2]).progress
    np.testing.assert_allclose(known[2:4], [0.36, 0.49], rtol=1e-4)
    np.testing.assert_allclose(noisy[3], 0.7, rtol=1e-4)
    assert float(noisy[2]) < 0.36
