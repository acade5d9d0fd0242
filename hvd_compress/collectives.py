"""`hvdc.allreduce` and `hvdc.grouped_allreduce`: Horovod's, with any compressor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.tensorflow.mpi_ops import handle_average_backwards_compatibility

from .compression import CompressionLike, resolve
from .compressors import NoCompression
from .compressors.base import Seeds, as_float32, no_seeds
from .exchange import choice
from .exchange.common import Group, Share
from .kernels import noise
from .reducer import check_not_in_xla


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
        ValueError: The op cannot be combined with compression, or the shape is not static.
        TypeError: The tensor is complex.
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
    tensors = list(tensors)
    results: list[Any] = [None] * len(tensors)
    chosen = [i for i, tensor in enumerate(tensors) if _is_compressible(tensor, compressor)]
    if chosen and op not in (hvd.Average, hvd.Sum):
        raise ValueError(f"compression {compressor.spec!r} supports op Average and Sum only")
    rest = [i for i in range(len(tensors)) if i not in set(chosen)]
    kinds = {i: _kind(tensors[i]) for i in rest}
    for kind in sorted(set(kinds.values())):  # Horovod's grouped ops take one dtype each
        members = [i for i in rest if kinds[i] == kind]
        reduced = hvd.grouped_allreduce(
            [tensors[i] for i in members], device_dense=device_dense, device_sparse=device_sparse, op=op,
            prescale_factor=prescale_factor, postscale_factor=postscale_factor, process_set=process_set,
            ignore_name_scope=ignore_name_scope, name=name and f"{name}_{kind}",
        )  # fmt: skip
        for i, result in zip(members, reduced):
            results[i] = result
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
    pieces = [x if prescale_factor == 1.0 else x * prescale_factor for x, _, _ in triples]
    scale = postscale_factor / (process_set.size() if op == hvd.Average else 1)
    shared = no_seeds().shared
    seeds = Seeds(shared, noise.fold(shared, process_set.rank() + 1))
    share = Share(pieces, [None] * len(pieces), 1.0, False, seeds)
    group = Group(process_set, name, ignore_name_scope)
    # Never scatter-reduce: without a residual, its second loss would be lost.
    layouts = [shape for _, shape, _ in triples]
    pattern = choice.choose(compressor, layouts, 2)
    reduced = pattern.reduce(compressor, share, scale, group)
    return [
        tf.cast(tf.reshape(piece, shape), dtype) for piece, (_, shape, dtype) in zip(reduced.pieces, triples)
    ]


def _kind(tensor: Any) -> str:
    prefix = "slices_" if isinstance(tensor, tf.IndexedSlices) else ""
    return prefix + tf.as_dtype(getattr(tensor, "dtype", None) or tf.convert_to_tensor(tensor).dtype).name


def _is_compressible(tensor: Any, compressor: Any) -> bool:
    if isinstance(compressor, NoCompression) or isinstance(tensor, tf.IndexedSlices):
        return False
    dtype = tf.as_dtype(_kind(tensor))
    if dtype.is_complex:
        raise TypeError(
            f"Horovod cannot reduce complex tensors, got {dtype.name}: reduce real and imaginary part"
        )
    return dtype.is_floating and getattr(tensor, "shape", tf.TensorShape([])).num_elements() != 0
