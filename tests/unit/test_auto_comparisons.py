"""When does `auto` compare candidates that are not in the graph?"""

from types import SimpleNamespace

import numpy as np
import pytest

from hvd_compress.auto.comparisons import Comparisons
from hvd_compress.auto.traces import Traces


def due_steps(comparisons, spans, saving=1.0):
    return [step for step, span in enumerate(spans) if comparisons.add(np.array([step], np.float32), span, saving)]


def test_candidates_are_compared_in_the_eighth_step_and_after_four_times_as_many():
    assert due_steps(Comparisons(), [0.01] * 600) == [8, 32, 128, 512]


def test_a_slower_link_is_a_reason_to_compare_earlier():
    assert due_steps(Comparisons(), [0.01] * 40 + [0.1] * 20) == [8, 32, 42, 45, 51]


def test_the_link_may_get_slower_when_candidates_are_compared_anyway():
    assert due_steps(Comparisons(), [0.01] * 32 + [0.1] * 20) == [8, 32, 34, 37, 43]


def test_two_slow_steps_are_none():
    assert due_steps(Comparisons(), [0.01] * 40 + [5.0, 5.0] + [0.01] * 20) == [8, 32]


def test_steps_without_times_are_no_slow_ones():
    assert due_steps(Comparisons(), [0.0] * 20 + [0.1] * 10) == [8]


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
    assert due_steps(Comparisons(), [0.01] * 600, saving=0.01) == [128, 512]
    assert due_steps(Comparisons(), [0.01] * 40 + [0.1] * 20, saving=0.0) == []


@pytest.mark.parametrize("slower", [1.0, 100.0])
def test_what_others_might_save(slower):
    """None is compared with what is best already; on a link that has become slower, others save most of the time."""
    traces = SimpleNamespace(
        compresses_rows=True, _hoped=np.array([1.0, 1.0, 0.5]), _slowdown=[1.0, 1.0, 1.0],
        _coding=np.array([0.0, 0.01, 0.012]), _transfer=np.array([0.1, 0.0125, 0.001]), _is_simulated=lambda c: False,
    )  # fmt: skip
    rest, spans = 0.02, traces._coding + slower * traces._transfer
    costs = (rest + spans) / traces._hoped
    for now in range(3):
        saved = Traces._most_saved(traces, now, rest, spans[now], None)
        assert saved == pytest.approx(2.0 * (costs[now] - costs.min()))
    assert costs.argmin() == (1 if slower == 1.0 else 2)
