"""Keras callbacks: `hvdc.callbacks`.

Horovod's four callbacks with the same names and arguments, which also work on Keras 3, and three of this package:

- `BroadcastGlobalVariablesCallback`: gives every rank the same initial model and optimizer.
- `MetricAverageCallback`: averages the epoch's metrics over the ranks.
- `LearningRateScheduleCallback`, `LearningRateWarmupCallback`: change the learning rate during training.
- `CompressionGuard`: compresses less while training is in trouble.
- `CompressionMonitor`: records what each exchange takes, sends and loses.
- `ResidualCheckpoint`: saves and restores the residuals of error feedback.
"""

from .frontends.keras.callbacks import BroadcastGlobalVariablesCallback, MetricAverageCallback
from .frontends.keras.compression_guard import CompressionGuard
from .frontends.keras.compression_monitor import CompressionMonitor
from .frontends.keras.learning_rate import LearningRateScheduleCallback, LearningRateWarmupCallback
from .frontends.residual_checkpoint import ResidualCheckpoint

__all__ = [
    "BroadcastGlobalVariablesCallback",
    "CompressionGuard",
    "CompressionMonitor",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
    "ResidualCheckpoint",
]
