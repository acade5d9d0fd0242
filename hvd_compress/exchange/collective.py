"""What a collective is: the bytes it sends, its cost phases, its `encode` and its `exchange`."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from ..formats.base import Shape

if TYPE_CHECKING:
    import tensorflow as tf

    from ..compressors import Compressor
    from .coding import EncodedShard
    from .group import Group
    from .local_input import LocalInput


class Phases(NamedTuple):
    """What one rank does for a bucket, for the cost model; bytes may be fractions.

    Primitive collectives are "allreduce", "allgather", "alltoall" and "reduce_scatter", each with the bytes that one
    rank contributes (see `cost.topology`).
    """

    encoded: Sequence[float]  # bytes of float32 gradient that each encoding takes
    transfers: Sequence[tuple[str, float]]  # primitive collectives, one after the other
    decoded: Sequence[tuple[float, int]]  # bytes of float32 gradient and number of payloads of each decoding
    inside: Sequence[tuple[str, float]] = ()  # primitive collectives between the workers of one host


class Reduction(NamedTuple):
    """The result of a collective on one rank."""

    # The scaled sums, the same on all ranks: chunks, or several of them end to end, see `LocalInput.joined`.
    chunks: list[tf.Tensor]
    residuals: list[tf.Tensor | None]  # the new ones, one for each chunk
    ok: tf.Tensor  # bool scalar: whether all gradients of all ranks were finite
    outgoing: tf.Tensor  # what this rank sends first: ready once the bucket is encoded
    incoming: tf.Tensor  # what this rank receives last
    next_can_start: tf.Tensor | None = None  # ready before `outgoing`, if the next bucket can start that early
    factors: tf.Tensor | None = None  # the new ones, of `FactorAllreduce`
    # With two exchanges: what the first one receives, and what the second one sends.
    second_exchange: tuple[tf.Tensor, tf.Tensor] | None = None
    # Whether there may be residuals of chunks that another rank sends between hosts.
    has_foreign_residual: bool = True


class Collective(abc.ABC):
    """A way to sum the chunks of a bucket over the ranks.

    Subclasses define `fits`, `bytes_sent`, `phases`, `encode` and `exchange`. A collective that needs other ranks to
    encode defines `reduce` instead of the last two, and cannot be delayed. Subclasses also define `leaving_host` if a
    host sends more than one rank of a ring does. Add a new collective to `choice.FLAT`; the exchange and the cost model
    then use it.

    A compressor is a `hvdc.Compressor` or, where only numbers are needed, a format (`hvd_compress.formats`).

    Attributes:
        name: Its name in `hvdc.CostModel`.
        hierarchical: Whether it sums within each host first.
        splits_bucket: Whether each rank reduces its own share of the chunks, so that their number must be a multiple
            of the number of ranks.
    """

    name: ClassVar[str]
    hierarchical: ClassVar[bool] = False
    splits_bucket: ClassVar[bool] = False

    @abc.abstractmethod
    def fits(self, compressor: Any, shapes: Sequence[Shape], ranks: int) -> bool:
        """Whether it can reduce chunks of these shapes between so many ranks."""

    @abc.abstractmethod
    def bytes_sent(self, compressor: Any, shapes: Sequence[Shape], ranks: int) -> int:
        """Bytes that each rank sends; between hosts only if it is `hierarchical`."""

    def leaving_host(self, compressor: Any, shapes: Sequence[Shape], hosts: int, workers: int) -> int:
        """Bytes that all workers of a host send to other hosts.

        Ranks of one host are neighbours in the ring, so only one of them sends to another host.
        """
        return self.bytes_sent(compressor, shapes, hosts * workers)

    @abc.abstractmethod
    def phases(self, nbytes: float, payload: float, ranks: int) -> Phases:
        """The cost phases of a bucket of `nbytes` of float32 gradient, which is encoded to `payload` bytes."""

    def encode(self, compressor: Compressor, local_input: LocalInput, group: Group) -> EncodedShard:
        """Encodes what this rank sends first, without the other ranks."""
        raise NotImplementedError

    def exchange(
        self, compressor: Compressor, encoded: EncodedShard, local_input: LocalInput, scale: float, group: Group
    ) -> Reduction:
        """Exchanges what `encode` returned in this step, or in an earlier one, and decodes.

        Of `local_input`, it reads only `shapes`, `seeds` and `keep`: nothing that waits for the step's gradients.
        """
        raise NotImplementedError

    def reduce(self, compressor: Compressor, local_input: LocalInput, scale: float, group: Group) -> Reduction:
        """Sums the chunks over the ranks of the group, and multiplies the sums by `scale`."""
        encoded = self.encode(compressor, local_input, group)
        return self.exchange(compressor, encoded, local_input, scale, group)
