"""What depends on how TensorFlow traces functions into graphs."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def outermost_graph() -> Any:
    """The graph of the whole function that is being traced: a tf.cond's branches have graphs of their own."""
    graph = tf.compat.v1.get_default_graph()
    while getattr(getattr(graph, "outer_graph", None), "building_function", False):
        graph = graph.outer_graph
    return graph


def function_graph() -> Any:
    """The graph of the function that is being traced: of the innermost one, but not of a tf.cond's branch."""
    from tensorflow.python.ops import control_flow_v2_func_graphs as control_flow

    inside = (
        control_flow.CondBranchFuncGraph,
        control_flow.WhileCondFuncGraph,
        control_flow.WhileBodyFuncGraph,
    )
    graph = tf.compat.v1.get_default_graph()
    while isinstance(graph, inside):
        graph = graph.outer_graph
    return graph


def variable(value: tf.Tensor, name: str) -> tf.Variable:
    """A variable that belongs to nobody's model; may be made in an init_scope while a function is traced."""
    # Not lifted out of that function, which would trace it a second time.
    return tf.Variable(value, trainable=False, name=name, experimental_enable_variable_lifting=False)
