"""Every rank gets every rank's payload, and sums what they decode to.

For payloads that must not be summed as they are. All ranks decode the same payloads in the same order, so
their results are the same to the bit.

1. Each rank encodes its chunks and joins what comes of it into one payload.
2. Allgather (ring: Thakur, Rabenseifner and Gropp 2005; between two ranks by other means, see `common`).
3. Each rank decodes and sums.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from ..compressors import Compressor, Encoded
from . import coding, common
from .common import EncodedShard, Group, LocalInput, Reduction
from .volume import allgather as bytes_sent  # noqa: F401  (what each rank sends)


def reduce(compressor: Compressor, share: LocalInput, scale: float, group: Group) -> Reduction:
    """Sums the ranks' chunks, times `scale`."""
    found = exchange(compressor, share, group)
    payloads = common.allgather(found.payload, group)
    ok = common.all_of([common.flag_of(payload) for payload in payloads])
    chunks = decode(compressor, share.shapes, payloads, found.contexts, common.factor(scale, ok))
    return Reduction(chunks, found.residuals, ok, found.outgoing, payloads[group.rank - 1])


def exchange(compressor: Compressor, share: LocalInput, group: Group) -> EncodedShard:
    """All of it but the allgather and decoding."""
    del group
    coded = coding.encode(compressor, share, _join)
    return EncodedShard(coded.outgoing, coded.contexts, coded.residuals, coded.outgoing)


decode = coding.decode


def _join(encoded: Sequence[Encoded], finite: tf.Tensor) -> tf.Tensor:
    return common.with_flag([part for e in encoded for part in e.parts], finite)
