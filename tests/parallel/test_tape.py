"""hvdc.DistributedGradientTape, with different data on each rank."""

import dataclasses
import gc

import horovod.tensorflow as hvd
import introspect
import numpy as np
import pytest
import tensorflow as tf

import hvd_compress as hvdc


def gradient_of(rank, step, shape=(40, 50)):
    return np.random.default_rng([rank, step]).standard_normal(shape).astype(np.float32)


def tape_gradient(variable, pull, **options):
    """d/dv sum(v * pull) = pull, through a distributed tape."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(variable * pull)
    tape = hvdc.DistributedGradientTape(tape, **options)
    return tape.gradient(loss, [variable])[0]


def np_topk(x, k):
    out = np.zeros_like(x)
    keep = np.argsort(-np.abs(x), kind="stable")[:k]
    out[keep] = x[keep]
    return out


@pytest.mark.parametrize("in_function", [False, True])
def test_residuals_outlive_the_tape(in_function, rank, size):
    variable = tf.Variable(np.zeros((40, 50), np.float32))

    def step(pull):
        return tape_gradient(variable, pull, compression="topk:ratio=0.1")

    run = tf.function(step) if in_function else step
    residual = np.zeros((size, 2000), np.float32)
    for i in range(4):
        result = run(tf.constant(gradient_of(rank, i))).numpy().ravel()
        x = residual + np.stack([gradient_of(r, i).ravel() for r in range(size)])
        sent = np.stack([np_topk(row, 200) for row in x])
        residual = x - sent
        np.testing.assert_allclose(result, sent.mean(0), atol=1e-5)


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_none_is_the_mean_or_the_sum(op, rank, size):
    result = tape_gradient(tf.Variable(tf.zeros([40, 50])), gradient_of(rank, 0), op=op).numpy()
    total = np.sum([gradient_of(r, 0) for r in range(size)], axis=0)
    np.testing.assert_allclose(result, total / (size if op == hvd.Average else 1), rtol=1e-5, atol=1e-6)


def test_the_residual_goes_with_its_variable():
    gc.collect()  # what other tests left
    before = introspect.reducers_of_tapes()
    variable = tf.Variable(tf.zeros([40, 50]))
    tape_gradient(variable, gradient_of(0, 0), compression="topk:ratio=0.1")
    assert introspect.reducers_of_tapes() == before + 1
    del variable
    gc.collect()
    assert introspect.reducers_of_tapes() == before


def test_structure_of_sources_is_kept(rank, size):
    a, b = tf.Variable([1.0, 2.0]), tf.Variable([[3.0]])
    with tf.GradientTape(persistent=True) as tape:
        loss = tf.reduce_sum(a * a) * (rank + 1) + b[0, 0] * (rank + 1)
    tape = hvdc.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, {"a": a, "b": [b]})
    mean = (size + 1) / 2
    np.testing.assert_allclose(gradients["a"], np.array([2.0, 4.0]) * mean)
    np.testing.assert_allclose(gradients["b"][0], [[mean]])
    np.testing.assert_allclose(tape.gradient(loss, a), np.array([2.0, 4.0]) * mean)  # persistent


def test_unconnected_sources_give_none():
    a, b = tf.Variable([1.0]), tf.Variable([1.0])
    with tf.GradientTape() as tape:
        loss = a * 2.0
    gradients = hvdc.DistributedGradientTape(tape).gradient(loss, [a, b])
    assert gradients[0].numpy() == [2.0] and gradients[1] is None


def test_local_sources(rank, size):
    local, shared = tf.Variable([1.0]), tf.Variable([1.0])
    with tf.GradientTape() as tape:
        loss = (local + shared) * float(rank + 1)
    tape = hvdc.DistributedGradientTape(tape)
    tape.register_local_source(local)
    mine, everyones = tape.get_local_and_global_gradients(loss, [local, shared])
    assert mine[0][0] is local and mine[0][1].numpy() == [(rank + 1) / size]
    assert everyones[0][0] is shared and everyones[0][1].numpy() == [(size + 1) / 2]


def test_as_a_context_manager(rank, size):
    variable = tf.Variable([1.0])
    with hvdc.DistributedGradientTape(tf.GradientTape()) as tape:
        loss = variable * float(rank + 1)
    assert tape.gradient(loss, [variable])[0].numpy() == [(size + 1) / 2]


class Half(hvdc.Compressor):
    """Sends half of every value: after n steps of g, n g - g (1 - 2**-n) has arrived."""

    def compress(self, tensor):
        return {"half": tensor * 0.5}, tensor.shape

    def decompress(self, payload, ctx):
        return tf.reshape(payload["half"], ctx)


@dataclasses.dataclass
class HalfWithoutHash(Half):
    name: str = "half"


@pytest.mark.parametrize("make", [lambda: Half, Half, HalfWithoutHash], ids=["class", "object", "no hash"])
def test_a_compressor_of_the_users_that_is_made_in_each_step_keeps_its_residual(make, rank, size):
    variable = tf.Variable(np.zeros((40, 50), np.float32))
    pull = np.mean([gradient_of(r, 0) for r in range(size)], axis=0)
    arrived = np.zeros((40, 50))
    for n in range(1, 5):
        arrived += tape_gradient(variable, gradient_of(rank, 0), compression=make()).numpy()
        np.testing.assert_allclose(arrived, pull * (n - 1 + 0.5**n), atol=1e-5)


class Times(hvdc.Compressor):
    def __init__(self, factor):
        self.factor = factor

    def compress(self, tensor):
        return tensor * self.factor, tensor.shape

    def decompress(self, payload, ctx):
        return payload


def test_compressors_of_the_users_with_other_attributes_are_others(rank, size):
    variable, pull = tf.Variable(tf.zeros([40, 50])), tf.ones([40, 50])
    for factor in (0.5, 0.25, np.float32(0.125), np.array([0.5])):
        gradient = tape_gradient(variable, pull, compression=Times(factor), error_feedback=False)
        np.testing.assert_allclose(gradient, tf.fill([40, 50], float(np.max(factor))))


def test_wrong_tape():
    with pytest.raises(TypeError, match="gradtape must be a tf.GradientTape"):
        hvdc.DistributedGradientTape(None)
