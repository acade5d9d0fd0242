"""Every rank gets every rank's payload, and sums what they decode to.

For payloads that must not be summed as they are. All ranks decode the same payloads in the same order, so
their results are the same to the bit.

1. Each rank encodes its pieces and joins what comes of it into one payload.
2. Allgather (ring: Thakur, Rabenseifner and Gropp 2005).
3. Each rank decodes and sums.
"""

from __future__ import annotations

from collections.abc import Sequence

from .. import payload as _payload
from ..compressors import Compressor
from .common import (
    Group,
    Reduced,
    Shape,
    Share,
    all_of,
    decode_sum,
    factor,
    flag_of,
    flagged_bytes,
    with_flag,
)
from .common import allgather as _allgather


def reduce(compressor: Compressor, share: Share, scale: float, group: Group) -> Reduced:
    """Sums the ranks' pieces, times `scale`."""
    encoded = [share.encode(compressor, i) for i in range(len(share.pieces))]
    payload = with_flag([part for e in encoded for part in e.parts], all_of([e.finite for e in encoded]))
    gathered = _allgather(payload, group)
    length = payload.shape[0]
    ok = all_of([flag_of(gathered, (rank + 1) * length) for rank in range(group.size)])
    times = factor(scale, ok)
    pieces, start = [], 0
    for piece, e in zip(share.pieces, encoded):
        layout = compressor.layout(tuple(piece.shape.as_list()))
        ranks = [_payload.take(gathered, layout, rank * length + start) for rank in range(group.size)]
        pieces.append(decode_sum(compressor, ranks, e.ctx, times))
        start += _payload.nbytes(layout)
    return Reduced(pieces, [e.residual for e in encoded], ok)


def bytes_sent(compressor: Compressor, shapes: Sequence[Shape], ranks: int) -> int:
    """What each rank of a ring sends: n - 1 payloads."""
    return (ranks - 1) * flagged_bytes(sum(_payload.nbytes(compressor.layout(shape)) for shape in shapes))
