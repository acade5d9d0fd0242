"""Round trips of compressors."""

import tensorflow as tf

import hvd_compress as hvdc
from hvd_compress.compressors import Seeds


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
