"""Gradients as TensorFlow returns them: tensors, IndexedSlices or None."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf


def values_of(gradient: Any) -> Any:
    """The values of IndexedSlices; tensors and None are returned unchanged."""
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def with_values(gradient: Any, change: Callable[[tf.Tensor], tf.Tensor]) -> Any:
    """A tensor, or the values of IndexedSlices, changed by a function that keeps their shape; None stays None."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(change(gradient.values), gradient.indices, gradient.dense_shape)
    return None if gradient is None else change(gradient)
