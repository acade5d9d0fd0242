"""The order in which a single thread computes gradients."""

import numpy as np
import pytest
import tensorflow as tf

from hvd_compress.common import devices
from hvd_compress.engine import gradient_order

OF_INPUT = gradient_order._OF_INPUT


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setattr(devices, "inter_op_threads", lambda: 1)
    monkeypatch.setattr(devices, "has_gpu", lambda: False)


def dense(x, weights):
    for w in weights:
        x = tf.nn.relu(tf.matmul(x, w))
    return tf.reduce_sum(x * x)


def convolutions(x, weights):
    x = tf.reshape(x, [2, 4, 4, 1])
    for w in weights:
        x = tf.nn.relu(tf.nn.conv2d(x, tf.reshape(w, [16, 16, 1, 1]), 1, "SAME"))
    return tf.reduce_sum(x * x)


def attention(x, weights):
    x = tf.reshape(tf.concat([x, x * 0.5, x - 1.0], 0), [2, 3, 16])
    for q, k, v in zip(weights[::3], weights[1::3], weights[2::3]):
        scores = tf.nn.softmax(tf.matmul(x @ q, x @ k, transpose_b=True))
        x = x + scores @ (x @ v)
    return tf.reduce_sum(x * x)


def shared(x, weights):
    """A weight that is used twice, and one that is made of another."""
    for w in (weights[0], weights[1], weights[0], weights[1] @ weights[2]):
        x = tf.tanh(x @ w)
    return tf.reduce_sum(x * x)


def similarity(x, weights):
    """The gradient of the input is needed for that of the weights."""
    return tf.reduce_sum(tf.tanh((x @ weights[0]) @ tf.transpose(x))) + dense(x, weights[1:])


def function_of(loss_of, weights, calls):
    @tf.function(autograph=False)
    def gradients_of(x):
        with tf.GradientTape() as tape:
            tape.watch(weights)
            loss = loss_of(x, weights)
        gradients = tape.gradient(loss, weights)
        for _ in range(calls):
            others = [None, tf.IndexedSlices(x, tf.constant([0, 1])), tf.ones([2, 2])]
            gradients = gradient_order.compute_in_order([*gradients, *others])[: len(weights)]
        return gradients

    return gradients_of


def weights_of(count, seed=1):
    generator = np.random.default_rng(seed)
    return [tf.constant(generator.normal(size=(16, 16)), tf.float32) for _ in range(count)]


@pytest.mark.parametrize("loss_of", [dense, convolutions, attention, shared, similarity])
@pytest.mark.parametrize("calls", [1, 2])
def test_gradients_stay_the_same(loss_of, calls):
    """A cycle in the graph would be an error."""
    weights, x = weights_of(6), tf.constant(np.random.default_rng(2).normal(size=(2, 16)), tf.float32)
    plain, ordered = function_of(loss_of, weights, 0), function_of(loss_of, weights, calls)
    assert has_waiting(ordered) and not has_waiting(plain)
    for expected, found in zip(plain(x), ordered(x)):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("loss_of, expected", [(dense, 3), (convolutions, 4)])  # here also the one of the data
def test_the_layer_below_waits_for_the_weights_of_the_layer_above(loss_of, expected):
    weights = weights_of(4)
    graph = function_of(loss_of, weights, 1).get_concrete_function(tf.TensorSpec([2, 16])).graph
    waiting = [op for op in graph.get_operations() if op.type in OF_INPUT and op.control_inputs]
    assert len(waiting) == expected
    for op in waiting:
        (call,) = op.control_inputs
        (seen,) = call.control_inputs
        awaited = seen.inputs[0].op
        assert awaited.type in ("MatMul", "Conv2DBackpropFilter")
        assert {tensor.ref() for tensor in awaited.inputs} & {tensor.ref() for tensor in op.inputs}


def has_waiting(function):
    graph = function.get_concrete_function(tf.TensorSpec([2, 16])).graph
    return any(op.control_inputs for op in graph.get_operations() if op.type in OF_INPUT)


def test_several_threads_are_left_alone(monkeypatch):
    monkeypatch.setattr(devices, "inter_op_threads", lambda: 2)
    assert not has_waiting(function_of(dense, weights_of(4), 1))


def test_a_gpu_is_left_alone(monkeypatch):
    monkeypatch.setattr(devices, "has_gpu", lambda: True)
    assert not has_waiting(function_of(dense, weights_of(4), 1))


def test_without_a_graph_nothing_is_done():
    gradients = [tf.zeros([2]), tf.IndexedSlices(tf.zeros([1, 2]), tf.constant([0])), None]
    found = gradient_order.compute_in_order(gradients)
    assert all(one is given for one, given in zip(found, gradients, strict=True))


def test_an_eager_gradient_is_left_alone():
    eager = tf.ones([2, 2])

    @tf.function(autograph=False)
    def step():
        (same,) = gradient_order.compute_in_order([eager])
        return same + 1.0

    np.testing.assert_array_equal(step(), np.full([2, 2], 2.0))


def test_a_captured_gradient_is_left_alone():
    @tf.function(autograph=False)
    def outer(x):
        captured = tf.matmul(x, x)

        @tf.function(autograph=False)
        def inner():
            (same,) = gradient_order.compute_in_order([captured])
            return same + 1.0

        return inner()

    np.testing.assert_array_equal(outer(tf.ones([2, 2])), np.full([2, 2], 3.0))


@pytest.mark.parametrize(
    "configured, variable, expected", [(3, "2", 3), (0, "2", 2), (0, "", 5), (0, "0", 5), (0, "x", 5)]
)
@pytest.mark.parametrize("which", ["intra", "inter"])
def test_threads_are_those_of_tensorflow(monkeypatch, configured, variable, expected, which):
    monkeypatch.undo()
    monkeypatch.setattr(tf.config.threading, f"get_{which}_op_parallelism_threads", lambda: configured)
    monkeypatch.setenv(f"TF_NUM_{which.upper()}OP_THREADS", variable)
    monkeypatch.setattr(devices.os, "sched_getaffinity", lambda _: range(5))
    assert getattr(devices, f"{which}_op_threads")() == expected
