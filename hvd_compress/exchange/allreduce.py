"""Payloads that may be summed: one allreduce (ring: Thakur, Rabenseifner and Gropp 2005)."""

from __future__ import annotations

from collections.abc import Sequence

import horovod.tensorflow as hvd
import tensorflow as tf

from .. import payload as _payload
from ..compressors import Compressor
from .common import Group, Reduced, Shape, Share, all_of, factor


def reduce(compressor: Compressor, share: Share, scale: float, group: Group) -> Reduced:
    """Sums the ranks' pieces, times `scale`; their payloads are one float32 part each."""
    encoded = [share.encode(compressor, i) for i in range(len(share.pieces))]
    values = [tf.reshape(e.parts[0], [-1]) for e in encoded]
    broken = tf.cast(~all_of([e.finite for e in encoded]), tf.float32)[None]
    outgoing = tf.concat([*values, broken], 0)
    total = hvd.allreduce(outgoing, op=hvd.Sum, **group.keywords(""))
    ok = total[-1] == 0.0
    times = factor(scale, ok)
    pieces, start = [], 0
    for e, value in zip(encoded, values):
        part = tf.reshape(total[start : start + value.shape[0]], e.parts[0].shape)
        pieces.append(compressor.decode_sum([[part]], e.ctx, times))
        start += value.shape[0]
    return Reduced(pieces, [e.residual for e in encoded], ok, outgoing, total)


def bytes_sent(compressor: Compressor, shapes: Sequence[Shape], ranks: int) -> int:
    """What each rank of a ring sends, the flag included."""
    return ring_bytes(sum(_payload.nbytes(compressor.layout(shape)) for shape in shapes) + 4, ranks)


def ring_bytes(nbytes: int, ranks: int) -> int:
    """What each rank of a ring sends to allreduce `nbytes`: 2 (n - 1) / n of them."""
    return round(2 * (ranks - 1) / ranks * nbytes)
