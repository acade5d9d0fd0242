"""How kernels are compiled."""

from __future__ import annotations

from typing import Any, Callable

import tensorflow as tf


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a pure tensor function with XLA, once per static shape and Python argument.

    XLA fuses each kernel into one or two passes over memory, where plain TensorFlow takes one
    pass per op. A compiled function can be called eagerly and inside any `tf.function`.
    """
    return tf.function(function, jit_compile=True, autograph=False)
