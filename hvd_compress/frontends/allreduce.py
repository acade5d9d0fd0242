"""`hvdc.allreduce` and `hvdc.grouped_allreduce`: Horovod's, with any compressor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.tensorflow.mpi_ops import handle_average_backwards_compatibility

from ..common import checks
from ..common.error_text import error_text
from ..compressors.base import Seeds, as_float32, no_seeds, static_shape
from ..compressors.registry import CompressionLike, resolve
from ..engine.reducer import check_not_in_xla
from ..exchange import choice, uncompressed
from ..exchange.group import Group
from ..exchange.local_input import LocalInput
from ..kernels import noise

_OPS = (hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product)


@checks.plain_errors
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
    """Reduces a tensor over the ranks, compressed on the way.

    As `horovod.tensorflow.allreduce`, for any of our compressors. Stateless: what the compressor loses
    is lost; `hvdc.DistributedOptimizer` and `hvdc.DistributedGradientTape` keep it for the next step.

    Args:
        tensor: tf.Tensor, tf.Variable or tf.IndexedSlices, of the same static shape on all ranks.
            IndexedSlices and integers are reduced uncompressed.
        average: Deprecated by Horovod; use `op`.
        device_dense: Device for dense tensors.
        device_sparse: Device for IndexedSlices.
        compression: A compressor, or its spec string; None for what `HVD_COMPRESS` says, else none.
        op: hvd.Average (default) or hvd.Sum; with compression none, any of Horovod's.
        prescale_factor: Multiplies the tensor before the reduction.
        postscale_factor: Multiplies the result.
        name: Of the operation, the same on all ranks.
        process_set: The ranks that take part.
        ignore_name_scope: Use `name` without the outer name scope.

    Returns:
        A tensor of the shape and dtype of `tensor`, the same on all ranks to the bit.

    Raises:
        ValueError: An argument is not valid, the op cannot be combined with compression, or the shape is not static.
        TypeError: An argument is of a wrong type, or the tensor of a dtype that Horovod cannot reduce (complex, say).
    """
    return grouped_allreduce(
        [tensor],
        average=average,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
        ignore_name_scope=ignore_name_scope,
        name=name,
    )[0]


@checks.plain_errors
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
    """Reduces several tensors over the ranks, each compressed for itself, in one collective.

    See `allreduce` for the arguments, which hold for every tensor, and for the errors.

    Returns:
        A list like `tensors`.
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
    if (
        tf.is_tensor(tensors)
        or isinstance(tensors, (str, bytes, Mapping))
        or not isinstance(tensors, Iterable)
    ):
        raise TypeError(f"tensors must be a list of tensors, got {error_text(tensors)}")
    tensors = [_tensor(tensor) for tensor in tensors]
    results: list[Any] = [None] * len(tensors)
    chosen = [i for i, tensor in enumerate(tensors) if _is_compressible(tensor, compressor)]
    if chosen and op not in (hvd.Average, hvd.Sum):
        raise ValueError(f"compression {compressor.spec!r} supports op Average and Sum only")
    for i in chosen:  # before any collective
        compressor.layout(static_shape(tensors[i], compressor.spec))
    compressed = set(chosen)
    rest = [i for i in range(len(tensors)) if i not in compressed]
    kinds = {i: _kind(tensors[i]) for i in rest}
    for kind in sorted(set(kinds.values())):  # Horovod's grouped ops take one dtype each
        members = [i for i in rest if kinds[i] == kind]
        reduced = hvd.grouped_allreduce(
            [uncompressed.wide(tensors[i]) for i in members], device_dense=device_dense,
            device_sparse=device_sparse, op=op,
            prescale_factor=prescale_factor, postscale_factor=postscale_factor, process_set=process_set,
            ignore_name_scope=ignore_name_scope, name=name and f"{name}_{kind}",
        )  # fmt: skip
        for i, result in zip(members, reduced):
            results[i] = uncompressed.of_dtype(result, tensors[i].dtype)
    if chosen:
        check_not_in_xla()
        with tf.device(device_dense):
            for i, result in zip(chosen, _reduce(
                [tensors[i] for i in chosen], compressor, op, prescale_factor, postscale_factor, process_set, name,
                ignore_name_scope,
            )):  # fmt: skip
                results[i] = result
    return results


def _reduce(
    tensors: Sequence[Any],
    compressor: Any,
    op: Any,
    prescale_factor: float,
    postscale_factor: float,
    process_set: Any,
    name: str | None,
    ignore_name_scope: bool,
) -> list[tf.Tensor]:
    triples = [as_float32(tensor, compressor.spec) for tensor in tensors]
    chunks = [x if prescale_factor == 1.0 else x * prescale_factor for x, _, _ in triples]
    scale = postscale_factor / (process_set.size() if op == hvd.Average else 1)
    shared = no_seeds().shared
    seeds = Seeds(shared, noise.fold(shared, process_set.rank() + 1))
    share = LocalInput(chunks, [None] * len(chunks), 1.0, False, seeds)
    group = Group(process_set, name, ignore_name_scope)
    # Never scatter-reduce: without a residual, its second loss would be lost.
    layouts = [shape for _, shape, _ in triples]
    pattern = choice.choose(compressor, layouts, 2)
    reduced = pattern.reduce(compressor, share, scale, group)
    return [
        tf.cast(tf.reshape(chunk, shape), dtype) for chunk, (_, shape, dtype) in zip(reduced.chunks, triples)
    ]


def _tensor(value: Any) -> Any:
    """`value` as a tensor or IndexedSlices that Horovod can reduce.

    Raises:
        TypeError: It is none.
    """
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
    return ("slices_" if isinstance(tensor, tf.IndexedSlices) else "") + uncompressed.wide(tensor).dtype.name


def _is_compressible(tensor: Any, compressor: Any) -> bool:
    if compressor.uncompressed or isinstance(tensor, tf.IndexedSlices):
        return False
    return bool(tensor.dtype.is_floating) and tensor.shape.num_elements() != 0
