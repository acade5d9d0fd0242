"""Keras's TensorBoard callback fails after the first step where tensorboard is not installed; this is said before."""

import importlib.util

import numpy as np
import pytest
from tensorflow import keras

import hvd_compress as hvdc


def test_it_is_said_before_the_first_step(tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "tensorboard" else find(name, *more)
    )
    model = keras.Sequential([keras.layers.Input([2]), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    callbacks = [hvdc.callbacks.BroadcastGlobalVariablesCallback(0), keras.callbacks.TensorBoard(str(tmp_path))]
    before = model.get_weights()
    with pytest.raises(ModuleNotFoundError, match="Keras's TensorBoard callback needs tensorboard") as caught:
        model.fit(np.ones([4, 2]), np.ones([4, 1]), callbacks=callbacks, verbose=0)
    assert "\n" not in str(caught.value)
    for a, b in zip(before, model.get_weights()):
        np.testing.assert_array_equal(a, b)
