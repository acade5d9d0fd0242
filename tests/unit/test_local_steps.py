"""Arguments of local steps, outer optimizers, and how weights are divided into fragments."""

import dataclasses
import math

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from tensorflow import keras

import hvd_compress as hvdc
from hvd_compress.auto.delay_choice import pays
from hvd_compress.auto.round_length import propose
from hvd_compress.auto.usual_progress import of_round
from hvd_compress.checkpoint import plan_state
from hvd_compress.checkpoint.plan_state import Member, PlanState
from hvd_compress.engine.fragments import divide
from hvd_compress.engine.outer import resolve_outer
from hvd_compress.engine.settings import Settings
from hvd_compress.frontends import build
from hvd_compress.frontends.pieces import LocalVariable
from hvd_compress.frontends.rounds import Rounds

SHAPES = st.lists(st.lists(st.integers(0, 20), max_size=3).map(tuple), max_size=8)


@given(SHAPES, st.integers(1, 9))
def test_fragments_hold_each_row_once_and_are_of_almost_equal_size(shapes, count):
    fragments = divide(shapes, count)
    rows = {i: [] for i in range(len(shapes))}
    sizes = []
    for fragment in fragments:
        size = 0
        for i, start, stop in fragment:
            assert start < stop
            rows[i] += range(start, stop)
            size += (stop - start) * math.prod(shapes[i][1:])
        sizes.append(size)
    assert len(fragments) == count
    for i, shape in enumerate(shapes):
        assert rows[i] == (list(range((shape or (1,))[0])) if math.prod(shape) else [])
    unit = max((math.prod(shape[1:] if len(shape) > 1 else shape) for shape in shapes), default=0)
    assert all(abs(size - sum(sizes) / count) <= 2 * unit for size in sizes)


@pytest.mark.parametrize("nesterov", [True, False])
def test_an_outer_optimizer_of_keras_is_its_update_rule(nesterov):
    """Of SGD with momentum, with and without Nesterov's, against the formula and the outer optimizer of that name."""
    rng = np.random.default_rng(0)
    deltas = rng.standard_normal((4, 3)).astype(np.float32)
    outers = [keras.optimizers.SGD(0.7, momentum=0.9, nesterov=nesterov)]
    if nesterov:
        outers.append("nesterov:lr=0.7,momentum=0.9")
    for outer in outers:
        weights = [tf.Variable(tf.ones([3]))]
        update = resolve_outer(outer).begin(weights)
        expected, momentum = np.ones(3), np.zeros(3)
        for delta in deltas:
            update.apply([tf.constant(delta)])
            momentum = 0.9 * momentum + delta
            expected -= 0.7 * (delta + 0.9 * momentum if nesterov else momentum)
        np.testing.assert_allclose(weights[0].numpy(), expected, rtol=1e-5)
        (saved,) = [v for v in update.variables.values() if tuple(v.shape) == (3,)]
        np.testing.assert_allclose(
            np.abs(saved.numpy()), np.abs(momentum) * (1 if isinstance(outer, str) else 0.7), rtol=1e-5
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"local_steps": 0}, "local_steps must be a whole number from 1 on, got 0"),
        ({"outer": "nesterov"}, "outer belongs to local steps: set local_steps as well, or leave it out"),
        ({"local_warmup": 3}, "local_warmup belongs to local steps"),
        ({"local_steps": 2, "outer": "adam"}, "outer must be 'average', 'nesterov:lr=0.7,momentum=0.9' or a Keras"),
        ({"local_steps": 2, "outer": "nesterov:speed=1"}, "outer optimizer 'nesterov' has no argument 'speed'"),
        ({"local_steps": 2, "outer": "nesterov:lr=0"}, "needs lr above 0 and momentum below 1, got nesterov:lr=0.0"),
        (
            {"local_steps": 2, "compression": "topk:ratio=0.1", "momentum_correction": 0.9},
            "momentum_correction=0.9 and local_steps cannot go together: momentum of movements is that of the outer",
        ),
        ({"local_steps": 2, "compression": "dgc:ratio=0.1"}, "momentum of dgc:ratio=0.1 and local_steps cannot go"),
        ({"local_steps": 2, "fragments": 3}, "fragments must be None or 'stream', got 3"),
        ({"local_steps": 1, "fragments": "stream"}, "fragments='stream' needs local_steps of at least 2"),
        ({"local_steps": 2, "fragments": "stream", "groups": 2}, "groups and fragments='stream' cannot go together"),
        ({"local_steps": 2, "alpha": 0.5}, "alpha mixes weights with fragments='stream' only"),
        ({"local_steps": 2, "fragments": "stream", "alpha": 1}, "alpha must be below 1"),
        ({"local_steps": 2, "compression": "auto"}, "local_steps needs a named compressor"),
        ({"local_steps": 4, "compression": "auto:local_steps=(1|8)"}, "say both how long a round is"),
        ({"compression": "auto:local_steps=(1|8)", "outer": "nesterov"}, "auto:local_steps and outer=nesterov"),
        ({"compression": "auto:local_steps=(1|8)", "fragments": "stream"}, "auto:local_steps and fragments=stream"),
        ({"compression": "auto:local_steps=(1|8)", "local_warmup": 9}, "auto:local_steps and local_warmup=9"),
        ({"compression": "auto:local_steps=(1|0)"}, "auto: local_steps must be a whole number from 1 on, got 0"),
        ({"compression": "auto:local_steps=8,objective=step"}, "local_steps and objective='step' cannot go together"),
        ({"compression": "auto:local_steps=8,budget=5ms"}, "local_steps and budget cannot go together"),
        ({"compression": "auto:local_steps=8,probe_every=9"}, "local_steps and probe_every cannot go together"),
        ({"compression": "auto:candidates=(powersgd:rank=2),local_steps=8"}, "does not choose powersgd:rank=2"),
        ({"compression": "auto:local_steps=8,delay=(0|1)"}, "auto: delay and local_steps cannot go together"),
        ({"compression": "auto:delay=(0|2)"}, "auto: delay must be a whole number from 0 to 1, got 2"),
        ({"compression": "auto:delay=(0|1)", "delay_warmup": 9}, "auto:delay and delay_warmup=9 cannot go together"),
        ({"compression": "auto:delay=0", "delay": 1}, "auto:delay and delay=1 cannot go together"),
        ({"compression": "auto:delay=(0|1)", "local_steps": 4}, "local_steps needs a named compressor"),
        ({"compression": "auto", "delay": 1}, "its choice changes from step to step, unless it is auto:delay=(0|1)"),
    ],
)
def test_arguments_that_do_not_fit(options, message):
    with pytest.raises(ValueError) as error:
        hvdc.DistributedOptimizer(keras.optimizers.SGD(), **options)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_the_lengths_of_rounds_are_those_of_auto():
    auto = hvdc.Compression.auto(local_steps=(32, 1, 8, 8))
    assert auto.local_steps == (1, 8, 32) and hvdc.Compression.parse(auto.spec) == auto
    assert hvdc.Compression.parse("auto:local_steps=(1|8|32)") == auto
    optimizer = hvdc.DistributedOptimizer(keras.optimizers.SGD(), compression=auto)
    assert optimizer._hvdc.rounds.local_steps == 1
    with pytest.raises(ValueError, match="which see the weights; DistributedGradientTape only sees gradients"):
        hvdc.DistributedGradientTape(tf.GradientTape(), compression=auto)
    with pytest.raises(ValueError, match="LocalSteps needs local_steps"):
        hvdc.LocalSteps([tf.Variable([1.0])])


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([0.2, 0.002, 0.098, 0.1], True),  # 102 ms in place of 200, and 60% of the progress
        ([0.2, 0.09, 0.01, 0.1], False),  # the processor encodes most of the time
        ([0.4, 0.01, 0.29, 0.1], False),  # 300 ms in place of 400
        ([0.105, 0.004, 0.05, 0.1], False),  # the wire hides behind the backward pass already
    ],
)
def test_a_delay_pays_if_it_hides_enough(times, expected):
    assert bool(pays(tf.constant(times))) == expected


@pytest.mark.parametrize(
    ("rest", "exchange", "expected"),
    [
        (0.04, 0.0004, 1),  # a step waits for nothing
        (0.04, 0.03, 8),  # (40 + 30 / n) * n ** 0.07: 70 ms, 51, 52
        (0.04, 0.3, 32),  # 340, 90, 63
        (0.0, 0.3, 1),  # not known yet
    ],
)
def test_the_length_with_the_most_progress_per_second(rest, exchange, expected):
    lengths = [1, 8, 32]
    progress = [of_round(length) for length in lengths]
    times = tf.constant([rest, exchange])
    assert lengths[propose(times, tf.constant(0), lengths, progress)] == expected
    if rest:
        costs = [(rest + exchange / n) / p for n, p in zip(lengths, progress)]
        best = int(np.argmin(costs))
        for place in range(3):  # another length is kept unless it is 5% worse
            kept = costs[best] >= 0.95 * costs[place]
            assert propose(times, tf.constant(place), lengths, progress) == (place if kept else best)


def test_an_outer_optimizer_of_another_type():
    for outer in (3, keras.optimizers.SGD, None):
        with pytest.raises(TypeError, match="outer must be 'average'"):
            hvdc.DistributedOptimizer(keras.optimizers.SGD(), local_steps=2, outer=outer)


def test_local_steps_needs_variables():
    with pytest.raises(TypeError, match="LocalSteps needs variables, or a Keras model, got 3"):
        hvdc.LocalSteps([3], local_steps=2)
    with pytest.raises(ValueError, match="LocalSteps got no variables to train"):
        hvdc.LocalSteps([], local_steps=2)
    with pytest.raises(ValueError, match=r"build it first, model.build\(input_shape\)"):
        hvdc.LocalSteps(keras.Sequential([keras.layers.Dense(2)]), local_steps=2)


def test_another_number_of_ranks_keeps_optimizers_and_drops_the_round():
    """What is saved of each rank: its weights and the variables of its optimizer."""

    def saved(rank):
        tensors = {"weights": {0: np.full([2], rank, np.float32)}, "slots": {1: np.full([2], 10 + rank, np.float32)}}
        members = [Member("kernel", (2,), "own"), Member("velocity", (2,), "own")]
        return PlanState(members, tensors, {"weights": [], "slots": []}, [], {"counts": np.array([7, 7, 4])})

    for state in (plan_state.merged([saved(1), saved(3)]), plan_state.zeroed(saved(1))):
        assert list(state.tensors) == ["slots"]
        np.testing.assert_array_equal(state.tensors["slots"][1], [11, 11])
        assert state.replicated_state["counts"][1] == 7
        metadata, arrays = state.packed("0")
        assert set(PlanState.names([metadata])) == set(arrays)


def test_a_rank_that_takes_over_a_state_without_weights_begins_at_the_synchronized_ones():
    variables = [LocalVariable(v, v) for v in (tf.Variable(tf.ones([3, 2])), tf.Variable(tf.zeros([2])))]
    settings = Settings(hvdc.Compression.int8, local_steps=4, outer="nesterov")
    rounds = Rounds(settings, build.new_reducer(settings))
    rounds.prepare(variables)
    slot = tf.Variable(5.0)
    for variable in variables:
        variable.value.assign_add(tf.ones_like(variable.value))
    whole = rounds.state([slot])
    slot.assign(6.0)
    for state, expected in ((whole, (2.0, 1.0)), (plan_state.without_weights(whole), (1.0, 0.0))):
        variables[0].value.assign(tf.zeros([3, 2]))
        rounds.restore(state, [slot])
        assert [float(tf.reduce_max(v.value)) for v in variables] == list(expected) and float(slot) == 5.0
    with pytest.raises(ValueError, match="belongs to other variables or another outer optimizer"):
        other = dataclasses.replace(settings, outer="average")
        another = Rounds(other, build.new_reducer(other))
        another.prepare(variables)
        another.restore(whole, [slot])
