"""Encodes and decodes all chunks of a bucket.

Where native operations are in use, each is one operation. Otherwise XLA's kernels do it, chunk by chunk. Buckets of the
same shapes then share one traced function for each: with several candidates for each bucket, tracing ResNet-50 took
13 s without that, and takes 6 s. TensorFlow inlines these functions. Where it did not, a step took 15 to 25% longer.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any, Callable, NamedTuple, TypeVar, cast

import numpy as np
import tensorflow as tf

from ..compressors import Compressor
from ..compressors import payload as _payload
from ..formats.base import Shape
from ..kernels import native
from . import flags
from .local_input import LocalInput
from .volume import flagged_bytes, payload_bytes

# One kernel decodes and sums the payloads of so many ranks at most; with more it would only take longer to compile.
RANKS_PER_KERNEL = 8

# The oldest trace is dropped when there are more.
_TRACES = 256

F = TypeVar("F", bound=Callable[..., Any])


class EncodedShard(NamedTuple):
    """What one rank contributes to an exchange."""

    payload: tf.Tensor  # what it sends: uint8 with its flag, or float32 in an allreduce
    contexts: list[Any]  # of each chunk, for decoding
    residuals: list[tf.Tensor | None]  # the new ones, one for each chunk
    outgoing: tf.Tensor  # see `Reduction.outgoing`
    finite: Callable[[], tf.Tensor]  # whether all chunks of this rank are finite, a bool scalar; only a delay asks
    sums: list[tf.Tensor] = []  # noqa: RUF012  of `ScatterReduce`: the chunks + residuals that this rank keeps


def _traced_once(function: F) -> F:
    """Calls of `function(compressor, *args)` share a trace if only the values of tensors differ.

    Arguments and results are nests of tensors and constants.
    """
    traces: dict[Any, tuple[Any, Any]] = {}

    @functools.wraps(function)
    def wrapped(compressor: Compressor, *args: Any) -> Any:
        if not compressor.pure:
            # It may keep something from call to call, so each bucket needs a trace of its own.
            return function(compressor, *args)
        specs, tensors = _without_tensors(args)
        structure = repr(tf.nest.map_structure(lambda _: None, specs))
        key = compressor, structure, tuple(_hashable(value) for value in tf.nest.flatten(specs))
        if key not in traces:
            if len(traces) == _TRACES:
                traces.pop(next(iter(traces)))
            results = None

            def run(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
                nonlocal results
                results, outputs = _without_tensors(function(compressor, *_with_tensors(specs, tensors)))
                return outputs

            with tf.init_scope():
                signature = [spec for spec in tf.nest.flatten(specs) if isinstance(spec, tf.TensorSpec)]
                traced = tf.function(run, autograph=False).get_concrete_function(signature)
            traces[key] = traced, results
        traced, results = traces[key]
        return _with_tensors(results, traced(tensors))

    return cast(F, wrapped)


def _hashable(value: Any) -> Any:
    """What tells constants apart; `True`, 1 and 1.0 are not the same."""
    content = (value.shape, str(value.dtype), value.tobytes()) if isinstance(value, np.ndarray) else value
    return type(value), content


def _without_tensors(nest: Any) -> tuple[Any, list[tf.Tensor]]:
    """The nest with specs in place of its tensors, and the tensors."""
    tensors = [value for value in tf.nest.flatten(nest) if tf.is_tensor(value)]
    specs = tf.nest.map_structure(lambda x: tf.TensorSpec(x.shape, x.dtype) if tf.is_tensor(x) else x, nest)
    return specs, tensors


def _with_tensors(specs: Any, tensors: Sequence[tf.Tensor]) -> Any:
    """The inverse of `_without_tensors`."""
    remaining = iter(tensors)
    return tf.nest.map_structure(lambda x: next(remaining) if isinstance(x, tf.TensorSpec) else x, specs)


def encode(compressor: Compressor, local_input: LocalInput, before: Sequence[tf.Tensor] = ()) -> EncodedShard:
    """Encodes all chunks into one payload, which is sent first. Its flag is up only if the flags `before` are, too."""
    native_format = native.in_use(compressor.native_format)
    if native_format is not None:
        return _encode_natively(native_format, compressor, local_input, before)
    # Without the tensors that encoding does not read, which would be arguments of the traced function.
    whole = [[chunk] for chunk in local_input.chunks]
    inputs = local_input._replace(pieces=whole, factors=None, has_foreign_residual=None)
    payload, contexts, residuals = _encode(compressor, inputs, list(before))
    return EncodedShard(payload, contexts, residuals, payload, lambda: flags.flag_of(payload))


def _encode_natively(
    native_format: native.NativeFormat, compressor: Compressor, local_input: LocalInput, before: Sequence[tf.Tensor]
) -> EncodedShard:
    nbytes = payload_bytes(compressor, local_input.shapes)
    payload, residuals, finite = native.encode(
        native_format,
        nbytes,
        local_input.pieces,
        local_input.residuals,
        local_input.decay,
        local_input.keep,
        local_input.seeds.local,
        local_input.first_chunk,
        flags.all_of(before) if before else True,
        flagged_bytes(nbytes),
    )
    residuals = residuals or [None] * local_input.num_chunks
    return EncodedShard(payload, local_input.shapes, residuals, payload, lambda: finite)


@_traced_once
def _encode(
    compressor: Compressor, local_input: LocalInput, before: Sequence[tf.Tensor]
) -> tuple[tf.Tensor, list[Any], list[tf.Tensor | None]]:
    encoded = [local_input.encode(compressor, i) for i in range(local_input.num_chunks)]
    return flags.join(encoded, before), [e.ctx for e in encoded], [e.residual for e in encoded]


def decode(
    compressor: Compressor,
    shapes: Sequence[Shape],
    payloads: Sequence[tf.Tensor],
    contexts: Sequence[Any],
    factor: tf.Tensor,
    shares: int = 1,
    joined: bool = False,
    summed: bool = False,
) -> list[tf.Tensor]:
    """Decodes payloads of these chunks, uint8 with their flags, to the sum of each chunk, times `factor`.

    The chunks are divided into `shares` of equal length. The payloads are those of all ranks for the first share, then
    for the next one. If `joined`, the result may be one tensor, all chunks end to end. If `summed`, the second payload
    of two ranks is the sum of both, modulo 256; only for native operations.
    """
    of_share, ranks = len(shapes) // shares, len(payloads) // shares
    native_format = native.in_use(compressor.native_format)
    if native_format is not None:
        nbytes = payload_bytes(compressor, shapes[:of_share])
        return native.decode(native_format, nbytes, payloads, shapes, factor, shares, joined, summed)
    chunks: list[tf.Tensor] = []
    for share in range(shares):
        part = slice(share * of_share, (share + 1) * of_share)
        of_ranks = payloads[share * ranks : (share + 1) * ranks]
        chunks += _decode(compressor, shapes[part], of_ranks, contexts[part], factor)
    return chunks


@_traced_once
def _decode(
    compressor: Compressor,
    shapes: Sequence[Shape],
    payloads: Sequence[tf.Tensor],
    contexts: Sequence[Any],
    factor: tf.Tensor,
) -> list[tf.Tensor]:
    layouts = [compressor.layout(shape) for shape in shapes]
    parts_of_chunks = zip(*(_payload.take(payload, layouts) for payload in payloads))
    return [decode_sum(compressor, parts, ctx, factor) for parts, ctx in zip(parts_of_chunks, contexts)]


def decode_sum(
    compressor: Compressor, parts_of_ranks: Sequence[Sequence[tf.Tensor]], ctx: Any, factor: tf.Tensor
) -> tf.Tensor:
    """Decodes one chunk: the sum of the parts of all ranks, in their order, times `factor`."""
    groups = (parts_of_ranks[i : i + RANKS_PER_KERNEL] for i in range(0, len(parts_of_ranks), RANKS_PER_KERNEL))
    return functools.reduce(operator.add, (compressor.decode_sum(list(group), ctx, factor) for group in groups))
