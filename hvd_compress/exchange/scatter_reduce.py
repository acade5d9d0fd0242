"""Each rank reduces its part of the bucket, and sends what came of it to all.

What a rank sends does not grow with the number of ranks: 2 (n - 1) / n payloads, where an allgather takes
n - 1 (as Rabenseifner's allreduce does with sums; ZeRO++, Wang et al. 2023, section 3.3, for quantized codes).
For sparse payloads this routes each entry to the owner of its range, who sums and selects again (as
Ok-Topk, Li and Hoefler 2022).

1. Each rank encodes all pieces but its own, and sends each to its owner (alltoall).
2. The owner adds what it decodes to its own share, which is not compressed for this, and encodes the sum.
3. Allgather of these; each rank decodes.

The second encoding loses too. The owner keeps that loss in its residual for these pieces, where its own share
has no loss of its own to keep: one residual serves both, and over all ranks nothing is lost.
"""

from __future__ import annotations

from collections.abc import Sequence

import horovod.tensorflow as hvd
import tensorflow as tf

from .. import payload as _payload
from .. import residual
from ..compressors import Compressor, Seeds
from ..kernels import noise
from .common import (
    Group,
    Reduced,
    Shape,
    Share,
    all_of,
    allgather,
    decode_sum,
    factor,
    flag_of,
    flagged_bytes,
    with_flag,
)


def reduce(compressor: Compressor, share: Share, scale: float, group: Group) -> Reduced:
    """Sums the ranks' pieces, times `scale`; the pieces are of one shape, and a multiple of the ranks."""
    each = len(share.pieces) // group.size
    mine = range(group.rank * each, (group.rank + 1) * each)
    layout = compressor.layout(tuple(share.pieces[0].shape.as_list()))
    step = _payload.nbytes(layout)
    length = flagged_bytes(each * step)

    # What is never read of the own pieces' encoding is pruned from the graph.
    encoded = [share.encode(compressor, i) for i in range(len(share.pieces))]
    received = _alltoall(
        [
            with_flag(
                [part for e in encoded[owner * each : (owner + 1) * each] for part in e.parts],
                all_of([e.finite for e in encoded[owner * each : (owner + 1) * each]]),
            )
            for owner in range(group.size)
            if owner != group.rank
        ],
        group,
    )
    others = range(group.size - 1)
    flags = [flag_of(received, (rank + 1) * length) for rank in others]

    residuals = [e.residual for e in encoded]
    parts: list[tf.Tensor] = []
    for j, i in enumerate(mine):
        own = residual.add(share.pieces[i], share.residuals[i], share.decay)
        ranks = [_payload.take(received, layout, rank * length + j * step) for rank in others]
        rest = decode_sum(compressor, ranks, encoded[i].ctx, tf.constant(1.0))
        seeds = share.seeds_of(i)
        # Not the first encoding's noise again.
        seeds = Seeds(seeds.shared, noise.fold(seeds.local, -1))
        again = compressor.encode(rest, seeds, own, 1.0, share.keep)
        parts += again.parts
        flags.append(again.finite)
        residuals[i] = again.residual

    gathered = allgather(with_flag(parts, all_of(flags)), group, "_gather")
    ok = all_of([flag_of(gathered, (rank + 1) * length) for rank in range(group.size)])
    times = factor(scale, ok)
    pieces = []
    for i, e in enumerate(encoded):
        owner, j = divmod(i, each)
        piece = _payload.take(gathered, layout, owner * length + j * step)
        pieces.append(decode_sum(compressor, [piece], e.ctx, times))
    return Reduced(pieces, residuals, ok)


def _alltoall(payloads: Sequence[tf.Tensor], group: Group) -> tf.Tensor:
    """Sends one payload to each other rank; returns theirs, uint8 [(ranks - 1) * nbytes], in their order."""
    length = payloads[0].shape[0]
    with tf.device("CPU"):  # where Horovod reads them
        splits = tf.constant([0 if rank == group.rank else length for rank in range(group.size)], tf.int32)
    sent = tf.concat(list(payloads), 0)
    received = hvd.alltoall(sent, splits=splits, **group.keywords("_scatter"))
    received = received[0] if isinstance(received, (tuple, list)) else received
    return tf.ensure_shape(received, sent.shape)


def bytes_sent(compressor: Compressor, shapes: Sequence[Shape], ranks: int) -> int:
    """What each rank sends: n - 1 payloads of 1 / n of the bucket, twice."""
    part = len(shapes) // ranks * _payload.nbytes(compressor.layout(shapes[0]))
    return 2 * (ranks - 1) * flagged_bytes(part)
