"""What the patterns share."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import horovod.tensorflow as hvd
import tensorflow as tf

from ..compressors import Compressor, Encoded, Seeds
from ..compressors import payload as _payload
from ..formats.base import Shape as Shape
from ..kernels.compile import compiled, fed_back
from .send_order import at_once
from .volume import flagged_bytes

# Ranks whose payloads one kernel decodes and sums; more would only make it longer to compile.
AT_ONCE = 8


@dataclasses.dataclass(frozen=True)
class Group:
    """Between whom, and under which name.

    Attributes:
        process_set: The ranks.
        name: Of the collectives, the same on all ranks; None for Horovod's choice.
        ignore_name_scope: Use `name` without the outer name scope.
    """

    process_set: Any
    name: str | None
    ignore_name_scope: bool = False

    @property
    def size(self) -> int:
        """The number of ranks."""
        return int(self.process_set.size())

    @property
    def rank(self) -> int:
        """This process's place among them."""
        return int(self.process_set.rank())

    def keywords(self, phase: str) -> dict[str, Any]:
        """What a collective of Horovod's is told; `phase` keeps the names of several apart."""
        return {
            "process_set": self.process_set,
            "name": self.name and self.name + phase,
            "ignore_name_scope": self.ignore_name_scope,
        }

    def among(self, process_set: Any, what: str) -> Group:
        """Some of the ranks; `what` keeps the names of their collectives apart from the others'."""
        return dataclasses.replace(self, process_set=process_set, name=self.name and self.name + what)


class LocalInput(NamedTuple):
    """What a rank brings to the reduction of one bucket."""

    chunks: Sequence[tf.Tensor]  # float32, of static shapes
    residuals: Sequence[tf.Tensor | None]  # one for each chunk, in its shape
    decay: float  # of the residuals
    keep: bool  # whether new residuals are wanted
    seeds: Seeds
    factors: tf.Tensor | None = None  # of `low_rank`, float32, the same on all ranks
    # Of `two_level`, bool scalar on the host: whether residuals of what others carry may be other than zero.
    has_foreign_residual: tf.Tensor | None = None

    def sum(self, i: int) -> tf.Tensor:
        """Piece `i` with its residual."""
        kept = self.residuals[i]
        return self.chunks[i] if kept is None else fed_back(self.chunks[i], kept, self.decay)

    @property
    def shapes(self) -> list[Shape]:
        """Of the chunks."""
        return [tuple(chunk.shape.as_list()) for chunk in self.chunks]

    def encode(self, compressor: Compressor, i: int) -> Encoded:
        """Encodes chunk `i`."""
        seeds = self.seeds._replace(chunk=i)
        return compressor.encode(self.chunks[i], seeds, self.residuals[i], self.decay, self.keep)


class EncodedShard(NamedTuple):
    """What is left of a pattern's exchange is an allgather, and decoding."""

    payload: tf.Tensor  # of this rank for all, as `with_flag` makes it
    contexts: list[Any]  # of each chunk, for decoding
    residuals: list[tf.Tensor | None]
    outgoing: tf.Tensor  # as of `Reduction`


class Reduction(NamedTuple):
    """What came of it."""

    chunks: list[tf.Tensor]  # the scaled sum, the same on all ranks
    residuals: list[tf.Tensor | None]
    ok: tf.Tensor  # bool scalar: whether all gradients of all ranks were finite
    outgoing: tf.Tensor  # what this rank sends first, for what should run after its encoding
    incoming: tf.Tensor  # what arrives last
    early: tf.Tensor | None = None  # there before `outgoing`, when the next bucket may begin already
    factors: tf.Tensor | None = None  # the new ones of `low_rank`
    # Of a second exchange: what must have arrived of the first one, and what is sent then.
    between: tuple[tf.Tensor, tf.Tensor] | None = None
    has_foreign_residual: bool = (
        True  # whether there may be residuals of chunks that in two levels another rank carries
    )


def with_flag(parts: Sequence[tf.Tensor], finite: tf.Tensor) -> tf.Tensor:
    """The parts and the flag as one payload, uint8 [`flagged_bytes`]."""
    length = _payload.nbytes([tf.TensorSpec(part.shape, part.dtype) for part in parts])
    flag = tf.fill([flagged_bytes(length) - length], tf.cast(finite, tf.uint8))
    return _payload.join([*parts, flag])


def flag_of(payload: tf.Tensor) -> tf.Tensor:
    """Whether the payload's flag is up."""
    return payload[-1] == 1


def all_of(flags: Sequence[tf.Tensor]) -> tf.Tensor:
    """Whether all flags, bool scalars, are up."""
    return flags[0] if len(flags) == 1 else tf.reduce_all(tf.stack(list(flags)))


def factor(scale: float, ok: tf.Tensor) -> tf.Tensor:
    """What the sum is multiplied by: NaN unless `ok`."""
    return tf.where(ok, tf.constant(scale, tf.float32), tf.constant(math.nan, tf.float32))


def decode_sum(
    compressor: Compressor, ranks: Sequence[Sequence[tf.Tensor]], ctx: Any, scale: tf.Tensor
) -> tf.Tensor:
    """The scaled sum of the parts of all ranks, in their order."""
    total = None
    for first in range(0, len(ranks), AT_ONCE):
        part = compressor.decode_sum(list(ranks[first : first + AT_ONCE]), ctx, scale)
        total = part if total is None else total + part
    return total


def allgather(payload: tf.Tensor, group: Group, phase: str = "_gather") -> list[tf.Tensor]:
    """The payloads, uint8 [nbytes] on each rank, of all ranks in their order."""
    if group.size == 2:
        theirs = _difference(_total(payload, group, phase), payload)
        return [payload, theirs] if group.rank == 0 else [theirs, payload]
    return in_parts(allgather_joined(payload, group, phase), group.size, payload.shape[0])


def allgather_joined(payload: tf.Tensor, group: Group, phase: str = "_gather") -> tf.Tensor:
    """The same end to end, uint8 [ranks * nbytes], in one chunk of memory."""
    if group.size == 2:
        return tf.reshape(_in_order(_total(payload, group, phase), payload, group.rank), [-1])
    gathered = hvd.allgather(at_once(payload), **group.keywords(phase))
    return tf.ensure_shape(gathered, [group.size * payload.shape[0]])


def _total(payload: tf.Tensor, group: Group, phase: str) -> tf.Tensor:
    """The sum of two ranks' payloads.

    Bytes add up modulo 256, so that one's own taken off leaves the other's. As many bytes as an allgather would send,
    but in an allreduce's small, pipelined chunks: 241 ms against 463 for 26 MB at 1 Gbit/s, where Gloo's allgather
    mostly fills one direction of the link after the other.
    """
    return hvd.allreduce(at_once(payload), op=hvd.Sum, **group.keywords(phase))


@compiled  # TensorFlow's own subtraction of bytes is not vectorized: 12 ms for 26 MB against 1
def _difference(total: tf.Tensor, own: tf.Tensor) -> tf.Tensor:
    return total - own


@compiled  # without a concatenation, which would be a pass of its own
def _in_order(total: tf.Tensor, own: tf.Tensor, rank: int) -> tf.Tensor:
    is_own = tf.range(2)[:, None] == rank
    return tf.where(is_own, own, total - own)


def joined(parts: Sequence[tf.Tensor]) -> tf.Tensor:
    """Vectors end to end; a single one as it is."""
    return parts[0] if len(parts) == 1 else tf.concat(list(parts), 0)


def alltoall(payloads: Sequence[tf.Tensor], group: Group, phase: str) -> list[tf.Tensor]:
    """Sends one payload, uint8 [nbytes], to each other rank; returns theirs. Both in the order of ranks."""
    return scatter(joined(payloads), group, phase)


def scatter(parts: tf.Tensor, group: Group, phase: str) -> list[tf.Tensor]:
    """Sends each other rank its part of `parts`, any dtype [(ranks - 1) * length]; returns theirs, [length] each."""
    length = parts.shape[0] // (group.size - 1)
    with tf.device("CPU"):  # where Horovod reads them
        splits = tf.constant([0 if rank == group.rank else length for rank in range(group.size)], tf.int32)
    received = hvd.alltoall(at_once(parts), splits=splits, **group.keywords(phase))
    received = received[0] if isinstance(received, (tuple, list)) else received
    return in_parts(received, group.size - 1, length)


def in_parts(tensor: tf.Tensor, count: int, length: int) -> list[tf.Tensor]:
    """So many parts, [length] each, of a tensor, [count * length]."""
    tensor = tf.ensure_shape(tensor, [count * length])
    return [tf.strided_slice(tensor, [i * length], [(i + 1) * length], [1]) for i in range(count)]
