"""Writes scalars and text for TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

# Values of TensorBoard's DataClass: a scalar per step, or a tensor of any shape per step.
_SCALAR, _TENSOR = 1, 2


def write(writer: Any, step: int, values: Mapping[str, float | str]) -> None:
    """Writes numbers as tf.summary.scalar does, and strings as tf.summary.text does, all in one event.

    Args:
        writer: A writer of tf.summary.create_file_writer.
        step: The training step.
        values: Numbers and strings by tag.
    """
    summary = tf.compat.v1.Summary()
    for tag, value in values.items():
        entry = summary.value.add(tag=tag)
        metadata, tensor = entry.metadata, entry.tensor
        if isinstance(value, str):
            metadata.plugin_data.plugin_name, metadata.data_class = "text", _TENSOR
            tensor.CopyFrom(tf.make_tensor_proto([value]))
        else:  # the same as tf.make_tensor_proto makes, in a tenth of the time
            metadata.plugin_data.plugin_name, metadata.data_class = "scalars", _SCALAR
            tensor.dtype = tf.float32.as_datatype_enum
            tensor.tensor_shape.SetInParent()
            tensor.float_val.append(value)
    with writer.as_default(step=step):
        tf.summary.experimental.write_raw_pb(summary.SerializeToString(), step=step)
