"""`hvdc.DistributedGradientTape`: gradients of a custom training loop, reduced over the ranks."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from ..common import checks
from ..common.error_text import error_text
from ..compressors import Compressor
from ..compressors.resolve import CompressionLike, policies, resolve
from ..engine import nonfinite
from ..engine.compression_report import CompressionReport
from ..engine.reducer import Reducer, scale_local_gradient
from ..engine.settings import MIN_COMPRESS_SIZE, Settings, resolve_bucket_bytes
from .build import new_reducer

# A tape is made anew for every step, residuals must outlive it: reducers by variables and settings.
_reducers: dict[Any, Reducer] = {}


def DistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: CompressionLike = None,
    sparse_as_dense: bool = False,
    op: Any = hvd.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = hvd.global_process_set,
    scale_local_gradients: bool = True,
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
    """A tape whose `gradient()` returns gradients reduced over the ranks, compressed on the way.

    Residuals belong to the variables and settings, not to the tape: make a new tape every step, as usual.

    Args:
        gradtape: The tf.GradientTape that recorded the step.
        device_dense: As Horovod's.
        device_sparse: As Horovod's.
        compression: A compressor, or its spec string; None for what `HVD_COMPRESS` says, else none.
        sparse_as_dense: As Horovod's: IndexedSlices become dense, and are compressed as such.
        op: hvd.Average or hvd.Sum.
        gradient_predivide_factor: As Horovod's.
        num_groups: Deprecated by Horovod; use `groups`.
        groups: As Horovod's: a number of buckets, or a list of lists of variables.
        process_set: As Horovod's.
        scale_local_gradients: As Horovod's.
        min_compress_size: See `hvdc.DistributedOptimizer`.
        bucket_bytes: See `hvdc.DistributedOptimizer`.
        error_feedback: See `hvdc.DistributedOptimizer`.
        residual_decay: See `hvdc.DistributedOptimizer`.
        residual_dtype: See `hvdc.DistributedOptimizer`.
        momentum_correction: See `hvdc.DistributedOptimizer`.
        policy: See `hvdc.DistributedOptimizer`.
        on_nonfinite: What happens where a gradient of any rank is infinite or NaN. "propagate": every rank gets
            gradients that are not finite. "skip": every rank gets zeros for all sources (an optimizer with
            momentum still moves). "raise": every rank raises tf.errors.InvalidArgumentError. Residuals stay as they
            were in any case.
        hierarchical: See `hvdc.DistributedOptimizer`.

    Returns:
        A tape with the state of `gradtape`; besides `gradient`, it has `register_local_source(source)` and
        `get_local_and_global_gradients(...)`, as Horovod's.

    Raises:
        ValueError: An argument is not valid.
        TypeError: `gradtape` is no tf.GradientTape.
    """
    if not isinstance(gradtape, tf.GradientTape):
        raise TypeError(f"gradtape must be a tf.GradientTape, got {error_text(gradtape)}")
    if isinstance(gradtape, _DistributedGradientTape):
        raise TypeError("gradtape is distributed already: wrap it only once")
    if checks.is_horovods(gradtape):
        raise TypeError(
            "gradtape is distributed by Horovod already: leave hvd.DistributedGradientTape out, "
            "hvdc.DistributedGradientTape takes its place"
        )
    settings = Settings(
        compressor=resolve(compression),
        name="DistributedGradientTape",
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
    return _DistributedGradientTape(gradtape, settings)


class _DistributedGradientTape(tf.GradientTape):
    def __init__(self, tape: tf.GradientTape, settings: Settings) -> None:
        # The wrapped tape's whole state: a tape holds no other identity.
        self.__dict__.update(tape.__dict__)
        self._hvdc_settings = settings
        self._hvdc_local: set[int] = set()

    def register_local_source(self, source: Any) -> None:
        """Leaves the gradients of `source` (a variable) local to this rank."""
        self._hvdc_local.add(id(source))

    @checks.plain_errors
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
        **kwargs: Any,
    ) -> Any:
        """As tf.GradientTape.gradient, reduced over the ranks.

        `use_generic_names` is Horovod's; names are generic here in any case.
        """
        gradients = super().gradient(target, sources, output_gradients, **kwargs)
        flat_sources = tf.nest.flatten(sources)
        flat = tf.nest.flatten(gradients)
        shared = [i for i, source in enumerate(flat_sources) if id(source) not in self._hvdc_local]
        reducer = reducer_of(self, flat_sources)
        reduced = reducer([flat[i] for i in shared], [flat_sources[i] for i in shared])
        policy = self._hvdc_settings.on_nonfinite
        if policy == "skip":
            finite = nonfinite.all_finite(reduced)
            flat = nonfinite.zeros_unless(finite, flat)  # of local sources, too
            reduced = nonfinite.zeros_unless(finite, reduced)
        elif policy == "raise":
            steps = [plan.state.step for plan in reducer.plans.values()]
            step = tf.add_n(steps) if steps else None
            reduced = nonfinite.raise_unless(nonfinite.all_finite(reduced), reduced, step)
        for i, gradient in zip(shared, reduced):
            flat[i] = gradient
        if self._hvdc_settings.scale_local_gradients:
            size = self._hvdc_settings.process_set.size()
            for i in set(range(len(flat))) - set(shared):
                flat[i] = scale_local_gradient(flat[i], size)
        return tf.nest.pack_sequence_as(gradients, flat)

    def compression_report(self, sources: Any) -> CompressionReport:
        """What each bucket of the gradients of `sources` (variables) is compressed with, and why.

        Any tape with the same settings knows it.

        Raises:
            RuntimeError: No step has been made yet.
        """
        return reducer_of(self, tf.nest.flatten(sources)).report()

    def get_local_and_global_gradients(
        self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False
    ) -> tuple[list[Any], list[Any]]:
        """Pairs of (source, gradient): those of registered local sources, and the reduced ones."""
        gradients = self.gradient(target, sources, output_gradients, use_generic_names)
        pairs = list(zip(sources, gradients))
        local = [(s, g) for s, g in pairs if id(s) in self._hvdc_local]
        return local, [(s, g) for s, g in pairs if id(s) not in self._hvdc_local]


def reducer_of(tape: Any, sources: Sequence[Any]) -> Reducer:
    """The reducer of a distributed tape's gradients for these sources, but for its local ones."""
    return _reducer(tape._hvdc_settings, [s for s in sources if id(s) not in tape._hvdc_local])


def _reducer(settings: Settings, sources: list[Any]) -> Reducer:
    """The reducer that keeps the residuals of these variables under these settings."""
    if not all(hasattr(source, "assign") for source in sources):
        # Tensors come and go: nothing to keep a residual for.
        bare = dataclasses.replace(
            settings,
            compressor=settings.compressor.stateless(),
            policy=tuple((pattern, compressor.stateless()) for pattern, compressor in settings.policy),
            error_feedback=False,
            momentum_correction=0.0,
        )
        return new_reducer(bare)
    fields = (getattr(settings, field.name) for field in dataclasses.fields(settings))
    key = (tuple(id(s) for s in sources), tuple(_hashable(value) for value in fields))
    if key not in _reducers:
        _reducers[key] = new_reducer(settings)
        for source in sources:
            weakref.finalize(source, _reducers.pop, key, None)
    return _reducers[key]


class _Alike:
    """A compressor as a key: equal to one of the same class, spec and attributes.

    What users write need not say when two are equal, nor have a hash, and may be made anew with each tape.
    """

    def __init__(self, compressor: Compressor) -> None:
        self._compressor = compressor

    def __hash__(self) -> int:
        return hash((type(self._compressor), self._compressor.spec))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Alike) or hash(self) != hash(other):
            return False
        mine, theirs = self._compressor, other._compressor
        try:
            return mine is theirs or bool(mine == theirs or vars(mine) == vars(theirs))
        except (TypeError, ValueError):  # arrays, say, of which nobody knows
            return False


def _hashable(value: Any) -> Any:
    if isinstance(value, Compressor):
        return _Alike(value)
    if isinstance(value, (list, tuple)):
        return tuple(_hashable(item) for item in value)
    return value if not hasattr(value, "assign") else id(value)
