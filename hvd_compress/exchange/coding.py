"""Encoding and decoding all chunks of a bucket, as one function each that buckets of the same shape share.

So that they are traced once: with several candidates for each bucket, tracing took 13 s for ResNet-50, and takes 6.
They are inlined. As functions of their own the step took 15 to 25% longer.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Callable, NamedTuple

import tensorflow as tf

from ..compressors import Compressor, Seeds
from ..compressors import payload as _payload
from . import common
from .common import LocalInput, Shape

Join = Callable[[Sequence[Any], tf.Tensor], tf.Tensor]


class Coded(NamedTuple):
    """A bucket, encoded."""

    outgoing: tf.Tensor  # what is sent
    residuals: list[tf.Tensor | None]
    contexts: list[Any]  # of each chunk, for decoding


def encode(compressor: Compressor, share: LocalInput, join: Join) -> Coded:
    """Encodes all chunks of a rank's share.

    Args:
        compressor: The compressor.
        share: The chunks, residuals and seeds.
        join: Makes what is sent of the chunks' encodings (a list of `Encoded`) and whether all are finite.
    """
    if not _is_shared(compressor):
        outgoing, left, contexts = _encode(compressor, share, join)
        return Coded(outgoing, left, contexts)
    shapes = tuple(tuple(chunk.shape.as_list()) for chunk in share.chunks)
    kinds = tuple(None if residual is None else residual.dtype for residual in share.residuals)
    function, structure, places = _encoder(compressor, shapes, kinds, share.decay, share.keep, join)
    kept = [residual for residual in share.residuals if residual is not None]
    outgoing, left, tensors = function(list(share.chunks), kept, share.seeds.shared, share.seeds.local)
    contexts = _filled(structure, places, tensors)
    return Coded(outgoing, list(left) if share.keep else [None] * len(shapes), contexts)


def decode(
    compressor: Compressor,
    shapes: Sequence[Shape],
    payloads: Sequence[tf.Tensor],
    contexts: Sequence[Any],
    factor: tf.Tensor,
) -> list[tf.Tensor]:
    """The chunks, each the sum of what the payloads (uint8, joined by `common.with_flag`) hold, times `factor`."""
    if not _is_shared(compressor):
        return _decode(compressor, shapes, payloads, contexts, factor)
    tensors = [value for value in tf.nest.flatten(contexts) if tf.is_tensor(value)]
    statics = tuple(None if tf.is_tensor(value) else value for value in tf.nest.flatten(contexts))
    lengths = tuple(payload.shape[0] for payload in payloads)
    specs = tuple((tuple(tensor.shape.as_list()), tensor.dtype) for tensor in tensors)
    structure = _Structure(tf.nest.map_structure(lambda _: 0, list(contexts)))
    function = _decoder(compressor, tuple(shapes), lengths, structure, statics, specs)
    return list(function(list(payloads), tensors, factor))


def _is_shared(compressor: Compressor) -> bool:
    """Whether the same function may serve several buckets: what users write may keep something from call to call."""
    return compressor.pure


def _encode(
    compressor: Compressor, share: LocalInput, join: Join
) -> tuple[tf.Tensor, list[tf.Tensor | None], list[Any]]:
    encoded = [share.encode(compressor, i) for i in range(len(share.chunks))]
    outgoing = join(encoded, common.all_of([e.finite for e in encoded]))
    return outgoing, [e.residual for e in encoded], [e.ctx for e in encoded]


def _decode(
    compressor: Compressor,
    shapes: Sequence[Shape],
    payloads: Sequence[tf.Tensor],
    contexts: Sequence[Any],
    factor: tf.Tensor,
) -> list[tf.Tensor]:
    layouts = [compressor.layout(shape) for shape in shapes]
    of_ranks = zip(*(_payload.take(payload, layouts) for payload in payloads))
    return [common.decode_sum(compressor, ranks, ctx, factor) for ranks, ctx in zip(of_ranks, contexts)]


@functools.lru_cache(maxsize=256)
def _encoder(
    compressor: Compressor,
    shapes: tuple[Shape, ...],
    kinds: tuple[tf.DType | None, ...],
    decay: float,
    keep: bool,
    join: Join,
) -> tuple[Any, Any, list[Any]]:
    """The function, the contexts' structure, and in it the values that are no tensors (None for those that are)."""
    found: list[Any] = []

    def run(chunks: list[tf.Tensor], kept: list[tf.Tensor], shared: tf.Tensor, local: tf.Tensor) -> Any:
        some = iter(kept)
        residuals = [None if kind is None else next(some) for kind in kinds]
        share = LocalInput(chunks, residuals, decay, keep, Seeds(shared, local))
        outgoing, left, contexts = _encode(compressor, share, join)
        flat = tf.nest.flatten(contexts)
        found[:] = [
            tf.nest.map_structure(lambda _: 0, contexts),
            [None if tf.is_tensor(value) else value for value in flat],
        ]
        return outgoing, left if keep else [], [value for value in flat if tf.is_tensor(value)]

    function = _function(
        run,
        [tf.TensorSpec(shape, tf.float32) for shape in shapes],
        [tf.TensorSpec(shape, kind) for shape, kind in zip(shapes, kinds) if kind is not None],
        tf.TensorSpec([], tf.int32),
        tf.TensorSpec([], tf.int32),
    )
    return function, found[0], found[1]


class _Structure:
    """A nest as a key."""

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
    statics: tuple[Any, ...],
    specs: tuple[tuple[Shape, tf.DType], ...],
) -> Any:
    def run(payloads: list[tf.Tensor], tensors: list[tf.Tensor], factor: tf.Tensor) -> list[tf.Tensor]:
        contexts = _filled(structure.nest, list(statics), tensors)
        return _decode(compressor, shapes, payloads, contexts, factor)

    return _function(
        run,
        [tf.TensorSpec([length], tf.uint8) for length in lengths],
        [tf.TensorSpec(shape, dtype) for shape, dtype in specs],
        tf.TensorSpec([], tf.float32),
    )


def _filled(structure: Any, values: Sequence[Any], tensors: Sequence[tf.Tensor]) -> Any:
    some = iter(tensors)
    return tf.nest.pack_sequence_as(structure, [next(some) if value is None else value for value in values])


def _function(run: Callable[..., Any], *specs: Any) -> Any:
    with tf.init_scope():
        function = tf.function(run, autograph=False)
        return function.get_concrete_function(*specs)
