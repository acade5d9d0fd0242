"""Whether there is a GPU, waiting for it, and how many threads TensorFlow has."""

from __future__ import annotations

import os

import tensorflow as tf


def has_gpu() -> bool:
    """Whether TensorFlow uses a GPU in this process."""
    return bool(tf.config.list_logical_devices("GPU"))


def wait() -> None:
    """Waits until GPUs have computed everything that was started. Call it in eager mode."""
    if has_gpu():
        tf.test.experimental.sync_devices()


def intra_op_threads() -> int:
    """How many threads an operation has on the CPU."""
    return _threads(tf.config.threading.get_intra_op_parallelism_threads(), "TF_NUM_INTRAOP_THREADS")


def inter_op_threads() -> int:
    """How many operations run at the same time on the CPU."""
    return _threads(tf.config.threading.get_inter_op_parallelism_threads(), "TF_NUM_INTEROP_THREADS")


def _threads(configured: int, variable: str) -> int:
    """As TensorFlow decides: what is configured, the environment variable, or a thread for each core."""
    wanted = os.environ.get(variable, "")
    return configured or (int(wanted) if wanted.isdecimal() else 0) or len(os.sched_getaffinity(0))
