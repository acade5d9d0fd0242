"""Clocks of ranks are compared, and their steps stand on one time line."""

import json

import numpy as np
import pytest

from hvd_compress.monitor import chrome_trace, clocks
from hvd_compress.monitor.chrome_trace import RankSteps
from hvd_compress.monitor.clocks import Offsets
from hvd_compress.monitor.recorder import WatchedBucket


def rounds(offsets, seed, latency=0.0005):
    """When ranks with these clock offsets enter and leave rounds whose latency differs in each direction."""
    random = np.random.default_rng(seed)
    count = len(offsets)
    late = np.array([[0.005 * ((number % 2 == 0) == (rank == 0)) for number in range(20)] for rank in range(count)])
    start = 1.7e9 + np.arange(20) * 0.01
    entered = start + late + random.exponential(0.0002, [count, 20])
    # A rank leaves when the last message has arrived: never before the last rank has entered.
    left = entered.max(0) + latency * np.arange(1, count + 1)[:, None] + random.exponential(0.0002, [count, 20])
    return np.stack([entered, left], 2) + np.array(offsets)[:, None, None]


@pytest.mark.parametrize("seed", range(5))
def test_the_true_offsets_lie_within_the_bounds(seed):
    offsets = np.array([0.0, 3.25, -0.5, 1e-4])
    lowest, highest = clocks.bounds(rounds(offsets, seed))
    assert (lowest <= offsets + 1e-6).all() and (offsets <= highest + 1e-6).all()
    assert lowest[0] == highest[0] == 0.0
    assert (highest - lowest).max() < 0.006  # far less than the 10 ms of a round


def test_offsets_drift_between_two_comparisons():
    first = Offsets(100.0, np.array([0.0, 1.0]), np.zeros(2))
    last = Offsets(200.0, np.array([0.0, 2.0]), np.zeros(2))
    np.testing.assert_allclose(clocks.by_rank_0(1, np.array([100.0, 150.0, 200.0]), first, last), [99, 148.5, 198])


def test_the_rows_of_a_trace(tmp_path):
    buckets = [
        WatchedBucket("0", 100, 100, ("none", "int8"), (100, 25)),
        WatchedBucket("dense-0", 8, 8, ("none",), (8,)),
    ]

    def steps(ahead):
        # Bucket 0 is encoded for 1 ms, waits for 1 ms, is on the wire for 3 ms and decoded for 1 ms.
        times = 1000.0 + ahead + 1e-3 * np.array([[[10, 11, 15, 16], [12, 12, 14, 14]]])
        begin, ready = np.array([[1000.0], [1000.013]]) + ahead
        wire = np.array([[0.003, 0.002]])
        sent = np.array([[25.0, 8.0]])
        return RankSteps("host", buckets, np.array([7]), begin, ready, times, wire, np.array([[1, 0]]), sent)

    clock = Offsets(1000.0, np.array([0.0, 5.0]), np.array([0.0, 0.0004]))
    path = tmp_path / "trace.json"
    assert chrome_trace.write(path, [steps(0.0), steps(5.0)], clock, clock) == 0.0004
    assert [file.name for file in tmp_path.iterdir()] == ["trace.json"]
    trace = json.loads(path.read_text())
    assert trace["metadata"]["clocks_aligned_within_seconds"] == 0.0004
    events = trace["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {(r, t): n for r in (0, 1) for t, n in enumerate(["steps", "bucket 0", "bucket dense-0"])}
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["rank 0 on host", "rank 1 on host"]
    for rank in range(2):  # the same times on both, although one clock is ahead by five seconds
        slices = [(e["tid"], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X" and e["pid"] == rank]
        expected = [
            (0, "step 7", -10000, 16000), (0, "waits for the exchange", 3000, 3000), (1, "encode", 0, 1000),
            (1, "queue", 1000, 1000), (1, "wire", 2000, 3000), (1, "decode", 5000, 1000), (2, "wire", 2000, 2000),
        ]  # fmt: skip
        assert [s[:2] for s in slices] == [e[:2] for e in expected]
        np.testing.assert_allclose([s[2:] for s in slices], [e[2:] for e in expected], atol=1.0)
    wire = next(e for e in events if e["name"] == "wire")
    assert wire["args"] == {"step": 7, "compressor": "int8", "bytes": 25}
