"""Deep Gradient Compression."""

from __future__ import annotations

import dataclasses
import math

import tensorflow as tf

from .. import formats
from .base import MomentumSettings
from .sparse import TopK

# Sums of 1 / steps_per_epoch fall short of whole epochs by much less, and a step is much longer.
_ROUNDING = 1e-9


@dataclasses.dataclass(frozen=True)
class DGC(formats.DGC, TopK):
    """Deep Gradient Compression (Lin et al. 2018, arXiv 1712.01887): `topk` with momentum, clipping and a warm-up.

    For an optimizer without momentum of its own, such as `keras.optimizers.SGD(learning_rate)`: what it would do to
    averaged gradients is done to each rank's own, before the choice of what is sent. In each step, with gradient g:

    1. Local gradient clipping (section 3.2): g is scaled down so that the norm of all of the rank's gradients is at
       most `clipnorm` * sqrt(N) where gradients are averaged (and `clipnorm` / sqrt(N) where they are summed), N the
       number of ranks: that of the mean is then at most `clipnorm` if the ranks' gradients are independent.
    2. Momentum correction (equation 4): u = momentum * u + g; v = v + u.
    3. The k = max(1, ceil(ratio * n)) elements of v of largest magnitude are sent, exactly.
    4. Momentum factor masking (section 3.2): u and v are cleared where they were sent.

    What is not compressed (small tensors, bias) gets the same momentum after the exchange, u = momentum * u + mean(g);
    IndexedSlices do not (`sparse_as_dense=True` compresses them).

    Warm-up (section 3.3): in the first epoch 25% is sent, then 6.25%, 1.56%, 0.39%, and so on down to `ratio`: four
    epochs with 0.1%. Keras's epochs are told by `hvdc.callbacks.BroadcastGlobalVariablesCallback` (or
    `hvdc.elastic.UpdateEpochStateCallback`); in a loop of your own, say how many `steps_per_epoch` there are.
    `bytes_sent()`, `compression_report()` and `CompressionMonitor` tell what holds; `wire_bytes` is that of `ratio`.

    Wire size and error: as `topk`.

    Attributes:
        ratio: The share that is kept after the warm-up, above 0 and at most 1.
        momentum: The momentum factor, from 0 to below 1. 0 leaves momentum to the optimizer.
        clipnorm: The norm to clip at, as of the gradients of all ranks together; None does not clip.
        warmup_epochs: How long the warm-up lasts altogether. None: an epoch for each density. 0: no warm-up.
        steps_per_epoch: Steps of the optimizer per epoch on each rank. None: epochs are Keras's.
    """

    @property
    def momentum_settings(self) -> MomentumSettings:
        """The momentum, the norm to clip at, and the steps per epoch."""
        return MomentumSettings(self.momentum, self.clipnorm, self.steps_per_epoch)

    def stateless(self) -> TopK:
        """`topk`: momentum needs state."""
        return TopK(self.ratio)

    def local_limit(self, ranks: int, averaged: bool) -> float:
        """The norm that a rank's own gradients may have; `clipnorm` must be set.

        The paper's local gradients are parts of the sum, ours of the mean: hence the factor of `ranks`.
        """
        assert self.clipnorm is not None
        return self.clipnorm / math.sqrt(ranks) * (ranks if averaged else 1)

    def stage_at(self, progress: tf.Tensor) -> tf.Tensor:
        """Which of `stages` holds after so many epochs; int32 scalar."""
        last = len(self.stages) - 1
        if not last:
            return tf.constant(0)
        done = tf.floor(progress / self.epochs_per_stage + _ROUNDING)
        return tf.cast(tf.minimum(done, float(last)), tf.int32)
