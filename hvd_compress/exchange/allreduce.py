"""Payloads that may be summed: one allreduce (ring: Thakur, Rabenseifner and Gropp 2005)."""

from __future__ import annotations

import horovod.tensorflow as hvd
import tensorflow as tf

from ..compressors import Compressor
from .common import Group, LocalInput, Reduction, all_of, factor
from .send_order import at_once
from .volume import allreduce as bytes_sent  # noqa: F401  (what each rank sends)


def reduce(compressor: Compressor, share: LocalInput, scale: float, group: Group) -> Reduction:
    """Sums the ranks' chunks, times `scale`; their payloads are one float32 part each."""
    encoded = [share.encode(compressor, i) for i in range(len(share.chunks))]
    values = [tf.reshape(e.parts[0], [-1]) for e in encoded]
    broken = tf.cast(~all_of([e.finite for e in encoded]), tf.float32)[None]
    outgoing = tf.concat([*values, broken], 0)
    total = hvd.allreduce(at_once(outgoing), op=hvd.Sum, **group.keywords(""))
    ok = total[-1] == 0.0
    times = factor(scale, ok)
    chunks, start = [], 0
    for e, value in zip(encoded, values):
        part = tf.reshape(total[start : start + value.shape[0]], e.parts[0].shape)
        chunks.append(compressor.decode_sum([[part]], e.ctx, times))
        start += value.shape[0]
    return Reduction(chunks, [e.residual for e in encoded], ok, outgoing, total)
