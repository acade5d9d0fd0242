"""Lets a single thread compute the gradient of a layer's weights before it goes on to the layer below.

TensorFlow's executor may as well compute the gradients of all layers' inputs first, and then those of the weights, the
last layer's at the end (see `exchange.send_order` for its stack). Then nothing is exchanged during the backward pass:
a step of an autoencoder took 70 ms in place of 59, at 100 Mbit/s with one core per host. Which of the two it does
follows from the order of the graph's edges, which differs between programs.

Only gradients that a product or a convolution computes are put in order, in the graph in which they are reduced. Tied
weights and gradients that were changed before, such as clipped ones, stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ..common import devices
from ..exchange.send_order import next_can_start, send_first

_PRODUCTS = ("MatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum")
# Operations that compute the gradient of a layer's weights, and of its input. None has a state: TensorFlow lets
# operations with a state wait for others later.
_OF_WEIGHTS = frozenset(
    [*_PRODUCTS, "Conv2DBackpropFilter", "Conv3DBackpropFilterV2", "DepthwiseConv2dNativeBackpropFilter"]
)
_OF_INPUT = frozenset(
    [*_PRODUCTS, "Conv2DBackpropInput", "Conv3DBackpropInputV2", "DepthwiseConv2dNativeBackpropInput"]
)
# Operations between the one that computes a gradient and the gradient. Batches of products are summed.
_PASSED = frozenset(["Cast", "EnsureShape", "Identity", "Reshape", "Sum"])


def compute_in_order(gradients: Sequence[Any]) -> list[Any]:
    """Adds control inputs to the graph of the gradients, if operations run one after the other, on a CPU.

    Args:
        gradients: Of any kind. Only dense ones of weights are looked at: vectors are biases.

    Returns:
        The same gradients. A bucket that is made of them is encoded before the backward pass goes on.
    """
    if tf.executing_eagerly() or devices.has_gpu() or devices.inter_op_threads() > 1:
        return list(gradients)
    graph = tf.compat.v1.get_default_graph()
    computing = [_computing(g) if _is_of_weights(g, graph) else None for g in gradients]
    of_weights = {op.name: op for op in computing if op is not None and op.type in _OF_WEIGHTS}
    places = {op.name: place for place, op in enumerate(graph.get_operations())} if of_weights else {}
    for op in of_weights.values():
        needed = [*(tensor.op for tensor in op.inputs), *op.control_inputs]
        last = max(places[other.name] for other in needed)
        consumers = {consumer.name: consumer for tensor in op.inputs for consumer in tensor.consumers()}
        # What was traced after everything that `op` needs can wait for `op` without a cycle, unless it is itself waited
        # for.
        waiting = [
            consumer
            for name, consumer in consumers.items()
            if consumer.type in _OF_INPUT and places[name] > last
            if name not in of_weights and not consumer._control_outputs
        ]
        if waiting:
            # The thread goes on with this call after what follows from the gradient: it encodes and sends a bucket.
            call = next_can_start(op.outputs[0]).op
            for consumer in waiting:
                consumer._add_control_input(call)
    return [g if op is None or op.name not in of_weights else send_first(g) for g, op in zip(gradients, computing)]


def _is_of_weights(gradient: Any, graph: Any) -> bool:
    """Whether it is a dense tensor of this graph, and no vector."""
    if not isinstance(gradient, tf.Tensor) or getattr(gradient, "graph", None) is not graph:
        return False
    return gradient.shape.rank is not None and gradient.shape.rank > 1


def _computing(gradient: tf.Tensor) -> tf.Operation:
    """The operation that computes a gradient."""
    op = gradient.op
    while op.type in _PASSED:
        op = op.inputs[0].op
    return op
