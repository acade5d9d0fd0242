"""Functions that are traced again."""

import gc
import threading
import weakref

import numpy as np
import tensorflow as tf

from hvd_compress.common import tracing


class Held:
    """Something that a graph holds."""


def test_a_running_function_is_traced_again_and_its_first_graph_is_freed():
    traces, held = [], []

    @tf.function
    def step(x):
        traces.append(len(traces))
        kept = Held()
        tf.compat.v1.get_default_graph().kept = kept
        held.append(weakref.ref(kept))
        tf.numpy_function(forget, [], [])
        return x + 1.0

    def forget():
        if len(traces) == 1:
            functions = tracing.running_functions()
            assert functions == {step}
            tracing.forget_traces(functions)

    assert tracing.can_forget_traces()
    for expected in (1, 2, 2):
        assert float(step(tf.constant(1.0))) == 2.0 and len(traces) == expected
    gc.collect()
    assert held[0]() is None and held[1]() is not None


def test_functions_on_other_threads_are_found_and_nothing_is_kept_alive():
    begun, may_end = threading.Event(), threading.Event()

    @tf.function
    def step():
        tf.numpy_function(wait, [], [])

    def wait():
        begun.set()
        may_end.wait(60)

    class Proxy:
        @property
        def __class__(self):
            raise RuntimeError("an unbound proxy")

    def of_proxy(self):  # as in a frame of a library
        return tracing.running_functions()

    thread = threading.Thread(target=step, daemon=True)
    thread.start()
    assert begun.wait(60)
    array = np.zeros(3)
    seen = weakref.ref(array)
    assert of_proxy(Proxy()) == {step}
    del array
    gc.collect()
    assert seen() is None
    may_end.set()
    thread.join(60)
