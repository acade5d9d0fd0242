"""The one line that says in what ranks differ."""

import pytest
import tensorflow as tf

from hvd_compress.engine import agreement


def test_agreeing_ranks_have_no_difference():
    assert agreement.difference([{"a": "1"}] * 3, [0, 1, 2]) is None


@pytest.mark.parametrize(
    ("values", "who"),
    [
        ("xy", "rank 0 has x, rank 1 has y"),
        ("xyyy", "rank 0 has x, ranks 1-3 have y"),
        ("xyxyy", "ranks 0, 2 have x, ranks 1, 3-4 have y"),
        ("xyz", "rank 0 has x, rank 1 has y, rank 2 has z"),
    ],
)
def test_who_has_what(values, who):
    facts = [{"same": "1", "a": value, "later": value} for value in values]
    expected = f"ranks disagree on a: {who}; start all ranks with the same code and environment"
    assert agreement.difference(facts, range(len(values))) == expected


def test_what_a_rank_does_not_know_differs():
    """Another version may compare other things."""
    facts = [{"a": "1"}, {"a": "1", "new": "2"}]
    assert "disagree on new: rank 4 has nothing, rank 6 has 2" in agreement.difference(facts, [4, 6])


def test_packed_facts_of_different_lengths_come_back():
    facts = [{"a": "\u00e9" * i, "b": str(i)} for i in range(5)]
    joined = tf.concat([agreement._packed(each) for each in facts], 0)
    assert agreement._unpacked(joined.numpy().tobytes()) == facts
