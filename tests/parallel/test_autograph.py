"""AutoGraph and this package, in a custom loop that AutoGraph converts."""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow import keras

import hvd_compress as hvdc
from hvd_compress.frontends import rounds, tape


def is_converting():
    return tf.__internal__.autograph.control_status_ctx().status.name == "ENABLED"


def distributed_tape(variables):
    with tf.GradientTape() as own:
        loss = tf.reduce_sum(variables[0] ** 2)
    return hvdc.DistributedGradientTape(own, compression="auto").gradient(loss, variables)


@pytest.fixture
def steps():
    """Steps of custom loops, and the function of this package that each of them calls inside of the public one."""
    variables = [tf.Variable(tf.ones([3]))]
    local_steps = hvdc.LocalSteps(variables, local_steps=2)
    return {
        "tape": (lambda: distributed_tape(variables), tape, "settings_from"),
        "local steps": (lambda: local_steps(), rounds.Rounds, "step"),
    }


@pytest.mark.parametrize("what", ["tape", "local steps"])
def test_autograph_converts_nothing_of_this_package(what, steps, monkeypatch):
    """Converting would take longer than tracing, and put whole tracebacks into errors."""
    step, owner, name = steps[what]
    original, converts = getattr(owner, name), []

    def spy(*arguments, **keywords):
        converts.append(is_converting())
        return original(*arguments, **keywords)

    monkeypatch.setattr(owner, name, spy)

    @tf.function
    def run():
        converts.append(is_converting())
        step()

    run()
    assert converts[0] and len(converts) > 1 and not any(converts[1:])


def test_a_users_optimizer_is_converted_as_without_this_package():
    class Careful(keras.optimizers.SGD):
        def apply_gradients(self, grads_and_vars, *args, **kwargs):
            pairs = list(grads_and_vars)
            if tf.reduce_all(pairs[0][0] > 0.0):  # needs AutoGraph
                super().apply_gradients(pairs, *args, **kwargs)

    variable = tf.Variable(tf.zeros([3]))
    optimizer = hvdc.DistributedOptimizer(Careful(1.0), compression="int8")
    optimizer.build([variable])

    @tf.function
    def run(gradient):
        optimizer.apply_gradients([(gradient, variable)])

    run(tf.ones([3]))
    np.testing.assert_allclose(variable, -1.0)
    run(-tf.ones([3]))
    np.testing.assert_allclose(variable, -1.0)
