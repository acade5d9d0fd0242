"""The engine's seams, each with an implementation that is written here: nothing else has to change for one."""

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf

import hvd_compress as hvdc
from hvd_compress.compressors import Compressor
from hvd_compress.engine.observer import Observer
from hvd_compress.engine.reducer import Reducer
from hvd_compress.engine.selector import Selector, switch_case
from hvd_compress.engine.settings import Settings
from hvd_compress.engine.transforms import Chain, Transform
from hvd_compress.frontends.build import new_plan

SHAPES = [(60, 40), (40, 30)]
STEPS = 4


class Alternating(Selector):
    """One compressor in even steps, another one in odd steps."""

    def __init__(self, candidates, step):
        self._candidates, self._step = candidates, step

    def switch(self, bucket, exchange):
        return switch_case(self.choice(bucket), [lambda c=c: exchange(c) for c in self._candidates])

    def choice(self, bucket):
        return tf.cast(self._step.read_value() % len(self._candidates), tf.int32)

    def current(self, bucket):
        return self._candidates[int(self.choice(bucket))]


class Threefold(Transform):
    """Sends three times the gradient."""

    def apply(self, local):
        return local._replace(chunks=[3.0 * chunk for chunk in local.chunks])


class Stopwatch(Observer):
    """Adds up how long buckets are on their way, and counts steps."""

    def __init__(self):
        self.seconds = tf.Variable(tf.zeros([], tf.float64), trainable=False)
        self.steps = tf.Variable(0, trainable=False)

    def wants_times(self, bucket):
        return True

    def observe(self, measurement):
        times = [bucket.timestamps for bucket in measurement.buckets]
        self.seconds.assign_add(tf.add_n([t.received - t.encoded for t in times]))
        self.steps.assign_add(1)


class Halves(Compressor):
    """Float16, written as a user would, with a residual."""

    def compress(self, tensor):
        return tf.cast(tensor, tf.float16), tensor.shape

    def decompress(self, payload, ctx):
        return tf.reshape(tf.cast(payload, tf.float32), ctx)


@pytest.fixture
def variables():
    return [tf.Variable(tf.zeros(shape)) for shape in SHAPES]


def gradients(rank, step=0):
    rng = np.random.default_rng([rank, step])
    return [rng.standard_normal(shape).astype(np.float32) for shape in SHAPES]


def mean(size, step=0):
    return [np.mean(of_ranks, 0) for of_ranks in zip(*(gradients(rank, step) for rank in range(size)))]


def reducer(spec, change):
    """A reducer whose plans are changed when they are made."""

    def build(*arguments):
        plan = new_plan(*arguments)
        change(plan)
        return plan

    compressor = hvdc.Compression.parse(spec) if isinstance(spec, str) else spec
    return Reducer(Settings(compressor, min_compress_size=0), build)


def test_a_selector(rank, size, variables):
    candidates = [hvdc.Compression.onebit, hvdc.Compression.int8]

    def alternate(plan):
        plan.selectors = [Alternating(candidates, plan.state.step)] * len(plan.selectors)

    reduce = reducer("onebit", alternate)
    errors = []
    for _ in range(STEPS):
        reduced = reduce([tf.constant(g) for g in gradients(rank)], variables)
        errors.append(np.abs(reduced[0].numpy() - mean(size)[0]).mean())
    # Signs are far off; int8 sends what they left, so that two steps together send two gradients.
    assert errors[0] > 0.3
    first, second = (reduce([tf.constant(g) for g in gradients(rank)], variables) for _ in range(2))
    total = [a.numpy() + b.numpy() for a, b in zip(first, second)]
    for both, exact in zip(total, mean(size)):
        np.testing.assert_allclose(both, 2 * exact, atol=0.1)


def test_a_transform(rank, size, variables):
    def add_transform(plan):
        plan.transforms = Chain(plan.transforms, Threefold())

    reduced = reducer("int8", add_transform)([tf.constant(g) for g in gradients(rank)], variables)
    for tensor, exact in zip(reduced, mean(size)):
        np.testing.assert_allclose(tensor.numpy(), 3 * exact, atol=0.15)


def test_an_observer(rank, variables):
    stopwatch = Stopwatch()
    reduce = reducer("int8", lambda plan: plan.observers.append(stopwatch))
    for step in range(STEPS):
        reduce([tf.constant(g) for g in gradients(rank, step)], variables)
    assert int(stopwatch.steps) == STEPS
    assert float(stopwatch.seconds) > 0.0


def test_an_observer_in_the_place_of_another_one(rank, variables):
    plans = []
    reduce = reducer("int8", plans.append)
    stopwatches = Stopwatch(), Stopwatch()
    for step in range(STEPS):
        if step:
            plans[0].observers[:] = [stopwatches[step % 2]]
        reduce([tf.constant(g) for g in gradients(rank, step)], variables)
    assert [int(stopwatch.steps) for stopwatch in stopwatches] == [1, 2]


@pytest.mark.parametrize("spec", [Halves(), hvdc.Compression.auto(candidates=["none", Halves()])])
def test_a_compressor_alone_and_as_a_candidate(rank, size, variables, spec):
    reduce = reducer(spec, lambda plan: None)
    total = [np.zeros(shape) for shape in SHAPES]
    for step in range(STEPS):
        reduced = reduce([tf.constant(g) for g in gradients(rank, step)], variables)
        total = [t + r.numpy() for t, r in zip(total, reduced)]
    exact = [np.sum(of_steps, 0) for of_steps in zip(*(mean(size, step) for step in range(STEPS)))]
    for sums, expected in zip(total, exact):
        np.testing.assert_allclose(sums, expected, atol=2e-3)
    assert hvd.allgather(tf.constant([total[0].sum()])).numpy().std() == 0.0
