"""Gradients into buckets and back."""

import math

from hypothesis import given
from hypothesis import strategies as st

from hvd_compress.engine import grouping as buckets

SHAPES = [(10, 10), (5,), (20, 10), (), (3, 3, 2, 2), (300, 2)]  # 400, 20, 800, 4, 144 and 2400 bytes


def members(*args, **kwargs):
    return [bucket.members for bucket in buckets.assign(*args, **kwargs)]


def test_the_last_layers_come_first():
    assert members(SHAPES, range(6), 10**6) == [(5, 4, 3, 2, 1, 0)]
    assert members(SHAPES, [4, 0, 2], 10**6) == [(4, 2, 0)]


def test_a_bucket_is_closed_before_it_exceeds_the_limit():
    assert members(SHAPES, range(6), 1000) == [(5,), (4, 3, 2, 1), (0,)]
    assert members(SHAPES, range(6), 948) == [(5,), (4, 3, 2), (1, 0)]  # 144 + 4 + 800 is just 948
    assert members(SHAPES, range(6), 947) == [(5,), (4, 3), (2, 1), (0,)]
    assert members(SHAPES, range(6), 1) == [(5,), (4,), (3,), (2,), (1,), (0,)]


def test_no_gradients_make_no_buckets():
    for groups in (None, 3, [[0]]):
        assert buckets.assign(SHAPES, [], 1000, groups) == []


def test_groups_as_a_number_are_runs_of_almost_equal_length():
    assert members(SHAPES, range(6), 1, 2) == [(5, 4, 3), (2, 1, 0)]
    assert members(SHAPES, range(6), 1, 1) == [(5, 4, 3, 2, 1, 0)]
    assert members(SHAPES, range(6), 1, 9) == [(5,), (4,), (3,), (2,), (1,), (0,)]


def test_groups_as_lists_are_buckets_and_the_rest_go_alone():
    assert members(SHAPES, range(6), 1, [[1, 4], [0, 2]]) == [(1, 4), (0, 2), (5,), (3,)]
    assert members(SHAPES, [1, 2, 5], 1, [[1, 4], [0], [2]]) == [
        (1,),
        (2,),
        (5,),
    ]  # 4 and 0 are not compressed


@given(
    shapes=st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), min_size=1, max_size=20),
    limit=st.integers(1, 20000),
    groups=st.none() | st.integers(1, 25),
    data=st.data(),
)
def test_every_gradient_is_in_exactly_one_bucket(shapes, limit, groups, data):
    chosen = data.draw(st.sets(st.integers(0, len(shapes) - 1)))
    assigned = buckets.assign(shapes, sorted(chosen), limit, groups)
    flat = [i for bucket in assigned for i in bucket.members]
    assert flat == sorted(chosen, reverse=True)
    for bucket in assigned:
        assert bucket.members
        assert bucket.shapes == tuple(shapes[i] for i in bucket.members)
        assert bucket.sizes == [math.prod(shape) for shape in bucket.shapes]
        assert bucket.numel == sum(bucket.sizes)
        if groups is None:
            assert 4 * bucket.numel <= limit or len([s for s in bucket.sizes if s]) == 1
    if groups is not None:
        lengths = [len(bucket.members) for bucket in assigned]
        assert len(lengths) == min(groups, len(chosen))
        assert not lengths or max(lengths) - min(lengths) <= 1
