"""`tf.config.experimental.enable_op_determinism()`."""

from __future__ import annotations

from tensorflow.python.framework import config  # TensorFlow has no public function that tells


def is_enabled() -> bool:
    """Whether it was called. Operations that cannot be deterministic then raise an error."""
    return bool(config.is_op_determinism_enabled())
