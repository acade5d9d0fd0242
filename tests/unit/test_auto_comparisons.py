"""When does `auto` compare candidates that are not in the graph?"""

from types import SimpleNamespace

import numpy as np
import pytest

from hvd_compress.auto.comparisons import Comparisons
from hvd_compress.auto.progress import ROWS, Row
from hvd_compress.auto.traces import Traces


def due_steps(comparisons, spans, saving=1.0):
    return [step for step, span in enumerate(spans) if comparisons.add(np.array([step], np.float32), span, saving)]


def test_candidates_are_compared_in_the_eighth_step_and_after_twice_as_many():
    assert due_steps(Comparisons(), [0.01] * 600) == [8, 16, 32, 64, 128, 256, 512]


def test_a_slower_link_is_a_reason_to_compare_earlier():
    assert due_steps(Comparisons(), [0.01] * 40 + [0.1] * 20) == [8, 16, 32, 42, 45, 51]


def test_the_link_may_get_slower_when_candidates_are_compared_anyway():
    assert due_steps(Comparisons(), [0.01] * 32 + [0.1] * 20) == [8, 16, 32, 34, 37, 43]


def test_two_slow_steps_are_none():
    assert due_steps(Comparisons(), [0.01] * 40 + [5.0, 5.0] + [0.01] * 20) == [8, 16, 32]


def test_steps_without_times_are_no_slow_ones():
    assert due_steps(Comparisons(), [0.0] * 20 + [0.1] * 10) == [8, 16]


def test_after_a_new_trace_other_times_are_usual():
    comparisons = Comparisons()
    assert due_steps(comparisons, [0.01] * 20) == [8, 16]
    comparisons.restart()
    assert due_steps(comparisons, [0.1] * 10) == []
    assert comparisons.slowdown(0.3) == pytest.approx(3.0)
    assert due_steps(comparisons, [0.5] * 4) == [2]


def test_the_newest_numbers_are_kept_until_they_are_taken():
    comparisons = Comparisons()
    for step in range(20):
        comparisons.add(np.array([step], np.float32), 0.01, 1.0)
    assert [int(numbers[0]) for numbers in comparisons.seen()] == list(range(12, 20))
    assert [int(numbers[0]) for numbers in comparisons.take()] == list(range(12, 20))
    assert comparisons.take() == []


def test_a_slower_link_counts_with_what_may_be_saved_now():
    # Before, each step could save 1 ms, and now 90.
    comparisons, spans = Comparisons(), [0.01] * 40 + [0.1] * 20
    due = [s for s, span in enumerate(spans) if comparisons.add(np.zeros(1, np.float32), span, span - 0.009)]
    assert due == [42, 45, 51]
    assert comparisons.slowdown(0.02) == 2.0 and Comparisons().slowdown(0.02) == 1.0


def test_no_comparison_before_a_trace_could_pay():
    # A trace takes a second or more: 100 steps have to go by if each might save 10 ms.
    assert due_steps(Comparisons(), [0.01] * 600, saving=0.01) == [128, 256, 512]
    assert due_steps(Comparisons(), [0.01] * 40 + [0.1] * 20, saving=0.0) == []


def traces(simulated=None):
    """Of candidates like `none`, `int4` and `powersgd`, as far as `_might_save` needs it."""
    return SimpleNamespace(
        compresses_rows=True, _time_per_byte=1.0, _hoped=np.array([1.0, 1.0, 0.8]), _slowdown=[1.0, 1.0, 1.0],
        _coding=np.array([0.0, 0.01, 0.01]), _transfer=np.array([0.1, 0.016, 0.002]),
        _is_simulated=lambda candidate: simulated is not None, _least_progress=np.array([1.0, 0.98, 0.03]),
        _simulated=simulated,
    )  # fmt: skip


def test_nothing_is_to_be_saved_beside_what_is_best():
    assert Traces._might_save(traces(), 1, rest=0.1, span=0.026, counts=None) == pytest.approx(0.0, abs=1e-9)


def test_what_is_saved_on_a_link_that_became_slower():
    """100 times: `none` takes 10 s, and powersgd 0.21 s of which 0.8 of the progress is made."""
    saved = Traces._might_save(traces(), 0, rest=0.1, span=10.0, counts=None)
    assert saved == pytest.approx(2.0 * (10.1 - 0.31 / 0.8), rel=0.01)


def test_what_is_saved_where_a_backward_pass_takes_most_of_the_exchange():
    """A candidate waits 0.1 s for all gradients, and makes half of the progress: int4 takes 0.226 s and not 0.43."""
    simulated = np.ones([ROWS, 3])
    simulated[[Row.GAIN, Row.WAY]], simulated[Row.VARIANCE] = [1.0, 1.0, 0.5], 0.0
    saved = Traces._might_save(traces(simulated), 2, rest=0.1, span=0.112, counts=None)
    assert saved >= 0.212 / 0.5 - 0.226
