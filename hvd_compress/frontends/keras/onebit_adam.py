"""`hvdc.optimizers.OneBitAdam`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from ...common import checks
from ...compressors.onebit import OneBitLater
from ...engine import layout as geometry
from ...engine.settings import MIN_COMPRESS_SIZE, Settings, resolve_bucket_bytes
from ...formats.quantize import SIGN_BLOCK
from .distribution import Distribution, OptimizerSettings
from .keras3 import Keras3Mixin, mixin_for
from .optimizer_state import tf_variable

try:
    import keras
except ImportError:  # only tf_keras
    keras = None
_IS_KERAS3 = keras is not None and hasattr(keras.optimizers.Optimizer, "stateless_apply")
_BASE: Any = keras.optimizers.Optimizer if _IS_KERAS3 else object

# The variance is stable when its norm d = 1 / (1 - beta_2) steps ago, for which v remembers, was at least this share of
# what it is now, and the other way round. That the norm settles is what Tang et al. 2021 saw (section 3.3, figure 2:
# BERT-Large); the share and d are a choice of this package.
STABLE = 0.96
# Of the mean root of the variances in a block: with less, one bit's magnitude would make steps that are too large. (The
# digits of `benchmarks/accuracy.py` have 37% of such elements, and without this rule training diverges.)
SMALL = 0.1
# What would act on averaged gradients, and would get a momentum once the variance is frozen.
_REFUSED = {
    "clipnorm": None,
    "clipvalue": None,
    "global_clipnorm": None,
    "amsgrad": False,
}


class OneBitAdam(Keras3Mixin, _BASE):
    """Adam that sends one bit per value: 1-bit Adam (Tang et al. 2021, arXiv 2102.02888, Algorithm 1).

    A distributed optimizer by itself: `model.compile(hvdc.optimizers.OneBitAdam(1e-3), ...)`, without
    `hvdc.DistributedOptimizer` around it.

    1. At first it is Keras's Adam on the averaged gradients, which cross uncompressed.
    2. After `freeze_step` steps, or when the variance v has become stable, v stays as it is. From then on each rank
       sends its momentum, beta_1 * m + (1 - beta_1) * its own gradient, as `onebit` does: signs, and a magnitude per
       block of 1024. What that loses is kept in a residual and added the next time, on the rank that sends and, from
       three ranks on where it pays, on the one that sums. What is decoded is the new m of all ranks, and
       w -= learning_rate * m / (sqrt(v) + epsilon).

    Adam's bias correction stays in both phases, that of v as of the step in which it was frozen, so that nothing jumps
    there. (The paper leaves it out, which is the same once beta_2 ** step is small.)

    Stable: the norm ||v||_1 (bias corrected) is looked at every 1 / (1 - beta_2) steps, 1000 by default; when the
    smaller of two successive ones is at least 0.96 of the larger one, v is frozen. So it is after 2000 steps at the
    soonest; a learning rate that is still warmed up then calls for a `freeze_step`. That the norm settles is the
    paper's observation (section 3.3), the rule is this package's. DeepSpeed, whose argument `freeze_step` is, names 15
    to 25% of all steps as one strategy.

    One bit cannot say zero, or little: an element gets the magnitude of its block, which divided by a much smaller
    sqrt(v) would be a huge step. So elements of compressed tensors whose sqrt(v) is below a tenth of the mean over
    their block of 1024 when v is frozen (of units that are mostly off, say) are left alone from then on, and of all
    tensors those that never had a gradient; their v and m become 0. DeepSpeed asks its users for masks of these.

    Needs Keras 3. Under mixed_float16, `compile` puts a LossScaleOptimizer around it, as usual.
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        weight_decay: float | None = None,
        use_ema: bool = False,
        ema_momentum: float = 0.99,
        ema_overwrite_frequency: int | None = None,
        loss_scale_factor: float | None = None,
        gradient_accumulation_steps: int | None = None,
        name: str | None = None,
        *,
        freeze_step: int | None = None,
        process_set: Any = hvd.global_process_set,
        min_compress_size: int = MIN_COMPRESS_SIZE,
        bucket_bytes: int | None = None,
        residual_dtype: str = "float32",
        on_nonfinite: str = "propagate",
        **kwargs: Any,
    ) -> None:
        """Create the optimizer.

        Args:
            learning_rate: As of keras.optimizers.Adam, here and below.
            beta_1: From 0 to below 1.
            beta_2: From 0 to below 1.
            epsilon: From 0 on.
            weight_decay: Decoupled, as of keras.optimizers.AdamW.
            use_ema: As Keras's.
            ema_momentum: As Keras's.
            ema_overwrite_frequency: As Keras's.
            loss_scale_factor: As Keras's.
            gradient_accumulation_steps: As Keras's: only accumulated gradients are exchanged.
            name: Of the optimizer.
            freeze_step: After how many steps the variance is frozen; None when it is stable.
            process_set: Of the ranks that train together.
            min_compress_size: As of `hvdc.DistributedOptimizer`, here and below.
            bucket_bytes: See there.
            residual_dtype: See there.
            on_nonfinite: See there.
            **kwargs: Refused.

        Raises:
            ValueError: An argument is not valid, or means nothing where momentum is exchanged: clipnorm, clipvalue,
                global_clipnorm, amsgrad.
            TypeError: An argument is of a wrong type.
            RuntimeError: There is no Keras 3.
        """
        if not _IS_KERAS3:
            raise RuntimeError(
                "OneBitAdam is a Keras 3 optimizer, and there is none: install TensorFlow 2.16 or later with keras 3, "
                "or use hvdc.DistributedOptimizer(Adam(...), compression='onebit')"
            )
        for argument, nothing in _REFUSED.items():
            if kwargs.pop(argument, nothing) != nothing:
                raise ValueError(
                    f"OneBitAdam: {argument} means nothing once the variance is frozen and momentum takes the place of "
                    f"gradients: leave it out, or use hvdc.DistributedOptimizer(Adam({argument}=...)), compressed"
                )
        mixin_for(
            self
        )  # TensorFlow as the backend; a LossScaleOptimizer around this one is told to reduce first
        if on_nonfinite == "skip" and gradient_accumulation_steps:
            raise ValueError(
                "OneBitAdam: on_nonfinite='skip' cannot leave out a part of gradient_accumulation_steps: use only one"
            )
        super().__init__(
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            use_ema=use_ema,
            ema_momentum=ema_momentum,
            ema_overwrite_frequency=ema_overwrite_frequency,
            loss_scale_factor=loss_scale_factor,
            gradient_accumulation_steps=gradient_accumulation_steps,
            name=name,
            **kwargs,
        )
        self.beta_1, self.beta_2 = (_share(n, b) for n, b in (("beta_1", beta_1), ("beta_2", beta_2)))
        self.epsilon = checks.number("epsilon", epsilon, 0.0)
        self.freeze_step = None if freeze_step is None else checks.integer("freeze_step", freeze_step, 1)
        reduction = Settings(
            compressor=OneBitLater(),
            name="OneBitAdam",
            process_set=process_set,
            sparse_as_dense=True,
            scale_local_gradients=False,
            min_compress_size=min_compress_size,
            bucket_bytes=resolve_bucket_bytes(bucket_bytes),
            residual_dtype=residual_dtype,
            on_nonfinite=on_nonfinite,
        )
        # Past Keras's __setattr__, which would track, and then save and broadcast, what is in it.
        self.__dict__["_hvdc_distribution"] = _MomentumDistribution(
            OptimizerSettings(reduction, 1, False), self
        )

    def build(self, variables: Sequence[Any]) -> None:
        """Creates momentum and variance of `variables`, and what is known of when the variance was frozen."""
        if self.built:
            return
        super().build(variables)
        self._momentums, self._velocities = self.add_optimizer_variables(variables, ["momentum", "velocity"])
        self._frozen_at = self.add_variable(shape=(), dtype="int", name="frozen_at")  # 0: not yet
        self._norm = self.add_variable(shape=(), dtype="float32", name="variance_norm")  # when last looked at

    @property
    def frozen_at(self) -> int:
        """The step after which the variance stayed as it was; 0 while it still changes."""
        # What Keras makes while it traces the first step has no value before that runs.
        has_value = self.built and tf_variable(self._frozen_at).is_initialized()
        return int(self._frozen_at.numpy()) if has_value else 0

    def is_frozen(self) -> tf.Tensor:
        """Whether momentum is exchanged in this step; a bool scalar, the same on all ranks."""
        return tf.convert_to_tensor(self._frozen_at) > 0

    def momentum_of(self, variable: Any) -> tf.Tensor:
        """The momentum after the last step."""
        return tf.convert_to_tensor(self._momentums[self._get_variable_index(variable)])

    def update_step(self, gradient: tf.Tensor, variable: Any, learning_rate: Any) -> None:
        """One step of Adam with the averaged gradient, or with the momentum that takes its place."""
        index = self._get_variable_index(variable)
        m, v = self._momentums[index], self._velocities[index]
        dtype = tf.as_dtype(variable.dtype)
        gradient, frozen = tf.cast(gradient, dtype), self.is_frozen()
        old_m, old_v = tf.convert_to_tensor(m), tf.convert_to_tensor(v)
        sent = tf.where(old_v > 0.0, gradient, 0.0)
        new_m = tf.where(frozen, sent, old_m + (gradient - old_m) * (1.0 - self.beta_1))
        new_v = tf.where(frozen, old_v, old_v + (tf.square(gradient) - old_v) * (1.0 - self.beta_2))
        self.assign(m, new_m)
        self.assign(v, new_v)
        step = tf.cast(tf.convert_to_tensor(self.iterations) + 1, dtype)
        until = tf.where(frozen, tf.cast(tf.convert_to_tensor(self._frozen_at), dtype), step)
        alpha = tf.cast(learning_rate, dtype) * tf.sqrt(1.0 - self.beta_2**until) / (1.0 - self.beta_1**step)
        self.assign_sub(variable, new_m * alpha / (tf.sqrt(new_v) + self.epsilon))

    def _backend_update_step(
        self, grads: Sequence[Any], trainable_variables: Sequence[Any], learning_rate: Any
    ) -> None:
        super()._backend_update_step(grads, trainable_variables, learning_rate)
        self._freeze_if_due()

    def _freeze_if_due(self) -> None:
        """Behind a step's update: whether it was the last one that changed the variance."""
        step = tf.convert_to_tensor(self.iterations) + 1
        free = ~self.is_frozen()
        if self.freeze_step is not None:
            due = free & (step >= self.freeze_step)
        else:
            due = free & (step % max(1, round(1.0 / (1.0 - self.beta_2))) == 0)
        tf.cond(due, lambda: self._freeze(step), lambda: tf.constant(False))

    def _freeze(self, step: tf.Tensor) -> tf.Tensor:
        stable = tf.constant(True) if self.freeze_step is not None else self._is_stable(step)
        self.assign(self._frozen_at, tf.where(stable, step, 0))
        self.leave_small_alone(stable)

        def say() -> tf.Tensor:
            text = "hvd_compress: OneBitAdam freezes the variance after step"
            tf.print(
                text, step, "and sends the momentum, one bit per value, from now on", output_stream=sys.stderr
            )
            return tf.constant(True)

        # Traced by all ranks, though only one prints: their graphs should be the same.
        return tf.cond(stable & (hvd.rank() == 0), say, lambda: tf.constant(False))

    def leave_small_alone(self, frozen: tf.Tensor) -> None:
        """Where momentum is compressed, sets variances to 0 that are too small for one bit; again changes nothing.

        Args:
            frozen: Whether the variance is; a bool scalar, the same on all ranks.
        """
        settings = self._hvdc.settings
        if not settings.process_set.included() or settings.process_set.size() == 1:
            return
        for v in self._velocities:
            if geometry.is_compressed(tuple(v.shape), settings.min_compress_size):
                old = tf.convert_to_tensor(v)
                self.assign(v, tf.where(frozen, without_small(old), old))

    def _is_stable(self, step: tf.Tensor) -> tf.Tensor:
        """Whether the variance's norm is what it was when last looked at; a bool scalar, the same on all ranks."""
        group = self._hvdc.settings.process_set
        norm = tf.add_n(
            [tf.cast(tf.reduce_sum(tf.convert_to_tensor(v)), tf.float32) for v in self._velocities]
        )
        norm /= 1.0 - self.beta_2 ** tf.cast(step, tf.float32)
        if group.included() and group.size() > 1:
            # Processors may round sums differently, and a rank that freezes alone waits for ever.
            name = f"{self._hvdc.reducer.name}_variance"
            norm = hvd.allreduce(norm, op=hvd.Average, name=name, process_set=group, ignore_name_scope=True)
        before = tf.convert_to_tensor(self._norm)
        self.assign(self._norm, norm)
        return tf.minimum(norm, before) >= STABLE * tf.maximum(norm, before)

    def get_config(self) -> dict[str, Any]:
        """What makes it again, but for the process set, which is a run's own."""
        settings = self._hvdc.settings
        own = {
            "beta_1": self.beta_1,
            "beta_2": self.beta_2,
            "epsilon": self.epsilon,
            "freeze_step": self.freeze_step,
            "min_compress_size": settings.min_compress_size,
            "bucket_bytes": settings.bucket_bytes,
            "residual_dtype": settings.residual_dtype,
            "on_nonfinite": settings.on_nonfinite,
        }
        config: dict[str, Any] = {**super().get_config(), **own}
        return config


class _MomentumDistribution(Distribution):
    """Reduces gradients, and once the variance is frozen the momentum that they become."""

    def __init__(self, settings: OptimizerSettings, optimizer: OneBitAdam) -> None:
        super().__init__(settings)
        self._optimizer = optimizer

    def reduce(
        self, gradients: Sequence[Any], variables: Sequence[Any], so_far: tf.Tensor | None = None
    ) -> list[Any]:
        """The averaged gradients, or the momentum that all ranks have from now on."""
        del so_far
        if not self.reducer.plans:
            # It may have been frozen on one rank, which loses nothing: before a restart on more, or an elastic reset.
            with tf.init_scope():
                if self._optimizer.frozen_at:
                    self._optimizer.leave_small_alone(tf.constant(True))
        frozen, beta = self._optimizer.is_frozen(), self._optimizer.beta_1
        # Factors, not a choice between tensors: an element of the gradient itself is times 1.
        kept, new = tf.where(frozen, beta, 0.0), tf.where(frozen, 1.0 - beta, 1.0)
        sent: list[Any] = []
        for gradient, variable in zip(gradients, variables):
            if gradient is None:
                sent.append(None)
                continue
            momentum = self._optimizer.momentum_of(variable)
            gradient = tf.cast(tf.convert_to_tensor(gradient), momentum.dtype)
            sent.append(tf.cast(kept, momentum.dtype) * momentum + tf.cast(new, momentum.dtype) * gradient)
        return super().reduce(sent, variables, tf.cast(frozen, tf.float64))


def without_small(v: tf.Tensor) -> tf.Tensor:
    """A variance, of any shape, with 0 where its root is below a tenth of the mean root over its block of 1024."""
    n = v.shape.num_elements()
    rows = -(-n // SIGN_BLOCK)
    roots = tf.reshape(tf.pad(tf.sqrt(tf.reshape(v, [-1])), [[0, rows * SIGN_BLOCK - n]]), [rows, SIGN_BLOCK])
    elements = tf.minimum(float(SIGN_BLOCK), float(n) - SIGN_BLOCK * tf.range(rows, dtype=tf.float32))[
        :, None
    ]
    mean = tf.reduce_sum(roots, 1, keepdims=True) / tf.cast(elements, v.dtype)
    small = tf.reshape(roots < SMALL * mean, [-1])[:n]
    return tf.where(tf.reshape(small, v.shape), tf.zeros_like(v), v)


def _share(name: str, value: Any) -> float:
    number = checks.number(name, value, 0.0, 1.0)
    if number == 1.0:
        raise ValueError(f"{name} must be below 1, got 1.0")
    return number


if _IS_KERAS3:
    OneBitAdam = keras.saving.register_keras_serializable("hvd_compress")(OneBitAdam)  # type: ignore[misc]
