"""`hvdc.DistributedOptimizer`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import horovod.tensorflow as hvd

from ...common import checks
from ...common.error_text import error_text
from ...compressors.resolve import CompressionLike, policies, resolve
from ...engine.compression_report import CompressionReport
from ...engine.settings import MIN_COMPRESS_SIZE, Settings, resolve_bucket_bytes
from .distribution import Distribution, OptimizerSettings
from .optimizer_state import innermost, own_momentum

_EXCLUDED = "_exclude_from_weight_decay"  # Keras's attributes begin with it


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: CompressionLike = None,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Any = hvd.Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = hvd.global_process_set,
    scale_local_gradients: bool = True,
    *,
    min_compress_size: int = MIN_COMPRESS_SIZE,
    bucket_bytes: int | None = None,
    error_feedback: bool | None = None,
    residual_decay: float = 1.0,
    residual_dtype: str = "float32",
    momentum_correction: float = 0.0,
    policy: Mapping[str, CompressionLike] | None = None,
    on_nonfinite: str = "propagate",
    hierarchical: bool | str = "auto",
) -> Any:
    """An optimizer that reduces gradients over all ranks before it applies them, compressed on the way.

    Takes every argument of `horovod.tensorflow.keras.DistributedOptimizer`, with the same meaning, and works
    on Keras 3, where Horovod's own does not average.

    Args:
        optimizer: A Keras optimizer: of Keras 3, of `tf_keras`, or `tf.keras.optimizers` of TensorFlow 2.15
            (legacy ones too). One that was built already (of a loaded model, say) keeps its state and becomes
            distributed itself, and so does one that cannot be made again from its configuration (with a learning rate
            schedule that has no `get_config`, say); otherwise a new one with the same configuration is returned.
        name: Prefix of the names of operations. Defaults to "Distributed" followed by the optimizer's class.
        device_dense: Device for dense tensors.
        device_sparse: Device for IndexedSlices.
        compression: A compressor of `hvdc.Compression`, one of your own (`hvdc.Compressor`), or a spec string such
            as "int8" or "hybrid:ratio=0.01,bits=4". None takes the environment variable `HVD_COMPRESS`, and where
            that is not set, does not compress.
        sparse_as_dense: Make IndexedSlices (of embeddings) dense, and compress them as such. Otherwise their rows
            cross, each compressed for itself, or the dense gradient in steps where that is less to send.
        gradient_predivide_factor: Splits the averaging: gradients are divided by it before the sum and
            multiplied by gradient_predivide_factor / size after it. Needs op Average.
        op: hvd.Average or hvd.Sum.
        backward_passes_per_step: Passes whose gradients are summed locally before one exchange and update.
        average_aggregated_gradients: Divide that sum by backward_passes_per_step.
        num_groups: Deprecated by Horovod; use `groups`.
        groups: A number of buckets, or a list of lists of variables that go into one bucket each. Overrides
            `bucket_bytes`.
        process_set: Gradients are reduced over its ranks only.
        scale_local_gradients: Divide the gradients of local variables (`register_local_var`) by the size.
        min_compress_size: Tensors of fewer elements, and all of fewer than two dimensions (bias, batch
            normalization), are reduced uncompressed. 0 compresses everything.
        bucket_bytes: Gradients are compressed and sent in buckets of up to this many bytes of float32. None takes the
            environment variable `HVD_COMPRESS_BUCKET_BYTES`, and where that is not set, 25 MiB.
        error_feedback: Keep what compression loses in a residual and add it to the next step's gradient. None
            does so where the compressor calls for it.
        residual_decay: Multiplies the residual each step, 0 to 1.
        residual_dtype: "float32", or "bfloat16" for half the memory; rounding then loses up to 2**-8 of what
            is kept.
        momentum_correction: The momentum factor of DGC (Lin et al. 2018), 0 for none. For sparse compressors, with
            an optimizer that has no momentum of its own.
        policy: Other compressors for some variables: glob patterns on their paths, such as
            `{"*embedding*": "none", "*/kernel": "int4"}`. The first that matches counts; see `hvdc.sensitivity`.
        on_nonfinite: What happens where a gradient of any rank is infinite or NaN. "propagate": the reduced
            gradients are not finite on any rank, as without this package. "skip": all ranks leave the step out;
            variables, the optimizer's state and `iterations` stay as they were. "raise": all ranks raise
            tf.errors.InvalidArgumentError. Residuals stay as they were in any case. A LossScaleOptimizer, in or around
            this one, decides by itself. Gradients of local variables do not count.
        hierarchical: Whether to sum gradients inside of each host first, uncompressed, and to exchange compressed sums
            between hosts. Needs `hvdc.init()` in place of `hvd.init()`, and several hosts of several workers each.
            "auto" does so where it is predicted to be faster; True for all compressors whose payloads cannot be summed.

    Returns:
        An optimizer of a subclass of the optimizer's class, of the same name, so that a model saved with it loads
        without this package. Besides, it has `register_local_var(variable)` as Horovod's, `bytes_sent()` and
        `compression_report()`.

    Raises:
        TypeError: `optimizer` is no Keras optimizer, or `compression` no compressor.
        ValueError: An argument is not valid.
    """
    if num_groups:
        warnings.warn(
            "Parameter `num_groups` has been replaced by `groups`", DeprecationWarning, stacklevel=2
        )
    base = type(optimizer)
    mixin = _mixin(optimizer)
    backward_passes_per_step = checks.integer("backward_passes_per_step", backward_passes_per_step, 0)
    if backward_passes_per_step == 0:
        raise ValueError("backward_passes_per_step must be > 0")
    average_aggregated_gradients = checks.flag("average_aggregated_gradients", average_aggregated_gradients)
    checks.text("name", name)
    if backward_passes_per_step > 1 and getattr(optimizer, "gradient_accumulation_steps", None):
        raise ValueError(
            "backward_passes_per_step and the optimizer's gradient_accumulation_steps do the same: set only one"
        )
    if on_nonfinite == "skip" and getattr(optimizer, "gradient_accumulation_steps", None):
        raise ValueError(
            "on_nonfinite='skip' cannot leave out a part of the optimizer's gradient_accumulation_steps: "
            "use backward_passes_per_step in its place"
        )
    reduction = Settings(
        compressor=resolve(compression),
        name=name or f"Distributed{base.__name__}",
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        process_set=process_set,
        groups=groups if groups is not None else num_groups or None,
        sparse_as_dense=sparse_as_dense,
        device_dense=device_dense,
        device_sparse=device_sparse,
        scale_local_gradients=scale_local_gradients,
        min_compress_size=min_compress_size,
        bucket_bytes=resolve_bucket_bytes(bucket_bytes),
        error_feedback=error_feedback,
        residual_decay=residual_decay,
        residual_dtype=residual_dtype,
        momentum_correction=momentum_correction,
        policy=policies(policy),
        on_nonfinite=on_nonfinite,
        hierarchical=hierarchical,
    )
    dgc = reduction.dgc
    own = own_momentum(optimizer) if dgc is not None and dgc.momentum else ""
    if dgc is not None and own:
        raise ValueError(
            f"{dgc.spec} brings momentum={dgc.momentum}, and {base.__name__} has its own, {own}: "
            "pass an optimizer without momentum, such as keras.optimizers.SGD(learning_rate), or dgc with momentum=0"
        )
    settings = OptimizerSettings(reduction, backward_passes_per_step, average_aggregated_gradients)
    # Same name and module as the original: Keras finds the original by them when it loads a saved model.
    members = {
        "_hvdc_settings": settings,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
    }
    cls: Any = type(base.__name__, (mixin, base), members)
    if getattr(optimizer, "built", getattr(optimizer, "_built", False)) or getattr(
        optimizer, "_weights", None
    ):
        # It has state, which its configuration leaves out: the object itself becomes distributed.
        optimizer.__class__ = cls
        return optimizer
    try:
        made = cls.from_config(optimizer.get_config())
    except (NotImplementedError, TypeError, ValueError):
        # A configuration that does not make it again, because of a learning rate schedule of the user's, say.
        optimizer.__class__ = cls
        return optimizer
    # What `exclude_from_weight_decay` has set is no part of the configuration.
    excluded = {key: value for key, value in vars(optimizer).items() if key.startswith(_EXCLUDED)}
    made.__dict__.update(excluded)
    return made


class DistributedMixin:
    """What Keras 2 and Keras 3 have in common."""

    _hvdc_settings: OptimizerSettings

    @property
    def _hvdc(self) -> Distribution:
        # Into __dict__ directly: Keras's __setattr__ would track, and then save and broadcast, what is in it.
        if "_hvdc_distribution" not in self.__dict__:
            self.__dict__["_hvdc_distribution"] = Distribution(self._hvdc_settings)
        distribution: Distribution = self.__dict__["_hvdc_distribution"]
        return distribution

    @property
    def _agg_helper(self) -> Any:
        """Horovod's name for the `backward_passes_per_step` helper; it has `counter`."""
        return self._hvdc.aggregation

    def register_local_var(self, var: Any) -> None:
        """Keeps the gradient of `var` local to this rank, as Horovod's."""
        self._hvdc.register_local_var(var)

    def bytes_sent(self) -> tuple[int, int]:
        """Bytes that each rank sends per step: as configured, and what stock Horovod would send.

        Rows of embeddings count as in the last step.

        Raises:
            RuntimeError: No step has been made yet.
        """
        return self._hvdc.reducer.bytes_sent()

    def compression_report(self) -> CompressionReport:
        """What each bucket is compressed with, and with `compression="auto"`: why, and how long it takes.

        Raises:
            RuntimeError: No step has been made yet.
        """
        return self._hvdc.reducer.report()


def _mixin(optimizer: Any) -> Any:
    """The adapter to the Keras that `optimizer` belongs to.

    Raises:
        TypeError: It is no Keras optimizer, or one of Keras 3 on another backend than TensorFlow.
    """
    inner = innermost(optimizer)  # of a LossScaleOptimizer, too
    if isinstance(inner, DistributedMixin):
        if not hasattr(inner, "_hvdc_settings"):  # made by no call of DistributedOptimizer
            raise TypeError(f"{type(inner).__name__} is distributed by itself: use it as it is, unwrapped")
        raise TypeError("optimizer is distributed already: wrap it only once")
    if checks.is_horovods(inner):
        raise TypeError(
            "optimizer is distributed by Horovod already: leave hvd.DistributedOptimizer out, "
            "hvdc.DistributedOptimizer takes its place"
        )
    if not isinstance(optimizer, type):
        if hasattr(optimizer, "stateless_apply"):
            from .keras3 import mixin_for

            return mixin_for(optimizer)
        if hasattr(optimizer, "apply_gradients") and hasattr(optimizer, "get_config"):
            from .keras2 import Keras2Mixin

            return Keras2Mixin
    raise TypeError(
        f"optimizer must be an instance of a Keras optimizer, got {error_text(optimizer)}: "
        "for example keras.optimizers.Adam(1e-3)"
    )
