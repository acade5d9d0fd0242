"""GPUs."""

from __future__ import annotations

import tensorflow as tf


def has_gpu() -> bool:
    """Whether TensorFlow uses a GPU in this process."""
    return bool(tf.config.list_logical_devices("GPU"))


def wait() -> None:
    """Waits until all that was called is computed: on a GPU, kernels are only enqueued. In eager mode only."""
    if has_gpu():
        tf.test.experimental.sync_devices()
