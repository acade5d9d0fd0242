"""Numbers for TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

# TensorBoard's DataClass: a scalar, or a tensor of any shape per step.
_SCALAR, _TENSOR = 1, 2


def write(writer: Any, step: int, values: Mapping[str, float | str]) -> None:
    """Writes numbers (as tf.summary.scalar does) and text (as tf.summary.text), all as one event.

    Args:
        writer: Of tf.summary.create_file_writer.
        step: The training step.
        values: By tag.
    """
    summary = tf.compat.v1.Summary()
    for tag, value in values.items():
        added = summary.value.add(tag=tag)
        text = isinstance(value, str)
        added.metadata.plugin_data.plugin_name = "text" if text else "scalars"
        added.metadata.data_class = _TENSOR if text else _SCALAR
        tensor = tf.make_tensor_proto([value] if text else value, tf.string if text else tf.float32)
        added.tensor.CopyFrom(tensor)
    with writer.as_default(step=step):
        tf.summary.experimental.write_raw_pb(summary.SerializeToString(), step=step)
