"""The base of our callbacks: that of TensorFlow's own Keras, for models of any Keras."""

from __future__ import annotations

from tensorflow import keras


class Callback(keras.callbacks.Callback):
    """What Keras 2 asks of a callback, so that one built on Keras 3 also serves a `tf_keras` model."""

    # No batch hook here reads its logs, so Keras 2 need not wait for each step's results.
    _supports_tf_logs = True
    _implements_train_batch_hooks = staticmethod(lambda: True)
    _implements_test_batch_hooks = staticmethod(lambda: False)
    _implements_predict_batch_hooks = staticmethod(lambda: False)
