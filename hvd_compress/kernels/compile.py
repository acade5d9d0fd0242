"""Compilation of kernels."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any, Callable, Optional

import tensorflow as tf

# A gradient, its residual and the residual's factor: what `fed_back` adds.
Terms = tuple[tf.Tensor, Optional[tf.Tensor], float]


_state = threading.local()


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """A context in which compiled functions run as plain TensorFlow: slower, but without half a second for each."""
    before = getattr(_state, "uncompiled", False)
    _state.uncompiled = True
    try:
        yield
    finally:
        _state.uncompiled = before


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a pure tensor function with XLA, once per static shape and Python argument.

    XLA fuses each kernel into one pass over memory, where plain TensorFlow takes one pass per operation. A kernel
    that first needs a reduction, such as the range of a block, is split in two: in one kernel, XLA would compute
    the reduction's input again, in slower code. A compiled function can be called eagerly and inside any
    `tf.function`; a call costs about 50 microseconds.
    """
    in_xla = tf.function(function, jit_compile=True, autograph=False)
    in_xla._omit_frequent_tracing_warning = True  # each size is traced once, and of many sizes TensorFlow would warn

    @functools.wraps(function)
    def called(*args: Any, **keywords: Any) -> Any:
        return (function if getattr(_state, "uncompiled", False) else in_xla)(*args, **keywords)

    return called


def fed_back(gradient: tf.Tensor, residual: tf.Tensor | None, decay: float) -> tf.Tensor:
    """Gradient + decay * residual in float32, for use inside kernels. `residual` may be None."""
    if residual is None:
        return gradient
    residual = tf.cast(residual, tf.float32)
    return gradient + (residual if decay == 1.0 else decay * residual)
