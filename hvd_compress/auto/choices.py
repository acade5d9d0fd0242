"""Which choices `auto` compares, and what each costs.

A choice gives each bucket a candidate. `policy` calls these functions with tensors in the graph of a step, and
`hvd-compress plan` with NumPy arrays, without TensorFlow. Their first argument is the array module, `numpy` or
`tf.experimental.numpy`. B buckets, C candidates, N choices; times in seconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

# The buckets are divided into so many parts; the choice may change between two of them.
_PARTS = 16


def makespan(xp: Any, waits: Any, exchange: Any) -> Any:
    """When the last bucket is there, [...]; both arguments [..., B], in the order in which buckets cross.

    The backward pass makes the gradients of one bucket after the other, each after another `waits`. Meanwhile, the
    buckets before cross one after the other, each in `exchange` seconds. The time that is gained when a bucket is
    encoded while another one crosses is not counted: it is short if the same processor moves the bytes.
    """
    ready, crossed = xp.cumsum(waits, -1), xp.cumsum(exchange, -1)
    return xp.max(ready - crossed + exchange, -1) + crossed[..., -1]


def cost_of(xp: Any, picks: Any, waits: Any, seconds: Any, lost: Any, nbytes: Any, max_slowdown: float) -> Any:
    """The cost of choices, [N]: the step's seconds times 1 + `max_slowdown` * the lost share of the energy.

    Args:
        xp: The array module.
        picks: int32 [N, B], the choices: each bucket's candidate.
        waits: [B], seconds of the backward pass between the bucket before and this one.
        seconds: [B, C], of each bucket's exchange with each candidate.
        lost: [B, C], the share of its energy that each bucket loses.
        nbytes: [B], bytes of gradient.
        max_slowdown: By which share the cost grows for a choice that loses all energy.
    """
    is_picked = _one_hot(picks, lost.shape[1])

    def of_picks(table: Any) -> Any:
        return xp.sum(xp.where(is_picked, table, xp.zeros_like(table)), -1)

    missing = xp.sum(of_picks(lost) * nbytes, -1) / xp.sum(nbytes)
    return makespan(xp, waits, of_picks(seconds)) * (1.0 + max_slowdown * missing)


def options(xp: Any, allowed: Any, uncompressed: Sequence[bool], seconds: Any) -> Any:
    """The choices to compare, int32 [N, B].

    These are all choices of one candidate for the first buckets, which may cross while gradients are still computed,
    and another or the same one for the rest. A bucket for which that candidate is not allowed gets its own fastest one.
    Gradients are neither copied into chunks nor out of them if no bucket is compressed. So candidates without
    compression are for all buckets or for none, except for buckets with no other allowed candidate.

    Args:
        xp: The array module.
        allowed: bool [B, C].
        uncompressed: bool [C], whether candidates do not compress. These are always allowed.
        seconds: [B, C], of each bucket's exchange with each candidate.
    """
    buckets, candidates = seconds.shape
    compressed = allowed & ~np.array(uncompressed)
    mixable = xp.where(xp.any(compressed, -1, keepdims=True), compressed, allowed)
    fastest = xp.argmin(xp.where(mixable, seconds, xp.full_like(seconds, np.inf)), -1)
    divided = _divided(buckets, candidates)
    is_mixable = xp.any(mixable & _one_hot(divided, candidates), -1)
    mixed = xp.where(is_mixable, divided, xp.asarray(fastest, np.int32))
    uniform = [np.full([1, buckets], c, np.int32) for c in np.flatnonzero(uncompressed)]
    return xp.concatenate([mixed, *uniform], 0)


def _divided(buckets: int, candidates: int) -> np.ndarray:
    """All choices of one candidate for the first buckets and one for the rest, int32 [N, B], without duplicates."""
    ends = sorted({round(buckets * i / _PARTS) for i in range(1, _PARTS)} - {0, buckets})
    pairs = itertools.permutations(range(candidates), 2)
    picks = [[c] * buckets for c in range(candidates)]
    picks += [[first] * end + [rest] * (buckets - end) for end, (first, rest) in itertools.product(ends, pairs)]
    return np.array(picks, np.int32)


def _one_hot(picks: Any, candidates: int) -> Any:
    """Whether each bucket has each candidate, bool [N, B, C]."""
    return picks[..., None] == np.arange(candidates, dtype=np.int32)
