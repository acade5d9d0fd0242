"""Encodes and decodes all chunks of a bucket.

Buckets of the same shapes share one traced function for each: with several candidates for each bucket, tracing
ResNet-50 took 13 s without that, and takes 6 s. TensorFlow inlines these functions. Where it did not, a step took 15 to
25% longer.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Callable, NamedTuple

import tensorflow as tf

from ..compressors import Compressor, Seeds
from ..compressors import payload as _payload
from ..formats.base import Shape
from . import flags
from .local_input import LocalInput

# One kernel decodes and sums the payloads of so many ranks at most; with more it would only take longer to compile.
RANKS_PER_KERNEL = 8


class EncodedBucket(NamedTuple):
    """All chunks of a bucket, encoded."""

    payload: tf.Tensor  # uint8, with its flag
    residuals: list[tf.Tensor | None]
    contexts: list[Any]  # of each chunk, for decoding


def encode(compressor: Compressor, local_input: LocalInput) -> EncodedBucket:
    """Encodes all chunks into one payload."""
    if not compressor.pure:
        # It may keep something from call to call, so each bucket needs a trace of its own.
        return EncodedBucket(*_encode(compressor, local_input))
    shapes = tuple(tuple(chunk.shape.as_list()) for chunk in local_input.chunks)
    residual_dtypes = tuple(None if residual is None else residual.dtype for residual in local_input.residuals)
    function, structure, constants = _encoder(compressor, shapes, residual_dtypes, local_input.decay, local_input.keep)
    residuals = [residual for residual in local_input.residuals if residual is not None]
    seeds = local_input.seeds
    payload, new_residuals, tensors = function(list(local_input.chunks), residuals, seeds.shared, seeds.local)
    contexts = _with_tensors(structure, constants, tensors)
    return EncodedBucket(payload, list(new_residuals) if local_input.keep else [None] * len(shapes), contexts)


def decode(
    compressor: Compressor,
    shapes: Sequence[Shape],
    payloads: Sequence[tf.Tensor],
    contexts: Sequence[Any],
    factor: tf.Tensor,
) -> list[tf.Tensor]:
    """Decodes payloads of the whole bucket, uint8 with their flags, to the sum of each chunk, times `factor`."""
    if not compressor.pure:
        return _decode(compressor, shapes, payloads, contexts, factor)
    tensors = [value for value in tf.nest.flatten(contexts) if tf.is_tensor(value)]
    constants = tuple(None if tf.is_tensor(value) else value for value in tf.nest.flatten(contexts))
    lengths = tuple(payload.shape[0] for payload in payloads)
    specs = tuple((tuple(tensor.shape.as_list()), tensor.dtype) for tensor in tensors)
    structure = _Structure(tf.nest.map_structure(lambda _: 0, list(contexts)))
    function = _decoder(compressor, tuple(shapes), lengths, structure, constants, specs)
    return list(function(list(payloads), tensors, factor))


def decode_sum(
    compressor: Compressor, parts_of_ranks: Sequence[Sequence[tf.Tensor]], ctx: Any, factor: tf.Tensor
) -> tf.Tensor:
    """Decodes one chunk: the sum of the parts of all ranks, in their order, times `factor`."""
    total = None
    for first in range(0, len(parts_of_ranks), RANKS_PER_KERNEL):
        part = compressor.decode_sum(list(parts_of_ranks[first : first + RANKS_PER_KERNEL]), ctx, factor)
        total = part if total is None else total + part
    return total


def _encode(compressor: Compressor, local_input: LocalInput) -> tuple[tf.Tensor, list[tf.Tensor | None], list[Any]]:
    encoded = [local_input.encode(compressor, i) for i in range(len(local_input.chunks))]
    finite = flags.all_of([e.finite for e in encoded])
    payload = flags.with_flag([part for e in encoded for part in e.parts], finite)
    return payload, [e.residual for e in encoded], [e.ctx for e in encoded]


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


@functools.lru_cache(maxsize=256)
def _encoder(
    compressor: Compressor,
    shapes: tuple[Shape, ...],
    residual_dtypes: tuple[tf.DType | None, ...],
    decay: float,
    keep: bool,
) -> tuple[Any, Any, list[Any]]:
    """The function, the structure of the contexts, and their constants: None where the function returns a tensor."""
    structure, constants = None, []

    def run(chunks: list[tf.Tensor], given_residuals: list[tf.Tensor], shared: tf.Tensor, local: tf.Tensor) -> Any:
        nonlocal structure, constants
        remaining = iter(given_residuals)
        residuals = [None if dtype is None else next(remaining) for dtype in residual_dtypes]
        local_input = LocalInput(chunks, residuals, decay, keep, Seeds(shared, local))
        payload, new_residuals, contexts = _encode(compressor, local_input)
        values = tf.nest.flatten(contexts)
        structure = tf.nest.map_structure(lambda _: 0, contexts)
        constants = [None if tf.is_tensor(value) else value for value in values]
        return payload, new_residuals if keep else [], [value for value in values if tf.is_tensor(value)]

    function = _traced(
        run,
        [tf.TensorSpec(shape, tf.float32) for shape in shapes],
        [tf.TensorSpec(shape, dtype) for shape, dtype in zip(shapes, residual_dtypes) if dtype is not None],
        tf.TensorSpec([], tf.int32),
        tf.TensorSpec([], tf.int32),
    )
    return function, structure, constants


class _Structure:
    """A nest that can be part of a cache's key."""

    def __init__(self, nest: Any) -> None:
        self.nest = nest
        self._key = repr(nest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Structure) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


@functools.lru_cache(maxsize=256)
def _decoder(
    compressor: Compressor,
    shapes: tuple[Shape, ...],
    lengths: tuple[int, ...],
    structure: _Structure,
    constants: tuple[Any, ...],
    specs: tuple[tuple[Shape, tf.DType], ...],
) -> Any:
    def run(payloads: list[tf.Tensor], tensors: list[tf.Tensor], factor: tf.Tensor) -> list[tf.Tensor]:
        contexts = _with_tensors(structure.nest, constants, tensors)
        return _decode(compressor, shapes, payloads, contexts, factor)

    return _traced(
        run,
        [tf.TensorSpec([length], tf.uint8) for length in lengths],
        [tf.TensorSpec(shape, dtype) for shape, dtype in specs],
        tf.TensorSpec([], tf.float32),
    )


def _with_tensors(structure: Any, constants: Sequence[Any], tensors: Sequence[tf.Tensor]) -> Any:
    """A nest of the constants, with the tensors in place of None."""
    remaining = iter(tensors)
    values = [next(remaining) if value is None else value for value in constants]
    return tf.nest.pack_sequence_as(structure, values)


def _traced(run: Callable[..., Any], *specs: Any) -> Any:
    with tf.init_scope():
        function = tf.function(run, autograph=False)
        return function.get_concrete_function(*specs)
