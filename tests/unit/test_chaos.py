"""benchmarks/chaos.py: the plan of faults, and the checks, which must find what is wrong."""

import statistics
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import chaos_invariants as invariants  # noqa: E402
import chaos_plan  # noqa: E402
import chaos_report as report  # noqa: E402

LOST = "elastic: the residuals of rank 1 of 3 are lost: the rank with their copies is gone, too"


def test_the_same_seed_gives_the_same_plan():
    first, again, other = (chaos_plan.plan(seed, 30, list(chaos_plan.KINDS), 40) for seed in (5, 5, 6))
    assert first == again and first != other
    # A longer plan begins with the shorter one.
    assert chaos_plan.plan(5, 30, list(chaos_plan.KINDS), 50)[:40] == first


def test_the_times_between_faults_are_exponential():
    faults = chaos_plan.plan(1, 20.0, ["kill", "join"], 4000)
    gaps = [b.at - a.at for a, b in zip(faults, faults[1:])]
    assert statistics.fmean(gaps) == pytest.approx(20, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(20, rel=0.1)  # of an exponential: its mean
    assert sum(gap > 40 for gap in gaps) / len(gaps) == pytest.approx(0.1353, rel=0.2)  # exp(-2)


def test_each_kind_comes_once_before_any_comes_again():
    kinds = list(chaos_plan.KINDS)
    drawn = [fault.kind for fault in chaos_plan.plan(2, 10, kinds, 3 * len(kinds))]
    for i in range(3):
        assert sorted(drawn[i * len(kinds) : (i + 1) * len(kinds)]) == sorted(kinds)


def test_durations_and_parts_are_those_of_the_kind():
    for fault in chaos_plan.plan(3, 10, list(chaos_plan.KINDS), 300):
        low, high = chaos_plan.KINDS[fault.kind][1]
        assert low <= fault.seconds <= high and 0 <= fault.victim < 1
        assert len({part.kind for part in fault.parts}) == (2 if fault.kind == "double" else 0)
        assert all(part.kind in chaos_plan.SINGLE for part in fault.parts)


def test_a_plan_ends_after_its_time_and_refuses_what_it_does_not_know():
    faults = chaos_plan.plan(4, 10, ["kill"], seconds=200)
    assert 5 < len(faults) < 50 and faults[-1].at <= 200
    with pytest.raises(ValueError, match="'flood'"):
        chaos_plan.plan(4, 10, ["kill", "flood"], 3)
    with pytest.raises(ValueError, match="number of faults or a time"):
        chaos_plan.plan(4, 10, ["kill"])


def test_a_victim_number_stands_for_one_of_those_that_are_there():
    assert [chaos_plan.pick(victim, "abc") for victim in (0.0, 0.34, 0.99, 1.0)] == ["a", "b", "c", "c"]


def commit(step, weights, t=0.0, pid=1, round=1, loss=2.0, size=2):
    values = {"step": step, "weights": weights, "t": t, "pid": pid, "round": round, "loss": loss, "size": size}
    return {"event": "commit", **values}


def synced(t, committed, now, pid=1, rank=0, size=2, round=1, lost=False, step=5):
    values = {"t": t, "committed": committed, "now": now, "pid": pid, "rank": rank, "size": size, "round": round}
    return {"event": "synced", "lost": lost, "step": step, **values}


def test_different_weights_are_found():
    same = [commit(5, 1, pid=1), commit(5, 1, pid=2), commit(10, 2, pid=1), commit(5, 3, pid=1, round=2)]
    assert invariants.weights_differ(same) == []
    assert invariants.weights_differ([*same, commit(10, 4, pid=2)]) == ["weights differ after the commit of step 10"]


def test_a_lost_residual_is_found_unless_a_warning_said_so():
    rounding = synced(1, [1.0, 100.0], [1.00005, 90.0])
    assert invariants.residuals_changed([rounding]) == []
    gone = synced(2, [1.0, 100.0], [0.5, 60.0])
    assert len(invariants.residuals_changed([rounding, gone])) == 1
    assert invariants.residuals_changed([{**gone, "lost": True}]) == []
    assert len(invariants.residuals_changed([synced(1, [1.0, 100.0], [float("nan"), 90.0])])) == 1


@pytest.mark.parametrize("present, count", [([0], 0), ([0, 2], 1), ([0, 1], 1)])
def test_residuals_may_be_lost_only_with_both_of_their_ranks(present, count):
    before = [synced(1, [0, 0], [0, 0], pid=100 + rank, rank=rank, size=3) for rank in range(3)]
    warning = {"event": "warning", "t": 2.0, "pid": 100, "text": LOST}
    after = [synced(3, [0, 0], [0, 0], pid=100 + rank, size=len(present), round=2, lost=True) for rank in present]
    assert len(invariants.lost_without_reason([*before, warning, *after])) == count


def saved(step=20, rank=0, size=2, residuals=7, total=(1.0, 10.0)):
    return {"event": "saved", "t": 1, "step": step, "rank": rank, "size": size, "residuals": residuals, "sum": total}


WEIGHTS = {"event": "saved_weights", "t": 1, "step": 20, "weights": 3}


@pytest.mark.parametrize(
    "change, count",
    [
        ({}, 0), ({"weights": 4}, 1), ({"residuals": 8}, 1), ({"sum": (2.0, 10.0)}, 1), ({"step": 40}, 2),
        ({"size": 3, "residuals": 8}, 0),  # other ranks: only the sum is the same
        ({"size": 3, "sum": (2.0, 10.0)}, 1),
        ({"size": 1, "sum": (0.0, 0.0)}, 0),  # a single rank leaves residuals out
    ],
)  # fmt: skip
def test_what_is_loaded_must_be_what_was_saved(change, count):
    loaded = {**saved(), "event": "loaded", "t": 2, "weights": 3, **change}
    assert len(invariants.loaded_wrongly([saved(), WEIGHTS, loaded])) == count


@pytest.mark.parametrize(
    "damaged, read, count",
    [
        (None, {"step": 20, "rank": 0, "size": 2, "residuals": 7}, 0),
        (None, {"step": 20, "rank": 0, "size": 2, "residuals": 8}, 1),
        (None, {"refused": "it is damaged"}, 1),
        ("rank-0-of-2.npz", {"refused": "it is damaged"}, 0),
        ("rank-0-of-2.npz", {"step": 20, "rank": 0, "size": 2, "residuals": 7}, 1),
        ("manifest.json", {"step": 20, "rank": 0, "size": 2, "residuals": 7}, 1),
        ("rank-1-of-2.npz", {"step": 20, "rank": 0, "size": 2, "residuals": 7}, 0),
    ],
)
def test_a_damaged_copy_must_be_refused_and_a_whole_one_read(damaged, read, count):
    copies = [{"name": "copy-1", "damaged": damaged, "files": {"rank-0-of-2.npz": read}}]
    assert len(invariants.copies_wrong(copies, [saved()])) == count


def test_a_save_that_nobody_confirmed_may_hold_anything():
    begins = {"event": "save_begins", "t": 1, "step": 40, "rank": 0, "size": 2}
    read = {"step": 40, "rank": 0, "size": 2, "residuals": 8}
    copies = [{"name": "copy-1", "damaged": None, "files": {"rank-0-of-2.npz": read}}]
    assert invariants.copies_wrong(copies, [saved(), begins]) == []


def test_a_training_without_commits_counts_as_hanging():
    assert invariants.late(100.0, 150.0, 60.0) is None
    assert invariants.late(100.0, 161.0, 60.0) == "no new commit for 61 s"


def line(shift, steps=range(5, 505, 5)):
    return {step: 5.0 * step**-0.1 + shift for step in steps}


def test_a_loss_outside_of_the_spread_is_found():
    others = [line(-0.05), line(0.0), line(0.05)]
    assert invariants.curve_astray(line(0.1), others) == []
    assert len(invariants.curve_astray(line(0.5), others)) == 1
    assert len(invariants.curve_astray(line(-0.5), others)) == 1
    late = {step: loss + (1.0 if step > 400 else 0.0) for step, loss in line(0.0).items()}
    (found,) = invariants.curve_astray(late, others)
    assert "of 100 commits; at step 500" in found
    assert invariants.curve_astray({5: float("nan")}, others) == ["a loss is not finite"]


def test_the_curve_takes_the_last_training_of_a_step():
    events = [commit(5, 1, t=1, loss=3.0), commit(10, 1, t=2, loss=2.0), commit(10, 1, t=3, loss=2.5)]
    assert invariants.curve([*events, commit(10, 1, t=4, loss=None)]) == {5: 3.0, 10: 2.5}


def test_goodput_counts_committed_steps():
    calm = [commit(step, 1, t=step * 0.1, size=4) for step in range(5, 105, 5)]
    slow = [commit(step, 1, t=step * 0.2, size=2) for step in range(5, 105, 5)]
    slow += [commit(50, 1, t=10.5, round=2, size=2)]  # trained again
    a, b = report.progress(calm), report.progress(slow)
    assert (a["steps"], a["worker_steps"]) == (95, 380) and (b["steps"], b["worker_steps"]) == (95, 190)
    assert report.goodput(b, [a, a, a], "steps") == pytest.approx(0.5)
    assert report.goodput(b, [a], "worker_steps") == pytest.approx(0.25)
    assert report.goodput(b, [], "steps") is None


def test_steps_that_were_lost_do_not_count():
    events = [commit(step, 1, t=step * 0.1) for step in range(5, 105, 5)]
    events += [commit(step, 1, t=20 + step * 0.1, round=2, size=1) for step in (45, 50)]
    assert report.progress(events) == {"steps": 45, "worker_steps": 35 * 2 + 10, "seconds": pytest.approx(24.5)}


def step(number, t, pid=1):
    return {"event": "step", "step": number, "t": t, "pid": pid}


def test_each_fault_is_charged_for_its_pause_and_its_steps():
    events = [step(i, i * 1.0) for i in range(1, 13)]  # the last one at 12
    events += [commit(5, 1, t=5.0), commit(10, 1, t=10.0)]
    events += [synced(30.0, [0, 0], [0, 0], step=10, round=2), step(11, 31.0), step(12, 32.0), commit(15, 1, t=34.0)]
    events += [step(13, 33.0), commit(20, 1, t=36.0, round=2)]
    faults = [{"kind": "join", "t": 4.0}, {"kind": "kill", "t": 12.1}, {"kind": "join", "t": 35.0}]
    rows = report.costs(events, faults, 40.0)
    assert [row["lost_steps"] for row in rows] == [0, 2, 0]
    assert rows[0]["pause"] == pytest.approx(24.0) or rows[0]["pause"] == pytest.approx(5.0)
    assert rows[1]["pause"] == pytest.approx(21.9)
    assert rows[2]["pause"] == pytest.approx(1.0)
    table = report.table(rows, [{"after": "kill"}])
    assert table == [["join", "2", table[0][2], table[0][3], "0", "0"], ["kill", "1", "21.9", "21.9", "2", "1"]]
