"""Which choices `auto` compares, and what each is worth.

A choice gives each bucket a candidate. `policy` calls these functions with tensors in the graph of a step. The first
choice, comparisons with candidates that are not in the graph, reports and `hvd-compress plan` call them with NumPy
arrays. Their first argument is the array module, see `arrays`. B buckets, C candidates, N choices; times in seconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

# The buckets are divided into so many parts; the choice may change between two of them.
_PARTS = 16
# With many candidates there are fewer parts, so that there are about as many choices as this.
_CHOICES = 200
# By how many times the cost of a choice grows that takes twice its budget.
_BEYOND = 10.0


def makespan(xp: Any, waits: Any, exchange: Any) -> Any:
    """When the last bucket is there, [...]; both arguments [..., B], in the order in which buckets cross.

    The backward pass makes the gradients of one bucket after the other, each after another `waits`. Meanwhile, the
    buckets before cross one after the other, each in `exchange` seconds. The time that is gained when a bucket is
    encoded while another one crosses is not counted: it is short if the same processor moves the bytes.
    """
    ready, crossed = xp.cumsum(waits, -1), xp.cumsum(exchange, -1)
    return xp.max(ready - crossed + exchange, -1) + crossed[..., -1]


def options(uncompressed: Sequence[bool], model_wide: Sequence[bool], buckets: int) -> np.ndarray:
    """The choices to compare, int32 [N, B].

    These are all choices of one candidate for the first buckets, which may cross while gradients are still computed,
    and another or the same one for the rest. Gradients are neither copied into chunks nor out of them if no bucket is
    compressed. So candidates without compression are for all buckets or for none, as are model-wide ones.

    Args:
        uncompressed: bool [C], whether candidates do not compress.
        model_wide: bool [C], whether candidates exchange all buckets at once.
        buckets: The number of buckets.
    """
    alone = [c for c, is_alone in enumerate(np.logical_or(uncompressed, model_wide)) if is_alone]
    mixed = [c for c in range(len(uncompressed)) if c not in alone]
    pairs = list(itertools.permutations(mixed, 2))
    parts = max(2, min(_PARTS, _CHOICES // max(1, len(pairs))))
    ends = sorted({round(buckets * i / parts) for i in range(1, parts)} - {0, buckets})
    picks = [[c] * buckets for c in (*mixed, *alone)]
    picks += [[first] * end + [rest] * (buckets - end) for end, (first, rest) in itertools.product(ends, pairs)]
    return np.array(picks, np.int32)


def cost_of(
    xp: Any,
    picks: Any,
    waits: Any,
    seconds: Any,
    nbytes: Any,
    rest: Any,
    progress: Any,
    lost: Any,
    max_slowdown: float,
    budget: float = 0.0,
) -> Any:
    """The cost of choices, [N]: the seconds that training takes for the progress of an uncompressed step.

    That is (rest + makespan) / progress, times 1 + `max_slowdown` * the lost share of the energy. With a budget,
    1 / progress takes the place of the first factor, and the cost grows with what the exchange takes beyond the budget.

    Args:
        xp: The array module.
        picks: int32 [N, B], the choices: each bucket's candidate.
        waits: [B], seconds of the backward pass between the bucket before and this one.
        seconds: [B, C], of each bucket's exchange with each candidate.
        nbytes: [B], bytes of gradient.
        rest: Scalar, the seconds of a step before the first gradients are ready and after the last exchange.
        progress: [C], the progress of a step with each candidate, relative to an uncompressed one; see `progress`.
        lost: [C], the share of the energy that each candidate loses.
        max_slowdown: By which share the cost grows for a choice that loses all energy.
        budget: Seconds; 0 for none.
    """
    buckets, candidates = seconds.shape
    exchange = xp.take(xp.reshape(seconds, [-1]), picks + candidates * np.arange(buckets, dtype=np.int32))
    share = nbytes / xp.sum(nbytes)
    through = xp.sum(xp.take(progress, picks) * share, -1)
    missing = xp.sum(xp.take(lost, picks) * share, -1)
    span = makespan(xp, waits, exchange)
    worth = (1.0 + max_slowdown * missing) / through
    if budget:
        hidden = xp.sum(waits)  # the exchange that the backward pass hides takes no time
        return worth * (1.0 + _BEYOND * xp.maximum(0.0, (span - hidden) / budget - 1.0))
    return (rest + span) * worth
