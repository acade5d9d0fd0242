"""The compressors that every test of all of them runs over, and round trips."""

import tensorflow as tf

import hvd_compress as hvdc
from hvd_compress.compressors import Seeds

SPECS = [
    "none",
    "fp16",
    "bf16",
    "int8",
    "int4",
    "quantize:bits=1",
    "quantize:bits=3",
    "quantize:bits=4,clip=99",
    "quantize:bits=2,rounding=stochastic",
    "onebit",
    "topk:ratio=0.01",
    "topk:ratio=0.3",
    "randomk:ratio=0.1",
    "randomk:ratio=0.1,unbiased=true",
    "block_topk:ratio=0.05",
    "block_sparse:ratio=0.1,block=4",
    "hybrid:ratio=0.05,bits=4",
    "powersgd:rank=2",
]
CASTS = ["none", "fp16", "bf16"]  # as Horovod's: they take any dtype and shape
SUMMABLE = [*CASTS, "randomk:ratio=0.1", "randomk:ratio=0.1,unbiased=true"]
PACKED = [spec for spec in SPECS if spec not in SUMMABLE]


def seeds(shared=0, local=0):
    return Seeds(tf.constant(shared, tf.int32), tf.constant(local, tf.int32))


def round_trip(compressor, x):
    """`x`, compressed and decompressed."""
    payload, ctx = compressor.compress(tf.constant(x))
    return compressor.decompress(payload, ctx).numpy()


def payload_bytes(payload):
    """The bytes of a payload as they go over the wire."""
    if isinstance(payload, hvdc.Payload):
        return payload.tensor.numpy().tobytes()
    return payload.numpy().tobytes()
