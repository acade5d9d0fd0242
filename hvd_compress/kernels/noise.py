"""Random numbers from a hash of (seed, position): the same on every machine, and fast under XLA.

`tf.random.uniform` ignores its seed under XLA, and `tf.random.stateless_uniform` is six times as
slow. An integer hash needs neither state nor order.
"""

from __future__ import annotations

import tensorflow as tf

from .compile import compiled

_GOLDEN = 0x9E3779B9


def mix(x: tf.Tensor) -> tf.Tensor:
    """Hashes uint32 `x`: every input bit changes half of the output bits on average.

    Source: the 32-bit finalizer of MurmurHash3 (Appleby, public domain).
    """
    x = tf.bitwise.bitwise_xor(x, tf.bitwise.right_shift(x, tf.constant(16, tf.uint32)))
    x *= tf.constant(0x85EBCA6B, tf.uint32)
    x = tf.bitwise.bitwise_xor(x, tf.bitwise.right_shift(x, tf.constant(13, tf.uint32)))
    x *= tf.constant(0xC2B2AE35, tf.uint32)
    return tf.bitwise.bitwise_xor(x, tf.bitwise.right_shift(x, tf.constant(16, tf.uint32)))


@compiled
def fold(seed: tf.Tensor, value: tf.Tensor | int) -> tf.Tensor:
    """New int32 seeds from `seed` (int32) and `value` (integers): scalars, or vectors of several seeds."""
    a = tf.bitcast(tf.cast(seed, tf.int32), tf.uint32)
    b = tf.bitcast(tf.cast(value, tf.int32), tf.uint32)
    return tf.bitcast(mix(mix(a + tf.constant(_GOLDEN, tf.uint32)) + b), tf.int32)


def bits(seed: tf.Tensor, n: int | tf.Tensor) -> tf.Tensor:
    """`n` uint32 values, uniform over all 32 bits; `seed` is an int32 scalar."""
    start = mix(tf.bitcast(seed, tf.uint32) + tf.constant(_GOLDEN, tf.uint32))
    position = tf.bitcast(tf.range(n, dtype=tf.int32), tf.uint32)
    return mix(tf.bitwise.bitwise_xor(position * tf.constant(_GOLDEN, tf.uint32), start))


def uniform(seed: tf.Tensor, n: int | tf.Tensor) -> tf.Tensor:
    """`n` float32 values, uniform in [0, 1) in steps of 2**-24; `seed` is an int32 scalar."""
    top = tf.bitwise.right_shift(bits(seed, n), tf.constant(8, tf.uint32))
    return tf.cast(tf.bitcast(top, tf.int32), tf.float32) * 2.0**-24


def below(seed: tf.Tensor, limits: tf.Tensor) -> tf.Tensor:
    """For each of `limits` (int32 [n], 1 to 2**24) an int32 drawn uniformly from [0, limit)."""
    u = uniform(seed, limits.shape[0])
    draw = tf.cast(u * tf.cast(limits, tf.float32), tf.int32)
    return tf.minimum(draw, limits - 1)
