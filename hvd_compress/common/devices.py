"""Whether there is a GPU, and waiting for it."""

from __future__ import annotations

import tensorflow as tf


def has_gpu() -> bool:
    """Whether TensorFlow uses a GPU in this process."""
    return bool(tf.config.list_logical_devices("GPU"))


def wait() -> None:
    """Waits until GPUs have computed everything that was started. Call it in eager mode."""
    if has_gpu():
        tf.test.experimental.sync_devices()
