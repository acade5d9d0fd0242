"""Every rank gets every rank's payload, and sums what they decode to.

For payloads that must not be summed as they are. All ranks decode the same payloads in the same order, so
their results are the same to the bit.

1. Each rank encodes its pieces and joins what comes of it into one payload.
2. Allgather (ring: Thakur, Rabenseifner and Gropp 2005; between two ranks by other means, see `common`).
3. Each rank decodes and sums.
"""

from __future__ import annotations

from collections.abc import Sequence

from .. import payload as _payload
from ..compressors import Compressor
from . import common
from .common import Group, Reduced, Shape, Share


def reduce(compressor: Compressor, share: Share, scale: float, group: Group) -> Reduced:
    """Sums the ranks' pieces, times `scale`."""
    encoded = [share.encode(compressor, i) for i in range(len(share.pieces))]
    finite = common.all_of([e.finite for e in encoded])
    outgoing = common.with_flag([part for e in encoded for part in e.parts], finite)
    payloads = common.allgather(outgoing, group)
    ok = common.all_of([common.flag_of(payload) for payload in payloads])
    factor = common.factor(scale, ok)
    pieces, start = [], 0
    for piece, e in zip(share.pieces, encoded):
        layout = compressor.layout(tuple(piece.shape.as_list()))
        ranks = [_payload.take(payload, layout, start) for payload in payloads]
        pieces.append(common.decode_sum(compressor, ranks, e.ctx, factor))
        start += _payload.nbytes(layout)
    return Reduced(pieces, [e.residual for e in encoded], ok, outgoing)


def bytes_sent(compressor: Compressor, shapes: Sequence[Shape], ranks: int) -> int:
    """What each rank of a ring sends: n - 1 payloads."""
    nbytes = sum(_payload.nbytes(compressor.layout(shape)) for shape in shapes)
    return (ranks - 1) * common.flagged_bytes(nbytes)
