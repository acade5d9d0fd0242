"""How far the clocks of the ranks are apart."""

from __future__ import annotations

import time
from typing import NamedTuple

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

_ROUNDS = 20
_LATE = 0.005  # seconds by which some ranks come late to a round


class Offsets(NamedTuple):
    """The clocks of n ranks, compared at one moment, by rank 0's clock."""

    at: float  # the moment, in seconds since 1970
    offsets: np.ndarray  # by how much each rank's clock is ahead of rank 0's, in seconds, [n]
    errors: np.ndarray  # these are wrong by at most so much, in seconds, [n]


def compare() -> Offsets:
    """Compares the clocks of all ranks, which call it together; takes some tenths of a second.

    In each round the ranks meet in an allreduce, and read their clocks before and after it. It ends on no rank before
    it has begun on all of them, which bounds the offsets from both sides, however slow the network is (see `bounds`).
    The bounds are close where the other rank came last: so rank 0 comes late to every second round, and all others to
    the rounds between.
    """
    times = []
    with tf.device("CPU"):
        for number in range(_ROUNDS):
            if (number % 2 == 0) == (hvd.rank() == 0):
                time.sleep(_LATE)
            begin = time.time()
            hvd.allreduce(tf.zeros([1]), op=hvd.Sum, name="hvdc_clock").numpy()
            times.append((begin, time.time()))
        gathered = hvd.allgather(tf.constant([times], tf.float64), name="hvdc_clocks").numpy()
    lowest, highest = bounds(gathered)
    return Offsets(float(gathered[0, -1, 1]), (lowest + highest) / 2.0, np.abs(highest - lowest) / 2.0)


def bounds(times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bounds of the ranks' clock offsets relative to rank 0, in seconds, [n] each.

    If rank j's clock is ahead by o, then an event at its time t was at t - o by rank 0's clock. Rank 0 leaves a round
    after rank j has entered it, and the other way round: entered_j - o <= left_0, and entered_0 <= left_j - o.

    Args:
        times: When each rank entered and left each round, by its own clock, [n, rounds, 2].
    """
    entered, left = times[:, :, 0], times[:, :, 1]
    lowest, highest = (entered - left[0]).max(1), (left - entered[0]).min(1)
    lowest[0] = highest[0] = 0.0
    return lowest, highest


def by_rank_0(rank: int, times: np.ndarray, first: Offsets, last: Offsets) -> np.ndarray:
    """Times of a rank's clock, in seconds since 1970, by rank 0's clock; offsets drift between two comparisons."""
    share = np.clip((times - first.at) / max(last.at - first.at, 1e-9), 0.0, 1.0)
    shifted: np.ndarray = times - (first.offsets[rank] + share * (last.offsets[rank] - first.offsets[rank]))
    return shifted
