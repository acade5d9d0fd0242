"""Deep Gradient Compression."""

from __future__ import annotations

import dataclasses
import math

import tensorflow as tf

from .. import formats
from .base import MomentumSettings
from .registry import register
from .sparse import TopK

# Sums of 1 / steps_per_epoch miss whole epochs by much less than this, and a step is much longer.
_ROUNDING = 1e-9


@register
@dataclasses.dataclass(frozen=True)
class DGC(formats.DGC, TopK):
    """Deep Gradient Compression (Lin et al. 2018, arXiv 1712.01887): `topk` with momentum, clipping and a warm-up.

    For an optimizer without momentum, such as `keras.optimizers.SGD(learning_rate)`: momentum and clipping are applied
    to each rank's gradients before compression, not to averaged gradients. In each step, with gradient g:

    1. Local gradient clipping (section 3.2): g is scaled down so that the norm of all of the rank's gradients is at
       most `clipnorm` * sqrt(N) where gradients are averaged (and `clipnorm` / sqrt(N) where they are summed), N the
       number of ranks: that of the mean is then at most `clipnorm` if the ranks' gradients are independent.
    2. Momentum correction (equation 4): u = momentum * u + g; v = v + u.
    3. The k = max(1, ceil(ratio * n)) elements of v of largest magnitude are sent, exactly.
    4. Momentum factor masking (section 3.2): u and v are set to zero where they were sent.

    Gradients that are not compressed (small tensors, bias) get the same momentum after the exchange,
    u = momentum * u + mean(g). IndexedSlices get none (`sparse_as_dense=True` compresses them).

    Warm-up (section 3.3): in the first epoch 25% is sent, then 6.25%, 1.56%, 0.39%, and so on down to `ratio`: four
    epochs with 0.1%. `hvdc.callbacks.BroadcastGlobalVariablesCallback` (or
    `hvdc.elastic.UpdateEpochStateCallback`) reports Keras's epochs; in a custom training loop, set `steps_per_epoch`.
    `bytes_sent()`, `compression_report()` and `CompressionMonitor` report the current stage; `wire_bytes` uses `ratio`.

    Wire size and error: as `topk`.

    Attributes:
        ratio: The share of elements that is sent after the warm-up, above 0 and at most 1.
        momentum: The momentum factor, at least 0 and below 1. 0 leaves momentum to the optimizer.
        clipnorm: The norm to clip at, for the gradients of all ranks together; None does not clip.
        warmup_epochs: How many epochs the warm-up lasts. None: one for each density. 0: no warm-up.
        steps_per_epoch: Steps of the optimizer per epoch on each rank. None: Keras's epochs are used.
    """

    @property
    def momentum_settings(self) -> MomentumSettings:
        """The momentum, and the norm to clip at."""
        return MomentumSettings(self.momentum, self.clipnorm)

    def without_steps(self) -> DGC:
        """The same without the number of steps in an epoch."""
        return dataclasses.replace(self, steps_per_epoch=None)

    def stateless(self) -> TopK:
        """`topk`: momentum needs state."""
        return TopK(self.ratio)

    def local_limit(self, ranks: int, averaged: bool) -> float:
        """The largest norm of a rank's own gradients; `clipnorm` must be set.

        The paper clips terms of a sum. With `averaged` gradients we clip terms of a mean, hence the factor of `ranks`.
        """
        assert self.clipnorm is not None
        return self.clipnorm / math.sqrt(ranks) * (ranks if averaged else 1)

    def stage_at(self, progress: tf.Tensor) -> tf.Tensor:
        """The index in `stages` after `progress` epochs; int32 scalar."""
        last = len(self.stages) - 1
        if not last:
            return tf.constant(0)
        done = tf.floor(progress / self.epochs_per_stage + _ROUNDING)
        return tf.cast(tf.minimum(done, float(last)), tf.int32)
