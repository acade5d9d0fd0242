"""Fitting, saving and loading what was measured."""

import json
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

import hvd_compress as hvdc
from hvd_compress.cost import KernelCost, Link, Ring, measure_kernels, measure_links
from hvd_compress.cost.calibration import COLLECTIVES, Calibration, Levels
from hvd_compress.cost.measure_links import fit, midmean
from hvd_compress.formats.auto import CANDIDATES
from hvd_compress.tools.calibrate import use_of

LINKS = {"allreduce": Link(1e-4, 8e-9), "allgather": Link(2e-4, 1.6e-8), "alltoall": Link(0.0, 1e-8)}
KERNELS = {"none": KernelCost(), "int8": KernelCost(1e-4, 5e-10, 1e-10, 2e-11)}


@given(st.floats(0, 1e-2), st.floats(1e-12, 1e-6))
def test_fit_finds_the_line(per_call, per_byte):
    sizes = [2**12, 2**16, 2**20]
    found = fit(sizes, [per_call + size * per_byte for size in sizes])
    np.testing.assert_allclose(found, [per_call, per_byte, 0.0], rtol=1e-6, atol=1e-9 * per_byte * 2**12)


def test_fit_counts_relative_errors_and_stays_above_zero():
    # As absolute errors the last one would decide alone: the call would be 0.07.
    per_call, per_byte, burst = fit([1, 1000, 1_000_000], [1.0, 1.1, 100.0])
    assert per_call == pytest.approx(1.0, rel=0.05)
    assert per_byte == pytest.approx(1e-4, rel=0.05)
    assert burst == 0.0
    assert fit([1, 100], [1.0, 0.5]) == (pytest.approx(0.6), 0.0, 0.0)  # minimizes (c - 1)^2 + (2 c - 1)^2
    per_call, per_byte, _ = fit([100, 200], [1.0, 4.0])
    assert per_call == 0.0 and 0.01 < per_byte < 0.02


def test_fit_finds_a_burst():
    """A link that takes 256 KB at once, and then 1 Gbit/s: only beyond the burst it shows its rate."""
    sizes = [2**12, 2**16, 2**19, 2**21, 2**23]
    seconds = [1e-3 + max(0, size - 2**18) * 8e-9 for size in sizes]
    assert fit(sizes, seconds) == pytest.approx((1e-3, 8e-9, 2**18), rel=1e-6)


class EmulatedLink:
    """Two ranks on a link; the calls at the positions `held_up` take 0.2 s longer, until TCP sends a packet again.

    A burst passes at once. It is as large again after a pause.

    Attributes:
        calls: The size of each call.
        seconds: What all calls have taken.
    """

    size = 2

    def __init__(self, monkeypatch, rate, burst=0, held_up=(), latency=2e-3):
        self.calls, self.seconds = [], 0.0
        self.rate, self.burst, self.held_up, self.latency, self.asked = rate, burst, held_up, latency, 0
        self.left = burst
        monkeypatch.setattr(measure_links, "_timed", self.timed)
        monkeypatch.setattr(measure_links, "slowest", lambda values, *_: values)

    def new_run(self, name, size, group):
        self.asked = size
        return lambda: tf.zeros([])

    def timed(self, run, group, pause, calls):
        taken = []
        self._rest(pause + self.latency)  # a barrier comes before
        for _ in range(calls):
            self.calls.append(self.asked)
            late = 0.2 if len(self.calls) - 1 in self.held_up else 0.0
            self._rest(self.latency)
            at_once = min(self.left, self.asked)
            self.left -= at_once
            taken.append(self.latency + (self.asked - at_once) / self.rate + late)
            self._rest(late)
        self.seconds += pause + self.latency + sum(taken)
        return np.cumsum(taken).tolist()

    def _rest(self, seconds):
        self.left = min(self.burst, self.left + seconds * self.rate)


@pytest.mark.parametrize("latency", [5e-4, 2e-3, 3e-2])
@pytest.mark.parametrize("burst", [0, 2**18])
@pytest.mark.parametrize("rate", [1.25e9, 1.25e8, 6e7, 3.6e7, 3.3e7, 2.5e7, 1.25e7, 5e6, 1.25e6])
def test_an_estimate_finds_the_link(monkeypatch, rate, burst, latency):
    emulated = EmulatedLink(monkeypatch, rate, burst, latency=latency)
    link, error = measure_links.estimate_link("allreduce", emulated, emulated, emulated.new_run)
    # In the latency of a call, a part of the burst is available again. On fast links, messages have more of it or less.
    again = min(burst, latency * rate) / 2**19
    if again > 0.3:  # a larger message is timed, too
        again = 0.0
    elif burst and rate > 3e7:
        again = 0.06
    assert link.beta == pytest.approx(1 / rate, rel=0.01 + min(again, 0.1))
    if latency == 2e-3:
        assert 2 * link.alpha == pytest.approx(latency, rel=0.01)  # of two ranks: two messages, and all bytes
        assert error < 0.01
        assert emulated.seconds < (0.25 if rate > 1e7 else 1.2)
        if rate < 2e7:
            assert link.burst == pytest.approx(burst, rel=0.11)


@pytest.mark.parametrize("burst", [0, 2**18])
@pytest.mark.parametrize(
    "rate, call",
    [(rate, call) for rate, calls in ((1.25e8, 12), (1.25e7, 9), (6.25e6, 9), (5e6, 9)) for call in range(calls)],
)
def test_a_call_that_is_held_up_does_not_count(monkeypatch, rate, call, burst):
    """TCP waits for 200 ms until it sends a packet again."""
    emulated = EmulatedLink(monkeypatch, rate, burst, held_up=[call], latency=5e-4)
    link, _ = measure_links.estimate_link("allreduce", emulated, emulated, emulated.new_run)
    assert call < len(emulated.calls)
    # After the first nine calls, messages may have more of the burst or less.
    assert link.beta == pytest.approx(1 / rate, rel=0.01 if not burst else 0.02 if call < 9 else 0.04)
    if not burst:
        assert 2 * link.alpha == pytest.approx(5e-4, rel=0.01)


@pytest.mark.parametrize("rate", [1.25e8, 1.25e7, 1.25e6])
@pytest.mark.parametrize("held_up", [(), (0,), (1,), (2,), (3,)])
def test_an_estimate_of_a_wan_takes_few_calls(monkeypatch, rate, held_up):
    emulated = EmulatedLink(monkeypatch, rate, latency=0.3, held_up=held_up)
    link, _ = measure_links.estimate_link("allreduce", emulated, emulated, emulated.new_run)
    assert 2 * link.alpha == pytest.approx(0.3, rel=0.01)
    assert len(emulated.calls) <= 5 and emulated.seconds < 4.0
    if not held_up:
        assert link.beta == pytest.approx(1 / rate, rel=0.01)


def test_the_usual_time_does_not_jump():
    assert midmean(np.array([4.0, 4.0, 4.0, 6.0, 6.0, 6.0, 4.0, 6.0])) == 5.0  # the median: 4 or 6 of one more
    assert midmean(np.array([1.0, 5.0, 4.0, 900.0])) == 4.5
    assert midmean(np.array([900.0, 4.0, 5.0])) == 5.0
    assert midmean(np.array([3.0])) == 3.0


def test_the_model_takes_each_collective_from_its_own_link():
    model = Calibration(4, LINKS, KERNELS).model()
    size = 2**20
    assert model.predict("none", size).total == pytest.approx(Ring(LINKS["allreduce"], 4).allreduce(size))
    payload = hvdc.Compression.int8.wire_bytes(size // 4)
    gathered = model.predict("int8", size, pattern="allgather")
    assert gathered.wire == pytest.approx(Ring(LINKS["allgather"], 4).allgather(payload))
    assert gathered.encode == pytest.approx(1e-4 + size * 5e-10)
    both = model.predict("int8", size, pattern="scatter_reduce")
    wire = Ring(LINKS["alltoall"], 4).alltoall(payload) + Ring(LINKS["allgather"], 4).allgather(payload / 4)
    assert both.wire == pytest.approx(wire)


def test_saved_and_loaded(tmp_path):
    calibration = Calibration(4, LINKS, KERNELS)
    calibration.save(tmp_path / "link.json")
    assert Calibration.load(tmp_path / "link.json") == calibration
    text = str(calibration)
    assert "4 ranks" in text and "allreduce: 100 us per message, 1 Gbit/s" in text
    bursting = Calibration(4, {**LINKS, "allgather": Link(2e-4, 1.6e-8, burst=2.5e5)}, KERNELS)
    assert "allgather: 200 us per message, 0.5 Gbit/s after 250 kB at once" in str(bursting)
    bursting.save(tmp_path / "link.json")
    assert Calibration.load(tmp_path / "link.json") == bursting
    assert "int8: 1 MB of gradient encoded in 0.60 ms, decoded in 0.28 ms" in text


def test_what_auto_needs_and_was_not_measured():
    calibration = Calibration(4, LINKS, KERNELS)
    wanted = ["int8", "hybrid:ratio=0.05,bits=4", "none", hvdc.Compression.int4]
    assert calibration.unmeasured(wanted) == ["hybrid:ratio=0.05,bits=4", "int4"]
    said = use_of(calibration, Path("link.json"))
    assert said.startswith(", for plan.") and "int2" in said and "int8" not in said and "none" not in said
    calibration = Calibration(4, LINKS, dict.fromkeys(CANDIDATES, KernelCost()))
    assert use_of(calibration, Path("link.json")) == ": HVD_COMPRESS_CALIBRATION=link.json makes auto read it."


def change(fields, *path, value):
    for key in path[:-1]:
        fields = fields[key]
    fields[path[-1]] = value


@pytest.mark.parametrize(
    "path, value, message",
    [
        (("format",), "other", "does not say format"),
        (("ranks",), 0, "ranks must be a whole number from 1 on, got 0"),
        (("ranks",), "4", "ranks must be a whole number"),
        (("links",), {}, "allreduce is missing"),
        (("links", "alltoall", "beta"), -1.0, "beta must be a finite number of seconds from 0 on, got -1.0"),
        (("links", "alltoall", "beta"), "fast", "beta must be a finite number"),
        (("links", "alltoall"), {"speed": 1}, "unexpected keyword"),
        (("links",), 7, "not subscriptable"),
        (("kernels", "int8", "encode"), float("nan"), "int8: encode must be a finite number"),
        (("kernels", "int8", "encode"), None, "int8: encode must be a finite number"),
        (("kernels",), [], "no attribute 'items'"),
    ],
)
def test_foreign_and_broken_files_are_refused(tmp_path, path, value, message):
    file = tmp_path / "link.json"
    Calibration(4, LINKS, KERNELS).save(file)
    fields = json.loads(file.read_text())
    change(fields, *path, value=value)
    file.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=message) as error:
        Calibration.load(file)
    assert str(file) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"format": "hvd_compress calibration 1"}'])
def test_files_cut_short_are_refused(tmp_path, text):
    file = tmp_path / "link.json"
    file.write_text(text)
    with pytest.raises(ValueError, match="is not a calibration"):
        Calibration.load(file)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match="none.json cannot be read: No such file"):
        Calibration.load(tmp_path / "none.json")


def test_all_collectives_are_kept():
    assert set(LINKS) == set(COLLECTIVES)


def test_links_inside_and_across_are_kept(tmp_path):
    file = tmp_path / "link.json"
    inside = {"reduce_scatter": Link(1e-5, 2e-10), "allgather": Link(2e-5, 3e-10)}
    across = {"allgather": Link(1e-4, 1.6e-8), "alltoall": Link(1e-4, 2e-8)}
    both = Calibration(4, LINKS, KERNELS, {}, Levels(2, 2, inside, across))
    both.save(file)
    assert Calibration.load(file) == both
    assert "2 hosts of 2 workers" in str(both) and "allgather across hosts: 100 us per message, 0.5 Gbit/s" in str(both)
    size, payload = 2**20, hvdc.Compression.int8.wire_bytes(2**18)
    found = both.model().predict("int8", size, "two_level")
    assert found.wire == pytest.approx(Ring(across["allgather"], 2).allgather(payload / 2))
    assert found.inside == pytest.approx(1e-5 + size / 2 * 2e-10 + 2e-5 + 2 * payload / 2 * 3e-10)
    # In one level nothing is different.
    assert both.model().predict("int8", size, "allgather") == Calibration(4, LINKS, KERNELS).model().predict(
        "int8", size, "allgather"
    )

    fields = json.loads(file.read_text())
    fields["levels"]["workers"] = 3
    file.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match="2 hosts of 3 workers are not 4 ranks"):
        Calibration.load(file)
    del fields["levels"]  # as written before there were any
    file.write_text(json.dumps(fields))
    assert Calibration.load(file) == Calibration(4, LINKS, KERNELS)


def test_the_speed_is_that_of_the_fastest_pass(monkeypatch):
    """Another thread may have the core during the others."""
    of_machine = measure_kernels.default_costs().pass_seconds
    monkeypatch.setattr(measure_kernels, "_times_of", lambda run, repeats: [9.0 * of_machine, 2.0 * of_machine])
    assert measure_kernels.measure_speed() == pytest.approx(2.0)
