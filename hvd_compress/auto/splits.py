"""Which choices `auto` compares."""

from __future__ import annotations

import itertools

import numpy as np

# The buckets are divided into so many parts; the choice may change between two of them.
_PARTS = 16


def divided(buckets: int, candidates: int) -> np.ndarray:
    """All choices of one candidate for the first buckets and one for the rest, int32 [N, B], without duplicates."""
    ends = sorted({round(buckets * i / _PARTS) for i in range(1, _PARTS)} - {0, buckets})
    choices = [[c] * buckets for c in range(candidates)]
    choices += [
        [first] * end + [rest] * (buckets - end)
        for end in ends
        for first, rest in itertools.permutations(range(candidates), 2)
    ]
    return np.array(choices, np.int32)
