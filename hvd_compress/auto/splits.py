"""Which choices are looked at."""

from __future__ import annotations

import itertools

import numpy as np

# In how many parts buckets are divided where the choice changes between the first and the last.
_DIVISIONS = 16


def divided(buckets: int, candidates: int) -> np.ndarray:
    """Choices of one candidate for the first buckets and another for the rest, int32 [N, B], each once."""
    ends = sorted({round(buckets * i / _DIVISIONS) for i in range(1, _DIVISIONS)} - {0, buckets})
    found = [[c] * buckets for c in range(candidates)]
    found += [
        [first] * end + [rest] * (buckets - end)
        for end in ends
        for first, rest in itertools.permutations(range(candidates), 2)
    ]
    return np.array(found, np.int32)
