"""Allgather: every rank gets the payload of every rank, and sums what they decode to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..formats.base import Shape
from . import volume
from .collective import Phases
from .gathering import GatheringCollective

if TYPE_CHECKING:
    from ..compressors import Compressor
    from .coding import EncodedShard
    from .group import Group
    from .local_input import LocalInput


class Allgather(GatheringCollective):
    """One allgather of all payloads.

    1. Each rank encodes its chunks and joins them into one payload.
    2. Allgather (ring: Thakur, Rabenseifner and Gropp 2005; between two ranks an allreduce, see `transfers`).
    3. Each rank decodes all payloads and sums them.
    """

    name = "allgather"

    def bytes_sent(self, compressor: Any, shapes: Sequence[Shape], ranks: int) -> int:
        """The bytes of a ring: n - 1 payloads."""
        return (ranks - 1) * volume.flagged_bytes(volume.payload_bytes(compressor, shapes))

    def phases(self, nbytes: float, payload: float, ranks: int) -> Phases:
        """One allgather; the payloads of all ranks are decoded."""
        return Phases([nbytes], [("allgather", payload)], [(nbytes, ranks)])

    def encode_shard(self, compressor: Compressor, local_input: LocalInput, group: Group) -> EncodedShard:
        """Step 1."""
        from . import coding

        return coding.encode(compressor, local_input)
