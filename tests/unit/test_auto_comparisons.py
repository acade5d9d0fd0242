"""When does `auto` compare candidates that are not in the graph?"""

import numpy as np

from hvd_compress.auto.comparisons import Comparisons


def due_steps(comparisons, spans):
    return [step for step, span in enumerate(spans) if comparisons.add(np.array([step], np.float32), span)]


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
    assert due_steps(comparisons, [0.5] * 4) == [2]


def test_the_newest_numbers_are_kept_until_they_are_taken():
    comparisons = Comparisons()
    for step in range(20):
        comparisons.add(np.array([step], np.float32), 0.01)
    assert [int(numbers[0]) for numbers in comparisons.seen()] == list(range(12, 20))
    assert [int(numbers[0]) for numbers in comparisons.take()] == list(range(12, 20))
    assert comparisons.take() == []
