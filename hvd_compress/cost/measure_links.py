"""Times Horovod's collectives on messages of several sizes, and fits a link to the times."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from ..exchange import transfers, within_host
from ..exchange.group import Group
from .link import Link
from .topology import Ring

# Bytes that each rank contributes. Sizes that would take too long are left out. On a fast link the middle one is left
# out, too: its rate only shows with more bytes than the processor's cache holds.
_SIZES = (2**12, 2**16, 2**19, 2**21, 2**23, 2**25)
_MIDDLE = 2**21
# The times of the smallest vary most, with the processor's other work.
_REPEATS = {2**12: 24, 2**16: 6, 2**19: 6}
_REPEATS_OF_LARGE = 3
# Seconds. A size that takes longer than the first is timed once, and is the last. A size that takes longer than the
# second is left out, and after so many sizes one that takes longer than the first.
_SHORT, _PATIENCE, _ENOUGH = 0.1, 0.2, 4
# Seconds that the middle size takes at least on a link that is not fast: 4 Gbit/s.
_FAST = 0.004
# A slow link may let some 100 KB pass at a higher rate, and again after a pause. If a size up to the first takes longer
# than the second, in seconds, then all later ones are timed after a pause of the third, so that each of them starts
# with the same burst.
_PROBED, _SLOW, _PAUSE = 2**19, 0.015, 0.03
LARGEST_BURST = 2**20

# Of an estimate: the smallest size, `_PROBED`, and on a fast link the first of the larger ones that is expected to take
# no longer than the seconds beside it: there, only a large message takes clearly longer than the times vary. That one
# is timed up to so many times, or for so many seconds. `_PROBED` is timed twice as often if it takes no longer than
# these seconds.
_SMALLEST, _ESTIMATE_REPEATS, _ESTIMATE_SECONDS = 2**12, 3, 0.03
_ESTIMATE_LARGER = ((2**22, 0.04), (2**21, 0.05), (2**20, 0.2))
# The smallest is timed so many times in a row, and so many times more if it takes less than so many seconds: Horovod
# sends a message in one of its cycles, so a single one may take half or twice the usual time.
_LATENCY_CALLS, _MORE_LATENCY_CALLS, _SHORT_LATENCY = 3, 4, 0.01
# A size is timed once more if it took so many times as long as expected, or so many seconds longer: TCP may have sent a
# packet again, after 0.2 s. Without a burst, a message takes up to about the third number of times as long.
_HELD_UP, _HELD_UP_SECONDS, _OF_BURST = 3.0, 0.15, 2.5
# Two messages in a row are enough if the latency is at most this share of the time that the bytes take.
_LARGEST_LATENCY = 0.3

NewRun = Callable[[str, int, Group], Callable[[], Any]]


def slowest(values: np.ndarray, group: Group, phase: str) -> np.ndarray:
    """The largest of the ranks' values, element by element."""
    if group.size == 1:
        return values
    return np.asarray(hvd.allreduce(tf.constant(values), op=hvd.Max, **group.keywords(phase)))


def between_ranks(name: str, size: int, group: Group) -> Callable[[], Any]:
    """A collective of `size` bytes between ranks, as the exchange calls it."""
    phase = f"_{name}_{size}"
    if name == "allreduce":
        numbers = tf.zeros([size // 4])
        return lambda: hvd.allreduce(numbers, op=hvd.Sum, **group.keywords(phase))
    if name == "allgather":
        payload = tf.zeros([size], tf.uint8)
        return lambda: transfers.allgather(payload, group, phase)
    part = tf.zeros([size // group.size], tf.uint8)
    return lambda: transfers.alltoall(transfers.concat([part] * (group.size - 1)), group, phase)


def inside_host(name: str, size: int, group: Group) -> Callable[[], Any]:
    """A collective of `size` bytes between the workers of a host, see `exchange.within_host`."""
    named = group.among(group.process_set, f"_{size}")
    if name == "allgather":
        payload = tf.zeros([size], tf.uint8)
        return lambda: within_host.allgather(payload, named)
    chunk = tf.zeros([max(1, size // 4 // group.size)])
    others = [chunk] * (group.size - 1)
    return lambda: within_host.reduce_scatter([chunk], [chunk], 1.0, transfers.concat(others), named)[0]


def measure_link(name: str, group: Group, everyone: Group, new_run: NewRun = between_ranks) -> tuple[Link, float]:
    """Measures one collective in all groups into which `everyone` is divided, at the same time.

    Returns:
        Alpha, beta and burst, as those of a ring, and the root mean square of the relative errors of the fit.
    """
    if group.size == 1:
        return Link(0.0, 0.0), 0.0
    sizes: list[int] = []
    seconds: list[float] = []
    pause = 0.0
    for size in _SIZES:
        expected = _expected(size, sizes, seconds)
        if expected > (_PATIENCE if len(sizes) < _ENOUGH else _SHORT):
            break
        if size == _MIDDLE and expected < _FAST:
            continue
        run = tf.function(new_run(name, size, group), autograph=False)
        run()
        if sizes and size <= _PROBED:  # smaller ones may all have passed in a burst
            (expected,) = _times(run, everyone)
            pause = _PAUSE if expected > _SLOW else 0.0
        repeats = _REPEATS.get(size, _REPEATS_OF_LARGE) if expected <= _SHORT else 1
        sizes.append(size)
        seconds.append(midmean(_times(run, everyone, repeats, pause)))
    return _ring_link(name, group.size, sizes, seconds)


def estimate_link(name: str, group: Group, everyone: Group, new_run: NewRun = between_ranks) -> tuple[Link, float]:
    """As `measure_link`, with fewer messages.

    1. Some of 4 KB.
    2. Two of 512 KB, the second at once after the first, which has used up a burst. On a slow link, this is all.
    3. On a fast link, or where the latency hides part of a burst: a larger one, if it takes less than 0.2 s.
    """
    if group.size == 1:
        return Link(0.0, 0.0), 0.0

    def new_call(size: int) -> Callable[[], Any]:
        run = tf.function(new_run(name, size, group), autograph=False)
        run.get_concrete_function()
        return run

    sizes, run = [_SMALLEST], new_call(_SMALLEST)
    seconds = [_time_smallest(run, everyone)]
    run = new_call(_PROBED)
    if seconds[0] > _SHORT:  # on a WAN, where each call takes long
        times = _times(run, everyone).tolist()
    else:
        times = _time_pair(run, everyone)
        of_bytes = times[1] - seconds[0]
        # In the latency, a burst is available again.
        if of_bytes > _SLOW and seconds[0] < _LARGEST_LATENCY * of_bytes:
            # Both messages are as one of so many bytes.
            sizes += [_PROBED, 2 * _PROBED - _SMALLEST]
            seconds += [times[0], times[0] + of_bytes]
            return _ring_link(name, group.size, sizes, seconds)
    sizes.append(_PROBED)
    seconds.append(float(np.mean(times)))
    larger = next((size for size, most in _ESTIMATE_LARGER if _expected(size, sizes, seconds) <= most), None)
    if larger is not None:
        expected = seconds[0] + _expected(larger, sizes, seconds)
        sizes.append(larger)
        seconds.append(_time_some(new_call(larger), everyone, expected))
    return _ring_link(name, group.size, sizes, seconds)


def _time_pair(run: Callable[[], Any], everyone: Group) -> list[float]:
    """Seconds of a call and of another one at once after it.

    Two more are timed if that takes little time, or if TCP may have held up one of the first two. A burst is available
    again after that, so only the last call counts then.
    """
    first, second = _times(run, everyone, calls=2).tolist()
    low, high = sorted([first, second])
    is_held_up = high > max(_held_up(low), _OF_BURST * low)
    if is_held_up or second <= _ESTIMATE_SECONDS:
        third, fourth = _times(run, everyone, calls=2).tolist()
        first, second = min(first, third), fourth if is_held_up else min(second, fourth)
    return [first, second]


def _time_smallest(run: Callable[[], Any], everyone: Group) -> float:
    """Seconds of a call: the median of some, or the shorter one of two. The first call is longer, and is left out."""
    times = _times(run, everyone, calls=_LATENCY_CALLS)[1:].tolist()
    if min(times) < _SHORT_LATENCY:
        times += _times(run, everyone, calls=_MORE_LATENCY_CALLS).tolist()
    return statistics.median_low(times)


def _time_some(run: Callable[[], Any], everyone: Group, expected: float) -> float:
    """Seconds of a call that is expected to take so long: the mean of the faster half of some.

    Of so few, more of the others waited. One more is made if TCP held up all of them.
    """
    times: list[float] = _times(run, everyone).tolist()
    repeats = min(_ESTIMATE_REPEATS, int(_ESTIMATE_SECONDS / max(expected, times[0], 1e-9))) - 1
    again: list[float] = _times(run, everyone, repeats).tolist() if repeats > 0 else []
    if min(again, default=times[0]) > _held_up(expected):
        again += _times(run, everyone).tolist()
    times += again
    return float(np.mean(np.sort(times)[: (len(times) + 1) // 2]))


def _held_up(expected: float) -> float:
    """Seconds above which TCP may have held up a call that was expected to take so long."""
    return min(_HELD_UP * expected, expected + _HELD_UP_SECONDS)


def _expected(size: int, sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """Seconds that a size may take, from what others took; the same on all ranks. 0 if nothing is known."""
    return (seconds[-1] - seconds[0]) * size / sizes[-1] if len(sizes) > 1 else 0.0  # less the latency


def _ring_link(name: str, ranks: int, sizes: Sequence[int], seconds: Sequence[float]) -> tuple[Link, float]:
    """The link of a ring whose collectives took so long, and the root mean square of the relative errors."""
    per_message, per_byte, burst = fit(sizes, seconds)
    messages = getattr(Ring(Link(1.0, 0.0), ranks), name)(0)
    share = getattr(Ring(Link(0.0, 1.0), ranks), name)(1)
    fitted = per_message + per_byte * np.maximum(0.0, np.array(sizes) - burst)
    error = float(np.sqrt(np.mean(np.square(fitted / np.array(seconds) - 1.0))))
    return Link(per_message / messages, per_byte / share, burst=burst * share), error


def _times(run: Callable[[], Any], group: Group, repeats: int = 1, pause: float = 0.0, calls: int = 1) -> np.ndarray:
    """Seconds of each call, until the slowest rank ends it. The `calls` of a repeat follow each other at once."""
    ends = slowest(np.array([_timed(run, group, pause, calls) for _ in range(repeats)]), group, "_times")
    return np.diff(ends, prepend=0.0).ravel()


def _timed(run: Callable[[], Any], group: Group, pause: float, calls: int) -> list[float]:
    """Seconds from the begin of the first call to the end of each."""
    rest(pause)
    hvd.allreduce(tf.zeros([1]), op=hvd.Sum, **group.keywords("_barrier"))
    begin, ends = time.perf_counter(), []
    for _ in range(calls):
        tf.nest.map_structure(lambda tensor: tensor.numpy(), run())
        ends.append(time.perf_counter() - begin)
    return ends


def rest(seconds: float) -> None:
    """Keeps the network quiet but the processor busy, as between the exchanges of a training.

    After a sleep a small message takes up to twice as long.
    """
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def midmean(times: np.ndarray) -> float:
    """The mean of the middle half: as robust as the median, and equal to it for up to three times.

    A small message takes one or two time slices of the scheduler. The median of a few such times jumps between the two.
    """
    if len(times) < 4:
        return float(np.median(times))
    quarter = len(times) // 4
    return float(np.mean(np.sort(times)[quarter : len(times) - quarter]))


def fit(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float, float]:
    """Seconds per call, seconds per byte, and the bytes of a burst; none of them is negative.

    With three or more sizes, the seconds per byte are the slope between the two largest, and the seconds per call are
    what the smallest takes. If these two predict more for the largest than was measured, the difference is a burst:
    bytes that a shaped link or a switch's buffer lets through at once. A burst of more than 1 MB is ignored: there the
    time per byte grows with the size instead.
    With two sizes, the sum of the squared relative errors is minimal.
    """
    times = np.asarray(seconds, np.float64)
    rows = np.stack([np.ones(len(sizes)), np.asarray(sizes, np.float64)], 1) / times[:, None]
    slope = (times[-1] - times[-2]) / (sizes[-1] - sizes[-2]) if len(sizes) > 2 else 0.0
    if slope > 0:
        burst = float(sizes[-1] - (times[-1] - times[0]) / slope)
        if 2 * sizes[0] < burst <= LARGEST_BURST:  # without a burst this is the smallest size
            return float(times[0]), float(slope), burst
        return max(0.0, float(times[0] - slope * sizes[0])), float(slope), 0.0
    (per_call, per_byte), *_ = np.linalg.lstsq(rows, np.ones(len(sizes)), rcond=None)
    if per_call < 0:
        per_call, per_byte = 0.0, _least_squares(rows[:, 1])
    elif per_byte < 0:
        per_call, per_byte = _least_squares(rows[:, 0]), 0.0
    return float(per_call), float(per_byte), 0.0


def _least_squares(column: np.ndarray) -> float:
    """The factor with which a column comes closest to ones."""
    return float(column.sum() / (column**2).sum())
