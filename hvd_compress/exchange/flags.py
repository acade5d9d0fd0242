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


def join(encoded: Sequence[Encoded]) -> tf.Tensor:
    """Joins the parts of these chunks and one flag for all of them."""
    finite = all_of([e.finite for e in encoded])
    return with_flag([part for e in encoded for part in e.parts], finite)


def with_flag(parts: Sequence[tf.Tensor], finite: tf.Tensor) -> tf.Tensor:
    """Joins the parts and their flag into one payload, uint8 [`flagged_bytes`]."""
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
