"""Flags that travel with the payloads: whether the gradients of a rank are finite.

A flag is 0 if they are. A rank that has called `hvd.join()` sends zeros, which then count as finite gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import tensorflow as tf

from ..compressors import Encoded
from ..compressors import payload as _payload
from .volume import flagged_bytes


def join(encoded: Sequence[Encoded], before: Sequence[tf.Tensor] = ()) -> tf.Tensor:
    """Joins the parts of these chunks and one flag into one payload, uint8 [`flagged_bytes`].

    The flag is up if all chunks are finite, and all flags `before` are up.
    """
    finite = all_of([*before, *(e.finite for e in encoded)])
    parts = [part for e in encoded for part in e.parts]
    length = _payload.nbytes(parts)
    flag = tf.fill([flagged_bytes(length) - length], tf.cast(~finite, tf.uint8))
    return _payload.join([*parts, flag])


def flag_of(payload: tf.Tensor) -> tf.Tensor:
    """Whether the flag of a payload says that the gradients are finite."""
    return payload[-1] == 0


def all_of(flags: Sequence[tf.Tensor]) -> tf.Tensor:
    """Whether all flags, bool scalars, are up."""
    return flags[0] if len(flags) == 1 else tf.reduce_all(tf.stack(list(flags)))


def scale_or_nan(scale: float, ok: tf.Tensor) -> tf.Tensor:
    """The factor of the sums: `scale` if `ok`, else NaN."""
    return tf.where(ok, tf.constant(scale, tf.float32), tf.constant(math.nan, tf.float32))
