"""Each rank reduces its part of the bucket, and sends what came of it to all.

What a rank sends does not grow with the number of ranks: 2 (n - 1) / n payloads, where an allgather takes
n - 1 (as Rabenseifner's allreduce does with sums; ZeRO++, Wang et al. 2023, section 3.3, for quantized codes).
For sparse payloads this routes each entry to the owner of its range, who sums and selects again (as
Ok-Topk, Li and Hoefler 2022).

1. Each rank encodes all chunks but its own, and sends each to its owner (alltoall).
2. The owner adds what it decodes to its own share, which is not compressed for this, and encodes the sum.
3. Allgather of these; each rank decodes.

The second encoding loses too. The owner keeps that loss in its residual for these chunks, where its own share
has no loss of its own to keep: one residual serves both, and over all ranks nothing is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ..compressors import Compressor
from ..compressors import error_feedback as residual
from ..compressors import payload as _payload
from . import common
from .common import EncodedShard, Group, LocalInput, Reduction, Shape
from .volume import scatter_reduce as bytes_sent  # noqa: F401  (what each rank sends)


def reduce(compressor: Compressor, share: LocalInput, scale: float, group: Group) -> Reduction:
    """Sums the ranks' chunks, times `scale`; the chunks are of one shape, and a multiple of the ranks."""
    found = exchange(compressor, share, group)
    payloads = common.allgather(found.payload, group)
    ok = common.all_of([common.flag_of(payload) for payload in payloads])
    chunks = decode(compressor, share.shapes, payloads, found.contexts, common.factor(scale, ok))
    return Reduction(chunks, found.residuals, ok, found.outgoing, payloads[group.rank - 1])


def exchange(compressor: Compressor, share: LocalInput, group: Group) -> EncodedShard:
    """All of it but the allgather and decoding: what this owner has encoded, and a flag that is down if any is."""
    each = len(share.chunks) // group.size
    layout = compressor.layout(share.shapes[0])

    # What is never read of the own chunks' encoding is pruned from the graph.
    encoded = [share.encode(compressor, i) for i in range(len(share.chunks))]
    outgoing = []
    for owner in range(group.size):
        part = encoded[owner * each : (owner + 1) * each]
        if owner != group.rank:
            finite = common.all_of([e.finite for e in part])
            outgoing.append(common.with_flag([p for e in part for p in e.parts], finite))
    sent = common.joined(outgoing)
    received = common.scatter(sent, group, "_scatter")

    taken = list(zip(*(_payload.take(payload, [layout] * each) for payload in received)))
    residuals = [e.residual for e in encoded]
    flags = [common.flag_of(payload) for payload in received]
    parts: list[tf.Tensor] = []
    for j in range(each):
        i = group.rank * each + j
        own = residual.add(share.chunks[i], share.residuals[i], share.decay)
        rest = common.decode_sum(compressor, taken[j], encoded[i].ctx, tf.constant(1.0))
        seeds = share.seeds._replace(chunk=len(encoded) + i)  # not the first encoding's noise again
        again = compressor.encode(rest, seeds, own, 1.0, share.keep)
        parts += again.parts
        flags.append(again.finite)
        residuals[i] = again.residual

    payload = common.with_flag(parts, common.all_of(flags))
    return EncodedShard(payload, [e.ctx for e in encoded], residuals, sent)


def decode(
    compressor: Compressor,
    shapes: Sequence[Shape],
    payloads: Sequence[tf.Tensor],
    contexts: Sequence[Any],
    factor: tf.Tensor,
) -> list[tf.Tensor]:
    """The chunks, times `factor`, of their owners' payloads."""
    each = len(shapes) // len(payloads)
    layout = compressor.layout(shapes[0])
    chunks = [chunk for payload in payloads for chunk in _payload.take(payload, [layout] * each)]
    return [common.decode_sum(compressor, [chunk], ctx, factor) for chunk, ctx in zip(chunks, contexts)]
