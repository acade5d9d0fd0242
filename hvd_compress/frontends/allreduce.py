"""`hvdc.allreduce` and `hvdc.grouped_allreduce`: Horovod's functions with any compressor."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.tensorflow.mpi_ops import handle_average_backwards_compatibility

from ..common import checks
from ..common.elastic import is_elastic
from ..common.error_text import error_text
from ..compressors import Compressor
from ..compressors.base import Seeds, as_float32, no_seeds, static_shape
from ..compressors.resolve import CompressionLike, resolve
from ..engine import agreement
from ..engine.grouping import TensorGroup
from ..engine.layout import PerTensorLayout
from ..engine.pipeline import BucketInput, StepContext, reduce_bucket
from ..engine.reducer import check_not_in_xla
from ..engine.selector import FixedSelector
from ..exchange import choice, uncompressed
from ..exchange.group import Group
from ..kernels import noise

# The calls that were compared, of each process set: the first kinds of calls only, since names may never be the same.
_agreed: dict[tuple[int, ...], set[tuple[Any, ...]]] = {}
_MOST_COMPARED = 200
_OPS = (hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product)


@checks.not_converted
def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: CompressionLike = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: Any = hvd.global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Averages or sums a tensor over all ranks, compressed on the way.

    Has the arguments of `horovod.tensorflow.allreduce` and takes any compressor. It keeps no state: what the compressor
    loses is lost. `hvdc.DistributedOptimizer` and `hvdc.DistributedGradientTape` keep it for the next step.

    Example:
        mean = hvdc.allreduce(tensor, compression="int8")

    Args:
        tensor: A `tf.Tensor`, `tf.Variable` or `tf.IndexedSlices`, with the same static shape on all ranks.
            Integers and `tf.IndexedSlices` are not compressed.
        average: Deprecated by Horovod; use `op`.
        device_dense: TensorFlow device on which dense tensors are reduced.
        device_sparse: TensorFlow device on which `tf.IndexedSlices` are reduced.
        compression: A compressor or its spec string. None uses the environment variable `HVD_COMPRESS`, and does not
            compress if it is not set.
        op: `hvd.Average` (the default) or `hvd.Sum`; any of Horovod's operations if the tensor is not compressed.
        prescale_factor: Factor that multiplies the tensor before the reduction.
        postscale_factor: Factor that multiplies the result.
        name: Name of the operation, the same on all ranks.
        process_set: The Horovod process set whose ranks take part.
        ignore_name_scope: Whether to use `name` without the outer name scope.

    Returns:
        A tensor of the shape and dtype of `tensor`, bit for bit the same on all ranks.

    Raises:
        ValueError: An argument is not valid, `op` does not support compression, or the shape is not static. In the
            first compressed call with these arguments and shapes, on all ranks: they disagree on them (except in an
            elastic job).
        TypeError: An argument is of a wrong type, or Horovod cannot reduce the dtype of the tensor (such as complex64).
    """
    arguments = dict(locals())  # before there are other local variables; AutoGraph does not convert this function
    return grouped_allreduce([arguments.pop("tensor")], **arguments)[0]


@checks.not_converted
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: CompressionLike = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = hvd.global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """Averages or sums several tensors over all ranks in one collective; each is compressed by itself.

    `tensors` is a list of tensors as in `allreduce`. The other arguments, and the errors, are those of `allreduce`; the
    arguments apply to every tensor.

    Returns:
        A list of tensors with the shapes and dtypes of `tensors`, bit for bit the same on all ranks.
    """
    compressor = resolve(compression)
    op = handle_average_backwards_compatibility(op, average)
    if not isinstance(op, type(hvd.Average)) or op not in _OPS:
        raise ValueError(f"op must be one of Horovod's, such as hvd.Average or hvd.Sum, got {error_text(op)}")
    prescale_factor = checks.number("prescale_factor", prescale_factor)
    postscale_factor = checks.number("postscale_factor", postscale_factor)
    for what, value in (("name", name), ("device_dense", device_dense), ("device_sparse", device_sparse)):
        checks.text(what, value)
    ignore_name_scope = checks.flag("ignore_name_scope", ignore_name_scope)
    checks.process_set(process_set)
    hvd.size()  # raises Horovod's own error where hvd.init() was not called
    checks.registered(process_set)
    if tf.is_tensor(tensors) or isinstance(tensors, (str, bytes, Mapping)) or not isinstance(tensors, Iterable):
        raise TypeError(f"tensors must be a list of tensors, got {error_text(tensors)}")
    tensors = [_tensor(tensor) for tensor in tensors]
    results: dict[int, Any] = {}  # by position
    compressed = [i for i, tensor in enumerate(tensors) if _is_compressible(tensor, compressor)]
    if compressed and op not in (hvd.Average, hvd.Sum):
        raise ValueError(f"compression {compressor.spec!r} supports op Average and Sum only")
    for i in compressed:  # refuses shapes before any collective
        compressor.layout(static_shape(tensors[i], compressor.spec))
    if compressed:
        check_not_in_xla()
        call = {"op": "Average" if op == hvd.Average else "Sum"}
        call |= {"prescale_factor": str(prescale_factor), "postscale_factor": str(postscale_factor)}
        call |= {"the number of compressed tensors": str(len(compressed))}
        call |= {f"tensor {i}": f"{tensors[i].dtype.name} {tensors[i].shape}" for i in compressed}
        _agree_once(name, compressor, call, process_set)

    # Horovod's grouped operations take tensors of one dtype each.
    by_kind: dict[str, list[int]] = {}
    for i in sorted(set(range(len(tensors))) - set(compressed)):
        by_kind.setdefault(_kind(tensors[i]), []).append(i)
    for kind, members in sorted(by_kind.items()):
        reduced = hvd.grouped_allreduce(
            [uncompressed.wide(tensors[i]) for i in members], device_dense=device_dense, device_sparse=device_sparse,
            op=op, prescale_factor=prescale_factor, postscale_factor=postscale_factor, process_set=process_set,
            ignore_name_scope=ignore_name_scope, name=name and f"{name}_{kind}",
        )  # fmt: skip
        results |= {i: uncompressed.of_dtype(result, tensors[i].dtype) for i, result in zip(members, reduced)}

    if compressed:
        group = Group(process_set, name, ignore_name_scope)
        scale = postscale_factor / (process_set.size() if op == hvd.Average else 1)
        with tf.device(device_dense):
            reduced = _reduce([tensors[i] for i in compressed], compressor, prescale_factor, scale, group)
        results |= zip(compressed, reduced)
    return [results[i] for i in range(len(tensors))]


def _agree_once(name: str | None, compressor: Compressor, call: agreement.Facts, process_set: Any) -> None:
    """Checks in the first call of this name and of this kind that all ranks make it, which costs one allgather.

    Horovod compares what it reduces itself, but not what is in a payload. An elastic job is not checked: ranks that
    join have made no call yet.
    """
    if not process_set.included() or process_set.size() == 1 or is_elastic():
        return
    key, known = (name, compressor.spec, *call.items()), _agreed.setdefault(tuple(process_set.ranks), set())
    if key in known or len(known) >= _MOST_COMPARED:
        return
    with tf.init_scope():
        if not tf.executing_eagerly():  # graphs of TensorFlow 1
            return
        facts = agreement.of_environment() | agreement.of_kernels([compressor])
        facts |= {"compression": compressor.spec, **call}
        # Threads may make calls of different names in any order.
        everyone = agreement.gathered(facts, f"hvdc_allreduce_{name or ''}", process_set)
        agreement.raise_difference(everyone, process_set.ranks)
    known.add(key)


def _reduce(
    tensors: Sequence[Any], compressor: Any, prescale_factor: float, scale: float, group: Group
) -> list[tf.Tensor]:
    """The sums over the ranks of `prescale_factor` times each tensor, compressed, times `scale`."""
    dense, shapes, dtypes = zip(*(as_float32(tensor, compressor.spec) for tensor in tensors))
    chunks = [x if prescale_factor == 1.0 else x * prescale_factor for x in dense]
    shared = no_seeds().shared
    bucket = BucketInput(
        PerTensorLayout(TensorGroup(tuple(range(len(shapes))), shapes)),
        range(len(shapes)),
        FixedSelector(compressor),
        Seeds(shared, noise.fold(shared, group.process_set.rank() + 1)),
        lambda _: group,
    )
    # As for two ranks: never by scatter-reduce, which compresses twice and needs a residual for the second loss.
    step = StepContext(scale, functools.partial(choice.choose, ranks=2))
    reduced = reduce_bucket(bucket, chunks, step).chunks
    return [tf.cast(tf.reshape(chunk, shape), dtype) for chunk, shape, dtype in zip(reduced, shapes, dtypes)]


def _tensor(value: Any) -> Any:
    """Converts `value` to a tensor that Horovod can reduce; returns `tf.IndexedSlices` unchanged."""
    if isinstance(value, (tf.RaggedTensor, tf.SparseTensor)):
        raise TypeError(f"Horovod cannot reduce a {type(value).__name__}: pass its values, or make it dense")
    if not tf.is_tensor(value) and not isinstance(value, tf.IndexedSlices):
        try:
            value = tf.convert_to_tensor(value)
        except (TypeError, ValueError, tf.errors.InvalidArgumentError):
            raise TypeError(f"tensor must be a tensor, got {error_text(value)}") from None
    checks.reducible("tensor", value.dtype)
    return value


def _kind(tensor: Any) -> str:
    """The dtype in which Horovod reduces the tensor, and whether it is `tf.IndexedSlices`."""
    return ("slices_" if isinstance(tensor, tf.IndexedSlices) else "") + uncompressed.wide(tensor).dtype.name


def _is_compressible(tensor: Any, compressor: Any) -> bool:
    if compressor.uncompressed or isinstance(tensor, tf.IndexedSlices):
        return False
    return bool(tensor.dtype.is_floating) and tensor.shape.num_elements() != 0
