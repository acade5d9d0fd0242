"""Elastic training: `hvdc.elastic`, in place of `horovod.tensorflow.keras.elastic`, which fails on Keras 3.

- `run`: decorates the training function.
- `KerasState`: the state of an elastic job, which includes the residuals of error feedback.
- `CommitStateCallback`, `UpdateBatchStateCallback`, `UpdateEpochStateCallback`: keep the state current in `fit`.

Names and arguments are Horovod's. See docs/elastic.md.
"""

from .frontends.elastic.callbacks import CommitStateCallback, UpdateBatchStateCallback, UpdateEpochStateCallback
from .frontends.elastic.failures import run
from .frontends.elastic.state import KerasState

__all__ = ["CommitStateCallback", "KerasState", "UpdateBatchStateCallback", "UpdateEpochStateCallback", "run"]
