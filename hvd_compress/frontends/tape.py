"""`hvdc.DistributedGradientTape`, for custom training loops."""

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
from ..compressors.resolve import CompressionLike
from ..engine import nonfinite
from ..engine.compression_report import CompressionReport
from ..engine.reducer import Reducer
from ..engine.settings import MIN_COMPRESS_SIZE, Settings
from .build import new_reducer
from .shared import check_undistributed, reduce_shared, settings_from

# Reducers, which keep the residuals, by variables and settings: they outlive the tape, which is new in every step.
_reducers: dict[Any, Reducer] = {}


@checks.not_converted
def DistributedGradientTape(  # noqa: D417
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
    delay: int = 0,
    delay_warmup: int = 0,
) -> Any:
    """Wraps a tape so that `gradient()` returns gradients averaged over all ranks, compressed on the way.

    Takes every argument of `horovod.tensorflow.DistributedGradientTape`, with the same meaning. Arguments that are not
    listed here are those of `hvdc.DistributedOptimizer`. Make a new tape in every step, as usual: residuals belong to
    the variables and the settings, not to the tape.

    Example:
        with tf.GradientTape() as tape:
            loss = loss_fn(y, model(x, training=True))
        tape = hvdc.DistributedGradientTape(tape, compression="int8")
        gradients = tape.gradient(loss, model.trainable_variables)

    Args:
        gradtape: The `tf.GradientTape` that recorded the step.
        compression: A compressor or its spec string. None uses the environment variable `HVD_COMPRESS`, and does not
            compress if it is not set.
        sparse_as_dense: Whether to convert `tf.IndexedSlices` to dense tensors, and to compress them as such.
        op: `hvd.Average` or `hvd.Sum`.
        num_groups: Deprecated by Horovod; use `groups`.
        groups: The number of buckets, or a list of lists of variables, one bucket for each list.
        process_set: The Horovod process set whose ranks train together.
        scale_local_gradients: Whether to divide the gradients of local sources (`register_local_source`) by the number
            of ranks.
        on_nonfinite: What to do if a gradient of any rank is infinite or NaN. "propagate": all ranks get gradients that
            are not finite. "skip": all ranks get zeros for all sources (an optimizer with momentum still moves the
            variables). "raise": all ranks raise `tf.errors.InvalidArgumentError`. Residuals stay as they were in all
            three cases; with `delay=1`, only those of the rank with that gradient do.

    Returns:
        A tape with the state of `gradtape`. It has four more methods: `register_local_source(source)` and
        `get_local_and_global_gradients(...)`, as Horovod's, and `bytes_sent(sources)` and
        `compression_report(sources)`.

    Raises:
        TypeError: `gradtape` is not a `tf.GradientTape` or is distributed already, or an argument is of a wrong type.
        ValueError: An argument is not valid, or two arguments contradict each other.
    """
    arguments = dict(locals())  # before there are other local variables
    if not isinstance(gradtape, tf.GradientTape):
        raise TypeError(f"gradtape must be a tf.GradientTape, got {error_text(gradtape)}")
    check_undistributed("gradtape", gradtape, _DistributedGradientTape, "DistributedGradientTape")
    return _DistributedGradientTape(gradtape, settings_from(arguments, "DistributedGradientTape"))


class _DistributedGradientTape(tf.GradientTape):
    def __init__(self, tape: tf.GradientTape, settings: Settings) -> None:
        # Takes over the whole state of the wrapped tape.
        self.__dict__.update(tape.__dict__)
        self._hvdc_settings = settings
        self._hvdc_local: set[int] = set()

    @checks.not_converted
    def register_local_source(self, source: Any) -> None:
        """Keeps the gradient of `source` (a variable) local to this rank."""
        self._hvdc_local.add(id(source))

    @checks.not_converted
    def gradient(
        self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False, **kwargs: Any
    ) -> Any:
        """As `tf.GradientTape.gradient`; the result is reduced over the ranks.

        `use_generic_names` is accepted as by Horovod, and ignored: names of operations contain no names of variables.

        Returns:
            Gradients in the structure of `sources`, the same on all ranks except those of local sources.

        Raises:
            ValueError: The ranks disagree about what to reduce, or Horovod is not initialized.
            RuntimeError: Called inside a function that is compiled with `jit_compile=True`.
        """
        gradients = super().gradient(target, sources, output_gradients, **kwargs)
        flat_sources = tf.nest.flatten(sources)
        reducer = reducer_of(self, flat_sources)
        flat = reduce_shared(reducer, tf.nest.flatten(gradients), flat_sources, self._hvdc_local)
        policy = self._hvdc_settings.on_nonfinite
        if policy != "propagate":
            reduced = [g for g, source in zip(flat, flat_sources) if id(source) not in self._hvdc_local]
            finite = nonfinite.all_finite(reduced)
            if policy == "skip":
                flat = nonfinite.zeros_unless(finite, flat)
            else:
                steps = [plan.state.step for plan in reducer.plans.values()]
                flat = nonfinite.raise_unless(finite, flat, tf.add_n(steps) if steps else None)
        return tf.nest.pack_sequence_as(gradients, flat)

    def bytes_sent(self, sources: Any) -> tuple[int, int]:
        """Bytes that each rank sends per step for the gradients of `sources`: with this compression, and without.

        Any tape with the same settings returns the same numbers. For embeddings with IndexedSlices, the rows of the
        last step count.

        Args:
            sources: The variables that `gradient` was called with.

        Raises:
            RuntimeError: No step has been made yet.
        """
        return reducer_of(self, tf.nest.flatten(sources)).bytes_sent()

    def compression_report(self, sources: Any) -> CompressionReport:
        """The compressor of each bucket of the gradients of `sources`; with "auto" also why it was chosen.

        Any tape with the same settings returns the same report.

        Args:
            sources: The variables that `gradient` was called with.

        Raises:
            RuntimeError: No step has been made yet.
        """
        return reducer_of(self, tf.nest.flatten(sources)).report()

    @checks.not_converted
    def get_local_and_global_gradients(
        self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False
    ) -> tuple[list[Any], list[Any]]:
        """Two lists of pairs (source, gradient): of the local sources, and of the others, whose gradients are reduced.

        See `gradient` for the arguments.
        """
        gradients = self.gradient(target, sources, output_gradients, use_generic_names)
        pairs = list(zip(sources, gradients))
        local = [(s, g) for s, g in pairs if id(s) in self._hvdc_local]
        return local, [(s, g) for s, g in pairs if id(s) not in self._hvdc_local]


def reducer_of(tape: Any, sources: Sequence[Any]) -> Reducer:
    """The reducer with the residuals of these sources, except the tape's local ones, under the tape's settings."""
    settings = tape._hvdc_settings
    sources = [source for source in sources if id(source) not in tape._hvdc_local]
    if not all(hasattr(source, "assign") for source in sources):
        # Tensors exist for one step only: nothing can be kept for the next one.
        if settings.delay:
            raise ValueError("delay=1 needs variables as sources: tensors exist for one step only; use delay=0")
        stateless = dataclasses.replace(
            settings,
            compressor=settings.compressor.stateless(),
            policy=tuple((pattern, compressor.stateless()) for pattern, compressor in settings.policy),
            error_feedback=False,
            momentum_correction=0.0,
        )
        return new_reducer(stateless)
    fields = (getattr(settings, field.name) for field in dataclasses.fields(settings))
    key = (tuple(id(s) for s in sources), tuple(_hashable(value) for value in fields))
    if key not in _reducers:
        _reducers[key] = new_reducer(settings)
        for source in sources:
            weakref.finalize(source, _reducers.pop, key, None)
    return _reducers[key]


class _CompressorKey:
    """A compressor as a key of a dictionary: equal to one of the same class, spec and attributes.

    Compressors written by users need not define equality or a hash, and may be new objects in each step.
    """

    def __init__(self, compressor: Compressor) -> None:
        self._compressor = compressor

    def __hash__(self) -> int:
        return hash((type(self._compressor), self._compressor.spec))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _CompressorKey) or hash(self) != hash(other):
            return False
        a, b = self._compressor, other._compressor
        try:
            return a is b or bool(a == b or _attributes(a) == _attributes(b))
        except (TypeError, ValueError):  # some attributes cannot be compared, for example arrays
            return False


def _attributes(compressor: Compressor) -> dict[str, Any]:
    """The attributes of a compressor, which may hold others."""
    return {name: _hashable(value) for name, value in vars(compressor).items()}


def _hashable(value: Any) -> Any:
    if isinstance(value, Compressor):
        return _CompressorKey(value)
    if isinstance(value, (list, tuple)):
        return tuple(_hashable(item) for item in value)
    return value if not hasattr(value, "assign") else id(value)
