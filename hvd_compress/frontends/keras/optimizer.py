"""`hvdc.DistributedOptimizer`."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import horovod.tensorflow as hvd

from ...common import checks
from ...common.error_text import error_text
from ...compressors.resolve import CompressionLike
from ...engine.settings import MIN_COMPRESS_SIZE
from ..shared import check_undistributed, settings_from
from .distribution import DistributedMixin
from .optimizer_state import innermost, is_adaptive, is_normalized, own_momentum

_EXCLUDED = "_exclude_from_weight_decay"  # the prefix of Keras's attributes


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
    delay: int = 0,
    delay_warmup: int = 0,
    local_steps: int | None = None,
    outer: Any = "average",
    fragments: str | None = None,
    alpha: float | None = None,
    local_warmup: int = 0,
) -> Any:
    """Wraps a Keras optimizer so that it averages gradients over all ranks, compressed, before it applies them.

    Takes every argument of `horovod.tensorflow.keras.DistributedOptimizer`, with the same meaning. It also works on
    Keras 3, where Horovod's own optimizer does not average.

    Example:
        opt = hvdc.DistributedOptimizer(keras.optimizers.Adam(1e-3), compression="int8")
        model.compile(optimizer=opt, loss="mse", jit_compile=False)

    Args:
        optimizer: An optimizer of Keras 3, of `tf_keras`, or of `tf.keras` in TensorFlow 2.15, legacy ones included. An
            optimizer that is already built (for example one of a loaded model) keeps its state and becomes distributed
            in place. So does an optimizer that its configuration cannot restore (for example because a learning rate
            schedule has no `get_config`). Otherwise a new optimizer with the same configuration is returned.
        name: Prefix of the names of operations. Defaults to "Distributed" followed by the optimizer's class name.
        device_dense: TensorFlow device on which dense tensors are reduced.
        device_sparse: TensorFlow device on which `tf.IndexedSlices` are reduced.
        compression: A compressor of `hvdc.Compression`, an instance of your own `hvdc.Compressor`, or a spec
            string such as "int8" or "hybrid:ratio=0.01,bits=4". None uses the environment variable `HVD_COMPRESS`,
            and does not compress if it is not set.
        sparse_as_dense: Whether to convert `tf.IndexedSlices` (gradients of embeddings) to dense tensors, and to
            compress them as such. If False, their rows are exchanged and each row is compressed by itself; in
            steps in which the dense gradient has fewer bytes, that is exchanged instead.
        gradient_predivide_factor: Splits the averaging: gradients are divided by this factor before the sum, and
            multiplied by gradient_predivide_factor / size after it. Needs `op=hvd.Average`.
        op: `hvd.Average` or `hvd.Sum`.
        backward_passes_per_step: Number of passes whose gradients are summed locally before they are exchanged and
            applied.
        average_aggregated_gradients: Whether to divide that local sum by `backward_passes_per_step`.
        num_groups: Deprecated by Horovod; use `groups`.
        groups: The number of buckets, or a list of lists of variables, one bucket for each list. Overrides
            `bucket_bytes`.
        process_set: The Horovod process set whose ranks train together.
        scale_local_gradients: Whether to divide the gradients of local variables (`register_local_var`) by the
            number of ranks.
        min_compress_size: Tensors with fewer elements than this are not compressed, nor are tensors with fewer than two
            dimensions (biases, batch normalization). 0 compresses all tensors.
        bucket_bytes: Size of a bucket in bytes of float32, at most: gradients are compressed and sent bucket by bucket.
            None uses the environment variable `HVD_COMPRESS_BUCKET_BYTES`, or 25 MiB if it is not set.
        error_feedback: Whether to keep what compression loses in a residual, and to add it to the next step's gradient.
            None leaves the choice to the compressor.
        residual_decay: Factor by which the residual is multiplied in each step, from 0 to 1.
        residual_dtype: "float32" or "bfloat16". bfloat16 halves the memory of residuals; its rounding loses up to 2**-8
            of each value.
        momentum_correction: Momentum factor of Deep Gradient Compression (Lin et al. 2018), from 0 to below 1; 0 turns
            it off. For sparse compressors, with an optimizer that has no momentum of its own.
        policy: Compressors for some of the variables, by glob patterns on variable paths, such as
            `{"*embedding*": "none", "*/kernel": "int4"}`. The first pattern that matches applies. `hvdc.sensitivity`
            suggests a policy.
        on_nonfinite: What to do if a gradient of any rank is infinite or NaN. "propagate": the reduced gradients
            are not finite on any rank, as without this package. "skip": all ranks skip the step; variables,
            optimizer state and `iterations` stay as they were. "raise": all ranks raise
            `tf.errors.InvalidArgumentError`. Residuals stay as they were in all three cases; with `delay=1`, only those
            of the rank with that gradient do. A LossScaleOptimizer, inside or around this optimizer, decides for
            itself. Gradients of local variables are not checked.
        hierarchical: Whether to sum gradients uncompressed within each host first, and to exchange the compressed sums
            between hosts. Needs `hvdc.init()` instead of `hvd.init()`, and several hosts with several ranks each.
            "auto" does so if it is predicted to be faster. True does so for all compressors whose payloads cannot be
            summed.
        delay: 0 or 1. With 1, each step applies the averaged gradients of the step before. They are exchanged beside
            the forward and backward pass, so that a step does not wait for the network. See docs/delay.md for its cost.
        delay_warmup: The number of steps without delay at the beginning of training.
        local_steps: The number of steps in a round, from 1 on. Each rank trains its own weights, and the ranks exchange
            the movements of their weights once per round, in place of gradients; see docs/local-steps.md. None
            exchanges gradients in each step.
        outer: The outer optimizer, which applies the mean movement of a round to the synchronized weights: "average",
            "nesterov:lr=0.7,momentum=0.9" (DiLoCo), or a Keras optimizer, of which only the configuration is used.
        fragments: "stream" divides the weights into `local_steps` fragments and exchanges one in each step, beside the
            step (Streaming DiLoCo). None exchanges all weights at the end of a round.
        alpha: With `fragments="stream"`, the share of the local weights in the weights that a rank continues with:
            alpha * local + (1 - alpha) * synchronized. From 0 (all ranks continue with the synchronized weights) to
            below 1. None is 0.5, the value of the paper.
        local_warmup: The number of steps at the beginning that are rounds by themselves, and are averaged, whatever
            `outer` is (post-local SGD, Lin et al. 2020).

    Returns:
        An optimizer whose class is a subclass of the optimizer's class and has the same name, so that a saved
        model loads without this package. It has four more methods: `register_local_var(variable)`, as Horovod's,
        `bytes_sent()`, `compression_report()` and, for local steps, `synchronize()`.

    Raises:
        TypeError: `optimizer` is not a Keras optimizer or is distributed already, or an argument is of a wrong type.
        ValueError: An argument is not valid, or two arguments contradict each other.
    """
    arguments = dict(locals())  # before there are other local variables
    if num_groups:
        warnings.warn("Parameter `num_groups` has been replaced by `groups`", DeprecationWarning, stacklevel=2)
    base, mixin = type(optimizer), _mixin(optimizer)
    checks.text("name", name)
    arguments["adaptive"], arguments["normalized"] = is_adaptive(optimizer), is_normalized(optimizer)
    settings = settings_from(arguments, name or f"Distributed{base.__name__}")
    accumulates = getattr(optimizer, "gradient_accumulation_steps", None)
    if accumulates and settings.backward_passes_per_step > 1:
        raise ValueError(
            "backward_passes_per_step and the optimizer's gradient_accumulation_steps do the same: set only one"
        )
    if accumulates and on_nonfinite == "skip":
        raise ValueError(
            "on_nonfinite='skip' cannot leave out a part of the optimizer's gradient_accumulation_steps: "
            "use backward_passes_per_step in its place"
        )
    if settings.local_steps is not None and getattr(innermost(optimizer), "use_ema", False):
        raise ValueError(
            "local_steps and use_ema=True cannot go together: Keras would overwrite the weights with each rank's own "
            "average; set use_ema=False"
        )
    dgc = settings.dgc
    momentum = own_momentum(optimizer) if dgc is not None and dgc.momentum else ""
    if momentum:
        raise ValueError(
            f"{dgc.spec} brings momentum={dgc.momentum}, and {base.__name__} has its own, {momentum}: "
            "pass an optimizer without momentum, such as keras.optimizers.SGD(learning_rate), or dgc with momentum=0"
        )
    # Keras finds a class by its module and name when it loads a saved model: that is then the original class.
    namespace = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    namespace["_hvdc_settings"] = settings
    cls: Any = type(base.__name__, (mixin, base), namespace)
    cls.__copy__ = lambda self: _copied(self, base, copy.copy)
    cls.__deepcopy__ = lambda self, memo: _copied(self, base, lambda plain: copy.deepcopy(plain, memo))
    # The configuration does not include an optimizer's state.
    if not (getattr(optimizer, "built", getattr(optimizer, "_built", False)) or getattr(optimizer, "_weights", None)):
        # For example, a learning rate schedule of the user's has no configuration.
        with contextlib.suppress(NotImplementedError, TypeError, ValueError):
            distributed = cls.from_config(optimizer.get_config())
            # The configuration does not include what `exclude_from_weight_decay` set.
            excluded = {key: value for key, value in vars(optimizer).items() if key.startswith(_EXCLUDED)}
            distributed.__dict__.update(excluded)
            return distributed
    optimizer.__class__ = cls  # the object itself becomes distributed
    return optimizer


def _copied(optimizer: Any, base: type, copy_plain: Callable[[Any], Any]) -> Any:
    """A copy that is distributed, too, and begins with residuals of zero.

    Keras copies an optimizer as it saves one, and what it saves is a plain optimizer of the class `base`.
    """
    cls, distribution = type(optimizer), optimizer.__dict__.pop("_hvdc_distribution", None)
    optimizer.__class__ = base
    try:
        copied = copy_plain(optimizer)
    finally:
        optimizer.__class__ = cls
        if distribution is not None:
            optimizer.__dict__["_hvdc_distribution"] = distribution
    copied.__class__ = cls
    return copied


def _mixin(optimizer: Any) -> Any:
    """The mixin for the version of Keras that `optimizer` belongs to."""
    inner = innermost(optimizer)
    if isinstance(inner, DistributedMixin) and not hasattr(inner, "_hvdc_settings"):  # OneBitAdam
        raise TypeError(f"{type(inner).__name__} is distributed by itself: use it as it is, unwrapped")
    check_undistributed("optimizer", inner, DistributedMixin, "DistributedOptimizer")
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
