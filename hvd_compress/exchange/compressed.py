"""One compressed bucket across the ranks: encode, exchange, decode and sum.

A bucket is encoded in segments: the whole of it, or tensor by tensor for compressors that need shapes.
With the parts travels one flag, whether all that this rank sent is finite; if any rank's is not, the sum
is NaN on every rank, whatever the codes would have decoded to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from .. import payload as _payload
from .. import residual
from ..compressors import Compressor, Seeds
from ..kernels import noise
from . import allgather, allreduce

Shape = tuple[int, ...]
_FLAG = tf.TensorSpec([1], tf.uint8)


def reduce(
    compressor: Compressor,
    segments: Sequence[Shape],
    flat: tf.Tensor,
    seeds: Seeds,
    scale: float,
    process_set: Any,
    name: str | None,
    ignore_name_scope: bool = False,
) -> tuple[tf.Tensor, tf.Tensor, list[list[tf.Tensor]], list[Any]]:
    """Sums `flat` over the ranks, compressed on the way.

    Args:
        compressor: What encodes.
        segments: The shapes whose elements `flat` holds, one after the other.
        flat: float32 [elements], this rank's share.
        seeds: For random compressors.
        scale: Multiplies the sum, 1 / ranks for an average.
        process_set: The ranks.
        name: Of the collective, the same on all ranks.
        ignore_name_scope: Use `name` without the outer name scope.

    Returns:
        The scaled sum (float32 [elements], the same on all ranks), whether it is finite (bool scalar),
        and this rank's parts and contexts per segment, for `lost`.
    """
    pieces = _cut(flat, segments)
    encoded = [
        compressor.encode(piece, Seeds(noise.fold(seeds.shared, s), noise.fold(seeds.local, s)))
        for s, piece in enumerate(pieces)
    ]
    parts, contexts = [list(e[0]) for e in encoded], [e[1] for e in encoded]
    finite = residual.all_finite(flat)
    if uses_allreduce(compressor, segments):
        ok, gathered = _sum_values(parts, finite, process_set, name, ignore_name_scope)
    else:
        ok, gathered = _gather(compressor, segments, parts, finite, process_set, name, ignore_name_scope)
    factor = tf.where(ok, tf.constant(scale, tf.float32), tf.constant(math.nan, tf.float32))
    sums = [
        tf.reshape(compressor.decode_sum(part, context, factor), [-1])
        for part, context in zip(gathered, contexts)
    ]
    return _join(sums), ok, parts, contexts


def lost(
    compressor: Compressor,
    segments: Sequence[Shape],
    flat: tf.Tensor,
    parts: Sequence[Sequence[tf.Tensor]],
    contexts: Sequence[Any],
) -> tf.Tensor:
    """What this rank's encoding of `flat` leaves out, float32 [elements]."""
    pieces = _cut(flat, segments)
    return _join([tf.reshape(compressor.lost(x, p, c), [-1]) for x, p, c in zip(pieces, parts, contexts)])


def uses_allreduce(compressor: Compressor, segments: Sequence[Shape]) -> bool:
    """Whether the payload is float32 that may be summed. 16-bit sums would round at every rank."""
    if not compressor.summable:
        return False
    return all(
        len(layout) == 1 and layout[0].dtype == tf.float32 for layout in map(compressor.layout, segments)
    )


def bytes_sent(compressor: Compressor, segments: Sequence[Shape], ranks: int) -> int:
    """What each rank sends for one bucket, the flag included."""
    nbytes = sum(compressor.wire_bytes(shape) for shape in segments)
    if uses_allreduce(compressor, segments):
        return allreduce.bytes_sent(nbytes + 4, ranks)
    return allgather.bytes_sent(nbytes + 1, ranks)


def _gather(
    compressor: Compressor,
    segments: Sequence[Shape],
    parts: Sequence[Sequence[tf.Tensor]],
    finite: tf.Tensor,
    process_set: Any,
    name: str | None,
    ignore_name_scope: bool,
) -> tuple[tf.Tensor, list[list[tf.Tensor]]]:
    """Every rank's parts, with a leading axis of ranks."""
    flat_parts = [part for segment in parts for part in segment]
    specs = [tf.TensorSpec(part.shape, part.dtype) for part in flat_parts]
    payload = _payload.join([*flat_parts, tf.cast(finite, tf.uint8)[None]])
    gathered = allgather.allgather(payload, process_set, name, ignore_name_scope)
    *stacked, flags = _payload.split(gathered, [*specs, _FLAG])
    pieces = iter(stacked)
    return tf.reduce_all(flags == 1), [[next(pieces) for _ in segment] for segment in parts]


def _sum_values(
    parts: Sequence[Sequence[tf.Tensor]],
    finite: tf.Tensor,
    process_set: Any,
    name: str | None,
    ignore_name_scope: bool,
) -> tuple[tf.Tensor, list[list[tf.Tensor]]]:
    """The parts summed over the ranks, with a leading axis of one."""
    values = [tf.reshape(segment[0], [-1]) for segment in parts]
    broken = tf.cast(~finite, tf.float32)[None]
    total = allreduce.allreduce_sum(tf.concat([*values, broken], 0), process_set, name, ignore_name_scope)
    *sums, count = tf.split(total, [*(value.shape[0] for value in values), 1])
    shaped = [tf.reshape(s, [1, *segment[0].shape]) for s, segment in zip(sums, parts)]
    return count[0] == 0.0, [[s] for s in shaped]


def _cut(flat: tf.Tensor, segments: Sequence[Shape]) -> list[tf.Tensor]:
    if len(segments) == 1:
        return [tf.reshape(flat, segments[0])]
    pieces = tf.split(flat, [math.prod(shape) for shape in segments])
    return [tf.reshape(piece, shape) for piece, shape in zip(pieces, segments)]


def _join(flats: Sequence[tf.Tensor]) -> tf.Tensor:
    return flats[0] if len(flats) == 1 else tf.concat(list(flats), 0)
