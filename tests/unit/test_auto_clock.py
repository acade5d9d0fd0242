"""Time stamps inside a graph: in their order where one waits for the other, and not otherwise."""

import time

import pytest
import tensorflow as tf

from hvd_compress.engine import clock


def slow(x):
    """Takes a while."""
    for _ in range(60):
        x = tf.linalg.matmul(x, x) * 1e-3
    return x


@pytest.mark.parametrize("how", ["inline", "function", "compiled"])
def test_a_stamp_waits_for_its_tensors(how):
    made = slow if how == "inline" else tf.function(slow, jit_compile=how == "compiled")

    @tf.function
    def run(x):
        def branch():
            z = made(y)
            return clock.stamp([z, x]), z

        begun = clock.stamp([x])
        y = made(x)
        # What a stamp waits for is used, too: else it would not be computed.
        later, z = tf.switch_case(tf.cast(y[0, 0], tf.int32) * 0, [branch] * 2)
        return begun, clock.stamp([y]), later, tf.reduce_sum(z)

    x = tf.ones([400, 400])
    run(x)
    shares = []
    for _ in range(10):
        before = time.time()
        begun, done, later, _ = map(float, run(x))
        after = time.time()
        assert before <= begun and done < later <= after
        shares.append(min(done - begun, later - done) / (after - before))
        if shares[-1] > 0.1:
            break
    # Each of the two does the same work, and nearly all of the time goes into it, unless others have the processor.
    assert max(shares) > 0.1, shares


@pytest.mark.parametrize("branches", [False, True])
def test_stamps_do_not_wait_for_each_other(branches):
    """As those of buckets, which cross at once."""

    @tf.function
    def run(x):
        if branches:
            return [tf.switch_case(tf.size(x), [lambda: clock.stamp([x])] * 2) for _ in range(2)]
        return [clock.stamp([x]) for _ in range(2)]

    graph = run.get_concrete_function(tf.TensorSpec([3])).graph
    calls = [op for op in graph.get_operations() if op.type in ("PartitionedCall", "StatelessCase", "Case")]
    assert len(calls) == 2
    waited_for = {op.type for call in calls for op in call.control_inputs}
    assert waited_for == (set() if branches else {"Identity"})  # of the tensors


def test_a_stamp_is_not_taken_before_another():
    @tf.function
    def run(x):
        y = slow(x)
        first = clock.stamp([y])
        return first, clock.stamp([x], first), tf.reduce_sum(y)

    run(tf.ones([400, 400]))
    first, second, _ = map(float, run(tf.ones([400, 400])))
    assert first <= second


def test_stacked():
    stamps = [clock.Timestamps(*(tf.constant(t, tf.float64) for t in times)) for times in [(1, 2, 3, 4), (5, 6, 7, 8)]]
    stacked = clock.stacked(stamps)
    assert stacked.dtype == tf.float64
    assert stacked.numpy().tolist() == [[1, 5], [2, 6], [3, 7], [4, 8]]
