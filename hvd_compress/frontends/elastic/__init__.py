"""Horovod's elastic training: `run`, a state that keeps residuals, and Keras callbacks.

Names and arguments are those of `horovod.tensorflow.keras.elastic`, which fails on Keras 3. See docs/elastic.md.
"""

from .callbacks import CommitStateCallback, UpdateBatchStateCallback, UpdateEpochStateCallback
from .failures import run
from .state import KerasState

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]
