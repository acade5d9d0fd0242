"""Writes the steps of all ranks as a trace for Perfetto and chrome://tracing."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .clocks import Offsets, by_rank_0
from .recorder import WatchedBucket
from .steps import Steps

# So many buckets of steps are written, of all ranks together. A viewer needs some 500 bytes for each.
MOST = 200_000
_SHORTEST = 1e-6  # seconds of a slice: times are those of clocks that count microseconds


class RankSteps(NamedTuple):
    """What one rank has measured of T steps and B buckets."""

    host: str
    buckets: list[WatchedBucket]
    step: np.ndarray  # [T], from 1 on
    begin: np.ndarray  # [T]: when the step before ended; NaN if that is not known
    ready: np.ndarray  # [T]: when the last gradient was ready
    times: np.ndarray  # [T, B, 4]: see `Buckets.times`
    wire: np.ndarray  # [T, B]: seconds
    compressor: np.ndarray  # [T, B]
    bytes: np.ndarray  # [T, B]


def rank_steps(host: str, buckets: Sequence[WatchedBucket], parts: Sequence[Steps], ranks: int) -> RankSteps:
    """This rank's share of a trace of so many ranks: the last steps, if there are too many."""
    most = max(1, MOST // max(1, ranks * len(buckets)))

    def joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate(list(arrays))[-most:] if arrays else np.zeros([0])

    done = joined([part.done for part in parts])
    return RankSteps(
        host,
        list(buckets),
        joined([part.step for part in parts]),
        done - joined([part.seconds for part in parts]),
        done - joined([part.exposed for part in parts]),
        joined([part.buckets.times for part in parts]),
        joined([part.buckets.wire for part in parts]),
        joined([part.buckets.compressor for part in parts]),
        joined([part.buckets.bytes for part in parts]),
    )


def write(path: Path, ranks: Sequence[RankSteps], first: Offsets, last: Offsets) -> float:
    """Writes the trace, under a temporary name first; returns by how much two clocks may be apart in it, in seconds.

    Args:
        path: The file.
        ranks: The steps of each rank.
        first: The clocks before the steps.
        last: The clocks after the steps.

    Raises:
        OSError: The file cannot be written.
    """
    error = float(max(first.errors.max(), last.errors.max()))
    aligned = []
    for number, rank in enumerate(ranks):
        begin, ready, times = (by_rank_0(number, own, first, last) for own in (rank.begin, rank.ready, rank.times))
        aligned.append(rank._replace(begin=begin, ready=ready, times=times))
    origin = min((float(rank.times.min()) for rank in aligned if rank.times.size), default=0.0)
    temporary = path.with_name(f".{path.name}.new")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "metadata": ')
        file.write(json.dumps({"clocks_aligned_within_seconds": error, "starts_at": origin}))
        file.write(', "traceEvents": [\n')
        file.write(
            ",\n".join(json.dumps(event) for n, rank in enumerate(aligned) for event in _events(n, rank, origin))
        )
        file.write("\n]}\n")
    os.replace(temporary, path)
    return error


def _events(number: int, rank: RankSteps, origin: float) -> Iterator[dict[str, Any]]:
    """The rows of a rank: its steps, then each bucket."""

    def row(thread: int, kind: str, **args: Any) -> dict[str, Any]:
        return {"ph": "M", "pid": number, "tid": thread, "name": kind, "args": args}

    def slice_of(thread: int, name: str, begin: float, end: float, **args: Any) -> dict[str, Any]:
        times = {"ts": round(1e6 * (begin - origin), 3), "dur": round(1e6 * (end - begin), 3)}
        return {"ph": "X", "pid": number, "tid": thread, "name": name, **times, "args": args}

    yield row(0, "process_name", name=f"rank {number} on {rank.host}")
    yield row(0, "process_sort_index", sort_index=number)
    yield row(0, "thread_name", name="steps")
    for b, bucket in enumerate(rank.buckets):
        yield row(b + 1, "thread_name", name=f"bucket {bucket.name}")
        yield row(b + 1, "thread_sort_index", sort_index=b + 1)
    for t, step in enumerate(rank.step.tolist()):
        done = float(rank.times[t, :, 3].max())
        begin = float(rank.times[t, :, 0].min() if np.isnan(rank.begin[t]) else rank.begin[t])
        yield slice_of(0, f"step {step}", begin, done)
        if begin <= rank.ready[t] < done:
            yield slice_of(0, "waits for the exchange", float(rank.ready[t]), done)
        for b, bucket in enumerate(rank.buckets):
            ready, encoded, received, decoded = rank.times[t, b].tolist()
            sends = max(encoded, received - float(rank.wire[t, b]))
            args = {
                "step": step,
                "compressor": bucket.compressors[rank.compressor[t, b]],
                "bytes": int(rank.bytes[t, b]),
            }
            phases = ("encode", ready, encoded), ("queue", encoded, sends), ("wire", sends, received)
            for name, since, until in (*phases, ("decode", received, decoded)):
                if until - since > _SHORTEST:
                    yield slice_of(b + 1, name, since, until, **args)
