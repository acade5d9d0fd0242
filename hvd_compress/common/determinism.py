"""`tf.config.experimental.enable_op_determinism()`."""

from __future__ import annotations

from tensorflow.python.framework import config  # TensorFlow has no public function that tells


def is_enabled() -> bool:
    """Whether it was called: then the same program gives the same results, and operations refuse that cannot."""
    return bool(config.is_op_determinism_enabled())
