"""From recorded rows to times, bytes and losses: by hand."""

import numpy as np
import pytest

from hvd_compress.engine.compression_report import AutoReport, StepForecast
from hvd_compress.monitor import summary
from hvd_compress.monitor.files import AUTO_COLUMNS, STEP_COLUMNS, auto_lines, bucket_lines, step_lines
from hvd_compress.monitor.recorder import COLUMNS, HEADER, WatchedBucket
from hvd_compress.monitor.steps import Reader
from hvd_compress.monitor.trials import trial_steps

BUCKETS = [
    WatchedBucket("0", 4000, 4000, ("none", "int8"), (4000, 1000)),
    WatchedBucket("dense-0", 100, 100, ("none",), (100,)),
]


def row(step, ready, first, second, total=0.0, count=0.0, committed=1.0):
    """`first`, `second`: the cells of two buckets."""
    assert len(first) == len(second) == len(COLUMNS) and len(HEADER) == 5
    return [step, committed, ready, total, count, *first, *second]


def cell(begun, sent, arrived, done, norms=(3.0, 5.0, 4.0, 4.0), choice=1, nbytes=(np.nan, np.nan)):
    return [begun, sent, arrived, done, *norms, choice, *nbytes]


DENSE = (np.nan, np.nan, 0.0, 0.0)


def steps_of(*rows, reader=None):
    return (reader or Reader(BUCKETS)).steps(np.array(rows, np.float64))


def test_times_bytes_and_errors():
    steps = steps_of(
        row(0, 10.5, cell(10.0, 11.0, 15.0, 16.0), cell(10.0, 10.0, 13.0, 13.0, DENSE, 0)),
        row(1, 21.0, cell(20.0, 21.0, 24.0, 26.0, choice=0), cell(22.0, 22.0, 23.0, 23.0, DENSE, 0)),
    )
    np.testing.assert_array_equal(steps.step, [1, 2])
    np.testing.assert_array_equal(steps.seconds, [np.nan, 10.0])
    np.testing.assert_array_equal(steps.exposed, [5.5, 5.0])
    np.testing.assert_array_equal(steps.exchange, [6.0, 6.0])
    # In the first step bucket 0 had to wait for the dense one until 13; in the second the dense one came later.
    np.testing.assert_array_equal(steps.buckets.wire, [[2.0, 3.0], [3.0, 0.0]])
    np.testing.assert_array_equal(steps.encode, [1.0, 1.0])
    np.testing.assert_array_equal(steps.decode, [1.0, 2.0])
    np.testing.assert_array_equal(steps.bytes, [1100, 4100])
    np.testing.assert_allclose(steps.ratio, [4100 / 1100, 1.0])
    np.testing.assert_allclose(steps.error, [0.8, 0.8])
    np.testing.assert_allclose(steps.residual_norm, [4.0, 4.0])


def test_losses_are_taken_out_of_the_running_mean():
    reader, idle = Reader(BUCKETS), (cell(0, 0, 0, 0), cell(0, 0, 0, 0, DENSE, 0))
    steps = steps_of(row(0, 0, *idle, 20.0, 10), row(1, 0, *idle, 60.0, 20), row(2, 0, *idle, 65.0, 25), reader=reader)
    np.testing.assert_allclose(steps.loss, [2.0, 4.0, 1.0])
    reader.new_epoch()
    np.testing.assert_allclose(steps_of(row(3, 0, *idle, 50.0, 25), reader=reader).loss, [2.0])
    # Keras begins anew by itself; and what is not a number is told apart from what is not known.
    np.testing.assert_allclose(steps_of(row(4, 0, *idle, 30.0, 10), reader=reader).loss, [3.0])
    found = steps_of(row(5, 0, *idle, np.nan, 20), row(6, 0, *idle, np.nan, np.nan), reader=reader).loss
    assert np.isinf(found[0]) and np.isnan(found[1])


def test_a_step_that_was_not_finite_has_no_error():
    steps = steps_of(row(0, 0, cell(0, 0, 0, 0), cell(0, 0, 0, 0, DENSE, 0), committed=0.0))
    assert not steps.finite[0] and np.isnan(steps.error[0]) and np.isnan(steps.buckets.residual_norm[0, 0])


def test_lines_and_means():
    steps = steps_of(row(0, 10.5, cell(10.0, 11.0, 15.0, 16.0), cell(10.0, 10.0, 13.0, 13.0, DENSE, 0)))
    cells = dict(zip(STEP_COLUMNS, step_lines(steps, 3, 70.5).strip().split(",")))
    assert cells["epoch"] == "3" and cells["step_ms"] == "" and cells["encode_ms"] == "1000"
    assert cells["memory_mb"] == "70.5" and cells["relative_error"] == "0.8"
    first, second = bucket_lines(steps, BUCKETS).splitlines()
    assert first == "1,0,int8,1000,4,1000,2000,1000,0.8,3,4"
    assert second == "1,dense-0,none,100,1,0,3000,0,0,,0"
    assert summary.means([steps])["wire_ms"] == 5000.0
    assert summary.bucket_means([steps])[0]["ratio"] == 4.0
    assert summary.stats([steps, steps])["bytes"]["p99"] == 1100.0


def test_means_are_over_what_is_known():
    reader = Reader(BUCKETS)
    known, unknown = (3.0, 5.0, 4.0, 4.0), (np.nan,) * 4
    cells = [cell(10.0, 11.0, 15.0, 16.0, norms) for norms in (known, unknown, (9.0, 8.0, 2.0, 6.0))]
    dense = cell(10.0, 10.0, 13.0, 13.0, DENSE, 0)
    losses = [(20.0, 10), (np.inf, 20), (np.inf, 30)]
    some = [
        steps_of(*(row(t, 10.5, c, dense, *loss) for t, c, loss in rows), reader=reader)
        for rows in ([(0, cells[0], losses[0])], [(1, cells[1], losses[1]), (2, cells[2], losses[2])])
    ]
    found = summary.means(some)
    assert found["gradient_norm"] == 6.0 and found["residual_norm"] == 5.0
    assert found["relative_error"] == (0.8 + 0.25) / 2
    assert found["loss"] == np.inf and found["step_ms"] == 0.0  # since the step before, of which the first has none
    first, second = summary.bucket_means(some)
    assert first["gradient_norm"] == 6.0 and first["relative_error"] == (0.8 + 0.25) / 2
    assert np.isnan(second["gradient_norm"]) and second["wire_ms"] == 3000.0 and second["ratio"] == 1.0


def test_cells_of_what_is_not_known_are_empty_and_names_stay():
    bucket = WatchedBucket("0", 4000, 4000, ("none", "mine:nan=1,ratio=0.5"), (4000, 12_345_678))
    cells = cell(10.0, 11.0, 15.0, 16.0, (np.nan,) * 4)
    steps = steps_of([0, 1.0, 10.5, np.nan, np.nan, *cells], reader=Reader([bucket]))
    (line,) = bucket_lines(steps, [bucket]).splitlines()
    assert line == '1,0,"mine:nan=1,ratio=0.5",12345678,0.000324,1000,4000,1000,,,'
    cells = dict(zip(STEP_COLUMNS, step_lines(steps, None, np.nan).rstrip("\n").split(",")))
    empty = {name for name, text in cells.items() if not text}
    assert empty == {
        "epoch",
        "loss",
        "step_ms",
        "relative_error",
        "gradient_norm",
        "residual_norm",
        "memory_mb",
    }
    assert cells["step"] == "1" and cells["time"] == "16.000000" and cells["finite"] == "1"


def test_bytes_of_rows_are_those_that_were_measured():
    buckets = [*BUCKETS[:1], WatchedBucket("sparse-0", 0, 0, ("int8",), (0,))]
    rows = cell(10.0, 10.0, 13.0, 13.0, DENSE, 0, (70.0, 300.0))
    steps = steps_of(row(0, 10.5, cell(10.0, 11.0, 15.0, 16.0), rows), reader=Reader(buckets))
    np.testing.assert_array_equal(steps.buckets.bytes, [[1000, 70]])
    np.testing.assert_array_equal(steps.bytes, [1070])
    np.testing.assert_allclose(steps.ratio, [4300 / 1070])


def trials_of(text, before):
    choices = np.array([[ord(c), ord(c)] for c in text])
    marks = trial_steps(choices, np.array([ord(before)] * 2))
    return "".join("x" if mark else "." for mark in marks)


def test_trials_are_found():
    assert trials_of("aaabbaaaabaaaa", "a") == "...xx....x...."
    assert trials_of("aaabbbbbccbbb", "a") == "........xx..."  # a switch, then a trial
    assert trials_of("bbbbb", "a") == "....." and trials_of("ba", "a") == "x." and trials_of("aab", "a") == "..x"
    assert trials_of("", "a") == ""


def test_trials_are_marked_and_left_out_of_means():
    dense = cell(0, 0, 0, 0, DENSE, 0)
    rows = [row(i, 0, cell(0, 0, 0, 0, choice=choice), dense) for i, choice in enumerate([1, 1, 1, 0, 0, 1, 1, 1, 0])]
    for cut in range(1, len(rows)):  # the steps may be read in two parts
        reader = Reader(BUCKETS, [0])
        parts = [steps_of(*rows[:cut], reader=reader), steps_of(*rows[cut:], reader=reader)]
        np.testing.assert_array_equal(np.concatenate([part.trial for part in parts]), np.isin(range(9), [3, 4, 8]))
        assert summary.means(parts)["ratio"] == 4100 / 1100
        assert summary.bucket_means(parts)[0]["ratio"] == 4.0
    assert [line.rsplit(",", 1)[1] for line in step_lines(parts[1], None, 0.0).split()] == ["1"]
    assert not steps_of(*rows).trial.any()  # not of auto
    assert summary.means([parts[1]])["ratio"] == 1.0  # nothing but a trial


@pytest.mark.parametrize("at_a_time", [1, 2, 3])
def test_a_lasting_switch_is_no_trial_however_few_steps_are_read(at_a_time):
    dense, choices = cell(0, 0, 0, 0, DENSE, 0), [1] * 4 + [0] * 20 + [1] * 2 + [0] * 4
    rows = [row(i, 0, cell(0, 0, 0, 0, choice=choice), dense) for i, choice in enumerate(choices)]
    reader = Reader(BUCKETS, [0])
    parts = [steps_of(*rows[i : i + at_a_time], reader=reader) for i in range(0, len(rows), at_a_time)]
    trial = np.concatenate([part.trial for part in parts])
    assert trial[24:26].all() and not trial[26:].any()
    assert not trial[:4].any() and not trial[6:24].any()  # the first two of a switch may look like a trial


def test_trials_are_left_out_of_stats():
    dense, choices = cell(0, 0, 0, 0, DENSE, 0), [1, 1, 1, 0, 0, 1, 1, 1]
    rows = [row(i, 0, cell(0, 0, 0, 0, choice=choice), dense) for i, choice in enumerate(choices)]
    stats = summary.stats([steps_of(*rows, reader=Reader(BUCKETS, [0]))])
    assert stats["ratio"]["max"] == 4100 / 1100 and stats["ratio"]["std"] < 1e-9


def test_lines_about_auto():
    choice, none = StepForecast("auto", 0.1, 0.8, 0.125), StepForecast("hybrid:ratio=0.1,bits=4", 0.5, 1.0, 0.5)
    first, second = auto_lines(AutoReport(7, choice, (none,))).splitlines()
    assert (first, second) == ("7,auto,100,0.8,125", '7,"hybrid:ratio=0.1,bits=4",500,1,500')
    assert len(AUTO_COLUMNS) == 5
