"""`hvdc.optimizers.OneBitAdam`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from ...common import checks
from ...common.verbosity import shows
from ...compressors.onebit import OneBitLater
from ...engine import layout
from ...engine.settings import MIN_COMPRESS_SIZE, Settings
from ..environment import resolve_bucket_bytes
from .distribution import Distribution
from .keras3 import Keras3Mixin, mixin_for
from .optimizer_state import tf_variable
from .overwritten import is_overwritten
from .variance import is_stable, without_small

try:
    import keras
except ImportError:  # only tf_keras
    keras = None
_IS_KERAS3 = keras is not None and hasattr(keras.optimizers.Optimizer, "stateless_apply")
_BASE: Any = keras.optimizers.Optimizer if _IS_KERAS3 else object

# Arguments of Keras's Adam that act on averaged gradients, with their defaults. There are no averaged gradients
# once the variance is frozen.
_REFUSED = {"clipnorm": None, "clipvalue": None, "global_clipnorm": None, "amsgrad": False}


class _MomentumDistribution(Distribution):
    """Reduces gradients at first, and momentum once the variance is frozen."""

    def __init__(self, settings: Settings, optimizer: Any) -> None:
        super().__init__(settings, optimizer)
        self._optimizer = optimizer  # a OneBitAdam

    def accumulate_instead(self, passes: int) -> str:
        """It has no `backward_passes_per_step`."""
        return "leave it out, or use mixed_bfloat16, which needs no loss scale"

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any], so_far: tf.Tensor | None = None) -> list[Any]:
        """Returns the averaged gradients, or the new momentum of all ranks once the variance is frozen."""
        del so_far
        if not self.reducer.plans:
            # The variance may have been frozen by a single rank, which keeps small elements: before a restart on more
            # ranks, or before an elastic reset.
            with tf.init_scope():
                if self._optimizer.frozen_at:
                    self._optimizer.zero_small_variances(tf.constant(True))
        frozen, beta = self._optimizer.is_frozen(), self._optimizer.beta_1
        # Factors, not a choice between tensors: before, the gradient is multiplied by 1 and does not change.
        old_factor, new_factor = tf.where(frozen, beta, 0.0), tf.where(frozen, 1.0 - beta, 1.0)
        inputs = []
        for gradient, variable in zip(gradients, variables):
            if gradient is not None and not is_overwritten(variable):
                m = self._optimizer.momentum_of(variable)
                gradient = tf.cast(tf.convert_to_tensor(gradient), m.dtype)
                gradient = tf.cast(old_factor, m.dtype) * m + tf.cast(new_factor, m.dtype) * gradient
            inputs.append(gradient)
        return super().reduce(inputs, variables, tf.cast(frozen, tf.float64))


class OneBitAdam(Keras3Mixin, _BASE):
    """1-bit Adam: Adam that sends one bit per value (Tang et al. 2021, arXiv 2102.02888, Algorithm 1).

    This optimizer is distributed by itself: do not wrap it in `hvdc.DistributedOptimizer`. It needs Keras 3. Under
    mixed_float16, `compile` wraps it in a LossScaleOptimizer as usual.

    Example:
        model.compile(hvdc.optimizers.OneBitAdam(1e-3), loss="mse", jit_compile=False)

    It trains in two phases:

    1. Warm-up: Keras's Adam on averaged gradients, which are exchanged uncompressed.
    2. Compression: after `freeze_step` steps, or when the variance v is stable, v no longer changes. Each rank then
       compresses its momentum, beta_1 * m + (1 - beta_1) * gradient, as the compressor `onebit` does: to signs, and
       one magnitude per block of 1024 elements. Error feedback keeps what is lost in a residual: on the rank
       that sends and, if three or more ranks exchange by scatter-reduce, on the rank that sums. The average of
       the decoded momentums is the new m on all ranks, and w -= learning_rate * m / (sqrt(v) + epsilon).

    Bias correction applies in both phases; that of v keeps its value from the step in which v was frozen, so the update
    does not jump there. (The paper omits bias correction, which makes no difference once beta_2 ** step is small.)

    The variance is stable if its bias-corrected norm ||v||_1 changes by at most 4% (the smaller norm is at least
    0.96 of the larger) between two checks. Checks are made every 1 / (1 - beta_2) steps, 1000 by default, so v is
    frozen after 2000 steps at the earliest. Set `freeze_step` if the learning rate is still warming up then. The
    paper observes that the norm settles (section 3.3); this rule is a choice of this package. `freeze_step` is
    named as in DeepSpeed, which suggests 15 to 25% of all steps.

    One bit cannot represent zero or a small value: an element gets the magnitude of its block, and divided by a much
    smaller sqrt(v) the step would be huge. So when v is frozen, v and m become 0, and the variable is no longer
    updated, for two kinds of elements: those of compressed tensors whose sqrt(v) is below a tenth of the mean
    over their block of 1024 (of units that are mostly inactive, for example), and those of all tensors that
    never had a gradient. DeepSpeed asks its users for masks of such elements.

    Args:
        learning_rate: A float or a learning rate schedule, as in `keras.optimizers.Adam`.
        beta_1: Decay rate of the momentum m, from 0 to below 1.
        beta_2: Decay rate of the variance v, from 0 to below 1.
        epsilon: Added to sqrt(v), at least 0.
        weight_decay: Decoupled weight decay, as in `keras.optimizers.AdamW`. None for none.
        freeze_step: The number of steps after which the variance is frozen. None freezes it when it is stable.
        process_set: The Horovod process set whose ranks train together.
        min_compress_size: As in `hvdc.DistributedOptimizer`.
        bucket_bytes: As in `hvdc.DistributedOptimizer`.
        residual_dtype: As in `hvdc.DistributedOptimizer`.
        on_nonfinite: As in `hvdc.DistributedOptimizer`.
        **kwargs: Other arguments of Keras's optimizers: `name`, `use_ema`, `ema_momentum`, `ema_overwrite_frequency`,
            `loss_scale_factor` and `gradient_accumulation_steps` (only accumulated gradients are exchanged; not with
            a LossScaleOptimizer).

    Raises:
        ValueError: An argument is not valid, or has no meaning for momentum: `clipnorm`, `clipvalue`,
            `global_clipnorm`, `amsgrad`.
        TypeError: An argument is of a wrong type, or Keras runs on another backend than TensorFlow.
        RuntimeError: Keras 3 is not installed.
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        weight_decay: float | None = None,
        *,
        freeze_step: int | None = None,
        process_set: Any = hvd.global_process_set,
        min_compress_size: int = MIN_COMPRESS_SIZE,
        bucket_bytes: int | None = None,
        residual_dtype: str = "float32",
        on_nonfinite: str = "propagate",
        **kwargs: Any,
    ) -> None:
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
        mixin_for(self)  # checks the backend, and prepares LossScaleOptimizer
        if on_nonfinite == "skip" and kwargs.get("gradient_accumulation_steps"):
            raise ValueError(
                "OneBitAdam: on_nonfinite='skip' cannot leave out a part of gradient_accumulation_steps: use only one"
            )
        super().__init__(learning_rate=learning_rate, weight_decay=weight_decay, **kwargs)
        self.beta_1, self.beta_2 = _decay_rate("beta_1", beta_1), _decay_rate("beta_2", beta_2)
        self.epsilon = checks.number("epsilon", epsilon, 0.0)
        self.freeze_step = None if freeze_step is None else checks.integer("freeze_step", freeze_step, 1)
        settings = Settings(
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
        # Written into __dict__: see `DistributedMixin`.
        self.__dict__["_hvdc_distribution"] = _MomentumDistribution(settings, self)

    def build(self, variables: Sequence[Any]) -> None:
        """Creates momentum, variance and the state of freezing for `variables`."""
        if self.built:
            return
        super().build(variables)
        self._momentums, self._velocities = self.add_optimizer_variables(variables, ["momentum", "velocity"])
        self._frozen_at = self.add_variable(shape=(), dtype="int", name="frozen_at")  # 0: not frozen
        self._norm = self.add_variable(shape=(), dtype="float32", name="variance_norm")  # at the last check

    @property
    def frozen_at(self) -> int:
        """The step in which the variance was frozen, or 0 while it still changes; an int."""
        # A variable that Keras creates while it traces the first step has no value until that runs.
        has_value = self.built and tf_variable(self._frozen_at).is_initialized()
        return int(self._frozen_at.numpy()) if has_value else 0

    def is_frozen(self) -> tf.Tensor:
        """Whether the variance is frozen, and this step exchanges momentum; a bool scalar, the same on all ranks."""
        return tf.convert_to_tensor(self._frozen_at) > 0

    def momentum_of(self, variable: Any) -> tf.Tensor:
        """The momentum of `variable` after the last step, in its shape."""
        return tf.convert_to_tensor(self._momentums[self._get_variable_index(variable)])

    def update_step(self, gradient: tf.Tensor, variable: Any, learning_rate: Any) -> None:
        """Updates `variable`. Its `gradient` is averaged; once the variance is frozen, it is the new momentum."""
        index = self._get_variable_index(variable)
        m, v = self._momentums[index], self._velocities[index]
        dtype = tf.as_dtype(variable.dtype)
        gradient, frozen = tf.cast(gradient, dtype), self.is_frozen()
        old_m, old_v = tf.convert_to_tensor(m), tf.convert_to_tensor(v)
        exchanged_m = tf.where(old_v > 0.0, gradient, 0.0)
        new_m = tf.where(frozen, exchanged_m, old_m + (gradient - old_m) * (1.0 - self.beta_1))
        new_v = tf.where(frozen, old_v, old_v + (tf.square(gradient) - old_v) * (1.0 - self.beta_2))
        self.assign(m, new_m)
        self.assign(v, new_v)
        step = tf.cast(tf.convert_to_tensor(self.iterations) + 1, dtype)
        v_step = tf.where(frozen, tf.cast(tf.convert_to_tensor(self._frozen_at), dtype), step)
        alpha = tf.cast(learning_rate, dtype) * tf.sqrt(1.0 - self.beta_2**v_step) / (1.0 - self.beta_1**step)
        self.assign_sub(variable, new_m * alpha / (tf.sqrt(new_v) + self.epsilon))

    def _backend_update_step(
        self, grads: Sequence[Any], trainable_variables: Sequence[Any], learning_rate: Any
    ) -> None:
        super()._backend_update_step(grads, trainable_variables, learning_rate)
        step = tf.convert_to_tensor(self.iterations) + 1
        if self.freeze_step is not None:
            due = step >= self.freeze_step
        else:
            due = step % max(1, round(1.0 / (1.0 - self.beta_2))) == 0
        due = ~self.is_frozen() & due
        tf.cond(due, lambda: self._freeze(step), lambda: tf.constant(False))

    def _freeze(self, step: tf.Tensor) -> tf.Tensor:
        """Freezes the variance after the update of this step, if it is stable or `freeze_step` is given."""
        stable = tf.constant(True) if self.freeze_step is not None else self._is_stable(step)
        self.assign(self._frozen_at, tf.where(stable, step, 0))
        self.zero_small_variances(stable)

        def announce() -> tf.Tensor:
            tf.print(
                "hvd_compress: OneBitAdam freezes the variance after step",
                step,
                "and sends the momentum, one bit per value, from now on",
                output_stream=sys.stderr,
            )
            return tf.constant(True)

        # All ranks trace this, though only one prints, so that their graphs are the same.
        return tf.cond(stable & (hvd.rank() == 0 and shows("info")), announce, lambda: tf.constant(False))

    def zero_small_variances(self, frozen: tf.Tensor) -> None:
        """Sets small variances of compressed tensors to 0 if `frozen`, a bool scalar that is the same on all ranks.

        A second call changes nothing.
        """
        settings = self._hvdc.settings
        if not settings.process_set.included() or settings.process_set.size() == 1:
            return
        for v in self._variances:
            if layout.is_compressed(tuple(v.shape), settings.min_compress_size):
                old = tf.convert_to_tensor(v)
                self.assign(v, tf.where(frozen, without_small(old), old))

    @property
    def _variances(self) -> list[Any]:
        """Variables that Keras overwrites with their gradients have none."""
        return [v for v in self._velocities if v is not None]

    def _is_stable(self, step: tf.Tensor) -> tf.Tensor:
        """Whether the variance's norm is as at the last check; a bool scalar, the same on all ranks."""
        group = self._hvdc.settings.process_set
        norm = tf.add_n([tf.cast(tf.reduce_sum(tf.convert_to_tensor(v)), tf.float32) for v in self._variances])
        norm /= 1.0 - self.beta_2 ** tf.cast(step, tf.float32)
        if group.included() and group.size() > 1:
            # Processors may round sums differently. If only one rank froze the variance, it would wait for ever.
            name = f"{self._hvdc.reducer.name}_variance"
            norm = hvd.allreduce(norm, op=hvd.Average, name=name, process_set=group, ignore_name_scope=True)
        previous = tf.convert_to_tensor(self._norm)
        self.assign(self._norm, norm)
        return is_stable(norm, previous)

    def get_config(self) -> dict[str, Any]:
        """The arguments of the optimizer, except the process set, which belongs to a run."""
        config: dict[str, Any] = super().get_config()
        config |= {name: getattr(self, name) for name in ("beta_1", "beta_2", "epsilon", "freeze_step")}
        of_reduction = ("min_compress_size", "bucket_bytes", "residual_dtype", "on_nonfinite")
        return config | {name: getattr(self._hvdc.settings, name) for name in of_reduction}


def _decay_rate(name: str, value: Any) -> float:
    number = checks.number(name, value, 0.0, 1.0)
    if number == 1.0:
        raise ValueError(f"{name} must be below 1, got 1.0")
    return number


if _IS_KERAS3:
    OneBitAdam = keras.saving.register_keras_serializable("hvd_compress")(OneBitAdam)  # type: ignore[misc]
