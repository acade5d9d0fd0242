"""What depends on how TensorFlow traces functions into graphs."""

from __future__ import annotations

import functools
from typing import Any, Callable, TypeVar

import tensorflow as tf

Function = TypeVar("Function", bound=Callable[..., Any])


def not_converted(function: Function) -> Function:
    """Keeps AutoGraph out of a function that has nothing to convert, which takes twice as long as tracing.

    The one line of an error stays as it is, too: AutoGraph would put a traceback of its own around it.
    """

    @tf.autograph.experimental.do_not_convert
    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        try:
            return function(*args, **options)
        except Exception as error:
            error.ag_pass_through = True  # type: ignore[attr-defined]
            raise

    return call


def outermost_graph() -> Any:
    """The graph of the whole function that is being traced: a tf.cond's branches have graphs of their own."""
    graph = tf.compat.v1.get_default_graph()
    while getattr(getattr(graph, "outer_graph", None), "building_function", False):
        graph = graph.outer_graph
    return graph


def variable(value: tf.Tensor, name: str) -> tf.Variable:
    """A variable that belongs to nobody's model; may be made in an init_scope while a function is traced."""
    # Not lifted out of that function, which would trace it a second time.
    return tf.Variable(value, trainable=False, name=name, experimental_enable_variable_lifting=False)
