"""Helpers for code that TensorFlow traces into graphs."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

# Where a `tf.function` keeps its first trace, which it does not need after its first call.
_FIRST_TRACE = "_concrete_variable_creation_fn"


def outermost_graph() -> Any:
    """The graph of the outermost function that is being traced, even inside inner functions and branches of tf.cond."""
    graph = tf.compat.v1.get_default_graph()
    while getattr(getattr(graph, "outer_graph", None), "building_function", False):
        graph = graph.outer_graph
    return graph


def function_graph() -> Any:
    """The graph of the innermost function that is being traced, even inside a branch of tf.cond or a loop."""
    from tensorflow.python.ops import control_flow_v2_func_graphs as control_flow

    inside = (control_flow.CondBranchFuncGraph, control_flow.WhileCondFuncGraph, control_flow.WhileBodyFuncGraph)
    graph = tf.compat.v1.get_default_graph()
    while isinstance(graph, inside):
        graph = graph.outer_graph
    return graph


def data_of_step() -> list[tf.Tensor]:
    """The data that the function that is being traced gets: its arguments, and what it takes from an iterator.

    What depends on them does not run in a step that fails because the data has ended: Keras learns so that a dataset of
    unknown length has ended. Without arguments inside a branch or a loop.
    """
    graph = tf.compat.v1.get_default_graph()
    arguments = [tensor for tensor in getattr(graph, "inputs", []) if tensor.dtype != tf.resource]
    taken = [op.outputs[0] for op in graph.get_operations() if op.type.startswith("IteratorGetNext")]
    return arguments + taken if function_graph() is graph else taken


def variable(value: tf.Tensor, name: str) -> tf.Variable:
    """A variable that no model tracks. It may be created in an init_scope while a function is traced."""
    # Lifting it out of that function would trace the function a second time.
    return tf.Variable(value, trainable=False, name=name, experimental_enable_variable_lifting=False)


def running_functions() -> set[Any]:
    """The `tf.function`s that are being traced or called now, on any thread."""
    function_type = type(tf.function(lambda: None))
    functions = set()
    for innermost in sys._current_frames().values():
        frame: Any = innermost
        while frame is not None:
            # Other frames are not looked into: `f_locals` copies what they hold, and keeps it alive.
            if frame.f_globals.get("__name__") == function_type.__module__:
                owner = frame.f_locals.get("self")
                if isinstance(owner, function_type):
                    functions.add(owner)
            frame = frame.f_back
    return functions


def is_tracing() -> bool:
    """Whether a function is being traced now, on any thread."""
    for innermost in sys._current_frames().values():
        frame: Any = innermost
        while frame is not None:
            if frame.f_code.co_name == "func_graph_from_py_func":
                return True
            frame = frame.f_back
    return False


def can_forget_traces() -> bool:
    """Whether `forget_traces` works with this version of TensorFlow: it has no public interface for it."""
    cache = getattr(tf.function(lambda: None), "_function_cache", None)
    return all(hasattr(cache, name) for name in ("_primary", "_dispatch_dict"))


def forget_traces(functions: Iterable[Any]) -> None:
    """Lets these `tf.function`s be traced again when they are called next, also if one of them is running."""
    for function in functions:
        function._function_cache._primary.clear()
        function._function_cache._dispatch_dict.clear()
        if hasattr(function, _FIRST_TRACE):
            setattr(function, _FIRST_TRACE, None)
