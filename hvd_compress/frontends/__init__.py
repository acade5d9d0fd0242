"""What training scripts call: optimizer, tape, callbacks, `allreduce`, residual checkpoints, elastic training."""

from ..common import requirements as requirements  # raises a clear error if TensorFlow or Horovod is missing
