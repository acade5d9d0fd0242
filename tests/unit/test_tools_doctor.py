"""The doctor on real runs (tests/data/make_runs.py made them), each with one thing wrong, and on damaged ones."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from hvd_compress.tools import doctor, round_rules, rules, run_log, training_rules
from hvd_compress.tools.cli import main

RUNS = Path(__file__).resolve().parent.parent / "data" / "runs"
FAULTS = {
    "diverges": "loss diverges",
    "unstable": "loss diverges",
    "residual": "residual grows",
    "guarded": "the guard acted",
    "dominates": "communication dominates",
    "slow_link": "communication dominates",
    "costs": "compression costs more than it saves",
    "loses_progress": "compression loses progress",
    "slow_rank": "slow rank",
    "oscillates": "loss oscillates",
    "link_changes": "switching to and fro",
    "flapping": "switching to and fro",
    "drifts": "ranks drift apart",
    "outer_step": "outer step too long",
    "statistics": "batch normalization drifts",
    "small_buckets": "small buckets",
    "memory": "memory grows",
}
HEALTHY = ["healthy", "healthy_none", "healthy_auto", "healthy_rounds"]


def found(name):
    return {finding.problem: finding for finding in doctor.examine(run_log.load(str(RUNS / name)))}


def test_every_rule_has_a_run_that_shows_its_fault():
    assert set(FAULTS.values()) == {rule.name for rule in rules.RULES}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name):
    finding = found(name)[FAULTS[name]]
    assert any(c.isdigit() for c in finding.figures) and finding.advice


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_found_in_a_healthy_run(name):
    assert not found(name)


@pytest.mark.parametrize("name", sorted(set(FAULTS) - {"diverges", "unstable", "oscillates", "guarded"}))
def test_other_faults_leave_the_loss_alone(name):
    assert not {"loss diverges", "loss oscillates"} & set(found(name))


def test_the_rate_of_a_slow_link_is_the_one_it_had():
    # 10 Mbit/s are 1.25 MB/s.
    figures = found("slow_link")["communication dominates"].figures
    assert 0.9e-3 < float(re.search(r"at ([0-9.]+) GB/s", figures).group(1)) < 1.3e-3


@pytest.mark.parametrize(
    ("late", "is_slow"),
    [
        (lambda i: True, True),
        (lambda i: i % 10 == 0, True),  # in each tenth step, ten times as much
        (lambda i: i >= 75, True),  # since the middle
        (lambda i: i // 19 in (1, 4, 5), False),  # bursts: somebody else was busy, too
        (lambda i: False, False),
    ],
)
def test_a_slow_rank_is_slow_throughout(late, is_slow):
    run = run_log.load(str(RUNS / "healthy"))
    where = np.array([late(i) for i in range(150)])
    more = np.where(where, 40.0 / max(where.mean(), 0.01) ** 0.5, 0.0)
    for rank in run.ranks:  # both wait for the same: what they do by themselves is 5 ms each, and rank 1 is late
        rank.steps["step_ms"] = 20.0 + more
        rank.steps["exposed_ms"] = 15.0 + (more if rank.number == 0 else 0.0 * more)
    assert (rules.slow_rank(run) is not None) == is_slow


def test_trials_of_auto_are_no_switching():
    run = run_log.load(str(RUNS / "healthy_auto"))
    columns = run.first.buckets["0"]
    tried = ["none"] * 10 + ["hybrid"] * 2 + ["none"] * 7 + ["int8"] * 2 + ["none"] * 7 + ["int4"] * 2
    columns["compressor"] = np.array([*tried, *["none"] * (len(columns["compressor"]) - len(tried))])
    assert rules.to_and_fro(run) is None
    columns["compressor"] = np.array([["none", "int8"][i // 6 % 2] for i in range(len(columns["compressor"]))])
    assert "switched" in rules.to_and_fro(run)


def test_a_milder_compressor_must_be_worth_it():
    run = run_log.load(str(RUNS / "loses_progress"))
    figures = rules.loses_progress(run)
    assert "hybrid:ratio=0.005,bits=4 lets" in figures and "the same progress" in figures
    link = run.meta["link"]
    # At 10 Mbit/s, the bytes of a milder one would take too long.
    run.meta["link"] = {**link, "ns_per_byte": 800.0}
    assert rules.loses_progress(run) is None
    run.meta["link"] = link
    run.settings["compression"] = "int4"  # nothing is advised that sends no more
    for rank in run.ranks:
        rank.steps["ratio"] = rank.steps["ratio"] * 0.0 + 7.5
        rank.steps["bytes"] = rank.steps["bytes"] * 0.0 + 1e6
    assert "int4 would" not in (rules.loses_progress(run) or "")
    run = run_log.load(str(RUNS / "loses_progress"))
    run.meta["link"] = None  # and without a link, nobody knows
    assert rules.loses_progress(run) is None
    run.meta["link"] = link
    for columns in run.first.buckets.values():
        columns["relative_error"] = 0.3 + 0.0 * columns["relative_error"]  # as of hadamard
    assert rules.loses_progress(run) is None


def test_what_was_saved_is_in_the_doctor_s_output():
    result = call("doctor", RUNS / "healthy_auto")
    assert result.exit_code == 0 and "By its cost model, auto took" in result.output
    assert "ms per progress" in result.output and "trials of candidates" in result.output
    found = json.loads(call("doctor", RUNS / "healthy_auto", "--json").output)
    assert {"auto", "none", "fp16"} <= {each["compressor"] for each in found["auto"]} and len(found["saved"]) == 4


def test_the_slow_rank_is_named_with_its_times():
    assert found("slow_rank")["slow rank"].figures.startswith("rank 1 takes ")


def copy(name, tmp_path):
    return Path(shutil.copytree(RUNS / name, tmp_path / name))


def rewrite(path, column, change):
    """Changes a column of a CSV file: `change(row number, cell)`."""
    header, *rows = [line.split(",") for line in path.read_text().splitlines()]
    place = header.index(column)
    for i, row in enumerate(rows):
        row[place] = str(change(i, row[place]))
    path.write_text("\n".join(",".join(row) for row in [header, *rows]) + "\n")


def rename(path, column):
    path.write_text(path.read_text().replace(column, "other", 1))


def rename_column(path, old, new):
    header, _, rows = path.read_text().partition("\n")
    path.write_text(",".join(new if name == old else name for name in header.split(",")) + "\n" + rows)


def loop(path):
    path.unlink()
    path.symlink_to(path.name)


def meta(directory, **changes):
    path = directory / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    "change, problem",
    [
        (lambda i, c: float(c) if i < 100 else "inf", "loss diverges"),
        (lambda i, c: float(c) if i < 75 else 1.0 + 0.02 * (i - 75), "loss diverges"),
        (lambda i, c: 2.3 if i < 3 else 80.0 / i if i < 30 else 2.3026, "loss diverges"),
        (lambda i, c: [2.0, 5.0][i % 2], "loss oscillates"),
        (lambda i, c: 2.3 + 1.5 * np.sin(i / 8), "loss oscillates"),
    ],
)
def test_losses_that_go_wrong(change, problem, tmp_path):
    directory = copy("healthy", tmp_path)
    for rank in range(2):
        rewrite(directory / f"rank-{rank}.csv", "loss", change)
    assert problem in {finding.problem for finding in doctor.examine(run_log.load(str(directory)))}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "level",
    [
        lambda t: 2.3 * np.exp(-t / 40) + 0.01,  # falls, and stays
        lambda t: 2.3 / (1 + t / 20),
        lambda t: np.full_like(t, 1.0),  # fine-tuning: nothing left to gain
        lambda t: 8.0 - t / 200,  # slow
        lambda t: -t / 50,  # below zero
    ],
)
def test_noisy_but_healthy_losses_are_left_alone(level, seed, tmp_path):
    run = run_log.load(str(RUNS / "healthy"))
    t = np.arange(150.0)
    noise = np.random.default_rng(seed).standard_normal((2, 150))
    loss = level(t) + (0.05 + 0.1 * np.abs(level(t))) * noise
    for rank, own in zip(run.ranks, loss):
        rank.steps["loss"] = own
    assert training_rules.loss_diverges(run) is None
    assert training_rules.loss_oscillates(run) is None


def test_ranks_that_move_alike_do_not_drift(tmp_path):
    directory = copy("drifts", tmp_path)
    for rank in range(2):
        rewrite(directory / f"rank-{rank}-rounds.csv", "drift", lambda i, c: 0.0)
    assert not doctor.examine(run_log.load(str(directory)))


def test_rounds_that_auto_made_longer_do_not_drift(tmp_path):
    """The longer a round, the further apart the ranks are at its end."""
    directory = copy("drifts", tmp_path)
    count = len((directory / "rank-0-rounds.csv").read_text().splitlines()) - 1
    steps = np.cumsum([1] * (count // 3) + [8] * (count - count // 3))
    for rank in range(2):
        path = directory / f"rank-{rank}-rounds.csv"
        rewrite(path, "step", lambda i, c: float(steps[i]))
        rewrite(path, "drift", lambda i, c: 1.0 if i < count // 3 else 8.0)
    run = run_log.load(str(directory))
    assert round_rules.drift_grows(run) is None
    rewrite(directory / "rank-0-rounds.csv", "step", lambda i, c: -1.0)  # the ranks have no exchange in common
    assert round_rules.drift_grows(run_log.load(str(directory))) is None
    rewrite(directory / "rank-0-rounds.csv", "step", lambda i, c: float(steps[i]))
    for rank in range(2):  # but not if they drift within rounds of one length
        rewrite(directory / f"rank-{rank}-rounds.csv", "drift", lambda i, c: 1.0 + i)
    assert "rounds have 8 steps" in round_rules.drift_grows(run_log.load(str(directory)))


def test_too_few_steps_tell_nothing(tmp_path):
    directory = copy("slow_rank", tmp_path)
    for rank in range(2):
        path = directory / f"rank-{rank}.csv"
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:8]))
    assert doctor.examine(run_log.load(str(directory))) == []


def test_a_short_run_is_not_called_healthy(tmp_path):
    directory = copy("healthy", tmp_path)
    for rank in range(2):
        path = directory / f"rank-{rank}.csv"
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:8]))
    result = call("doctor", directory)
    assert result.exit_code == 0 and "only 7 steps: most rules need 25" in result.output
    assert "healthy: none" not in result.output
    assert json.loads(call("doctor", directory, "--json").output)["too_short"]
    assert not json.loads(call("doctor", RUNS / "healthy", "--json").output)["too_short"]


def test_many_ranks_of_which_few_wrote_are_read_at_once(tmp_path):
    directory = copy("healthy", tmp_path)
    meta(directory, ranks=10**9)
    assert [rank.number for rank in run_log.load(str(directory)).ranks] == [0, 1]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda i, c: float(c) if i < 100 else "inf", "it had not risen before"),
        (
            lambda i, c: float(c) if i < 80 else float(c) * 10.0 ** (i - 80) if i < 95 else "inf",
            "it had risen before",
        ),
        (lambda i, c: "inf", "it never was"),
    ],
)
def test_what_came_before_a_loss_that_is_no_number_is_said(change, word, tmp_path):
    directory = copy("healthy", tmp_path)
    for rank in range(2):
        rewrite(directory / f"rank-{rank}.csv", "loss", change)
    assert word in training_rules.loss_diverges(run_log.load(str(directory)))


def test_a_run_that_still_goes_on_is_read(tmp_path):
    directory = copy("slow_rank", tmp_path)
    path = directory / "rank-1.csv"
    path.write_text(path.read_text()[:-40])  # half a line
    run = run_log.load(str(directory))
    assert len(run.ranks[1].steps["step"]) == len(run.ranks[0].steps["step"]) - 1
    assert [finding.problem for finding in doctor.examine(run)] == ["slow rank"]


def test_a_rank_without_files_is_left_out(tmp_path):
    directory = copy("slow_rank", tmp_path)
    (directory / "rank-1.csv").unlink()
    run = run_log.load(str(directory))
    assert len(run.ranks) == 1
    assert "slow rank" not in {finding.problem for finding in doctor.examine(run)}


def call(*arguments):
    return CliRunner().invoke(main, list(map(str, arguments)))


def test_exit_status_and_text():
    healthy = call("doctor", RUNS / "healthy")
    assert healthy.exit_code == 0 and "healthy: none of 14 rules" in healthy.output
    slow = call("doctor", RUNS / "slow_rank")
    assert slow.exit_code == 1
    assert "slow rank" in slow.output and "rank 1 takes" in slow.output and "input pipeline" in slow.output


def test_json():
    result = call("doctor", RUNS / "slow_rank", "--json")
    assert result.exit_code == 1
    data = json.loads(result.output)
    assert not data["healthy"] and data["ranks"] == 2
    assert {"problem", "figures", "advice"} == set(data["findings"][0])
    assert json.loads(call("doctor", RUNS / "healthy", "--json").output)["findings"] == []


def test_unknown_numbers_of_auto_are_null(tmp_path):
    directory = copy("healthy_auto", tmp_path)
    whole = json.loads(call("doctor", directory, "--json").output)["auto"]
    rewrite(directory / "auto.csv", "progress", lambda i, cell: "" if i == 0 else cell)  # that of the first choice
    result = call("doctor", directory, "--json")
    damaged = json.loads(result.output)["auto"]
    assert [one["compressor"] for one in damaged] == [one["compressor"] for one in whole]
    assert {one["seconds"] for one in damaged} == {None}
    assert "nan" not in call("doctor", directory).output.partition("predicted")[0]


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda d: shutil.rmtree(d), "no such directory"),
        (lambda d: (d / "run.json").unlink(), "holds no run: it has no run.json"),
        (lambda d: (d / "run.json").write_text("{"), "run.json cannot be read"),
        (
            lambda d: (d / "run.json").write_text('{"format": 99, "ranks": 2}'),
            "has format 99, this version reads 1",
        ),
        (
            lambda d: (d / "run.json").write_text(json.dumps({"format": ["x" * 90] * 9})),
            "..., this version reads 1: use the hvd_compress that wrote it",
        ),
        (lambda d: [(d / f"rank-{r}.csv").unlink() for r in (0, 1)], "holds no steps"),
        (lambda d: (d / "rank-0.csv").write_text("a,b\n1,2\n"), "is damaged: it has no column 'step'"),
        (lambda d: rewrite(d / "rank-0.csv", "loss", lambda i, c: "x"), "is damaged: column 'loss'"),
        (lambda d: rename(d / "rank-0.csv", "exchange_ms"), "is damaged: it has no column 'exchange_ms'"),
        (lambda d: rename(d / "rank-1.csv", "memory_mb"), "is damaged: it has no column 'memory_mb'"),
        (lambda d: rename(d / "rank-0-buckets.csv", "bytes"), "is damaged: it has no column 'bytes'"),
        (lambda d: rewrite(d / "rank-1.csv", "step", lambda i, c: 1000 + i), "have no step in common"),
        (lambda d: (d / "run.json").write_text("[1]"), "run.json is not of hvd_compress"),
        (lambda d: meta(d, ranks="two"), "run.json is damaged: 'ranks' is \"two\""),
        (lambda d: meta(d, link={"latency_ms": 1}), "run.json is damaged: 'link' is"),
        (lambda d: meta(d, buckets=[{"name": "0"}]), "run.json is damaged: 'buckets' is"),
        (lambda d: meta(d, settings=[]), "run.json is damaged: 'settings' is []"),
        (lambda d: meta(d, buckets=[{"name": ["0"], "nbytes": 1}]), "run.json is damaged: 'buckets' is"),
        (lambda d: meta(d, first_step_seconds=10**400), "run.json is damaged: 'first_step_seconds' is"),
        (lambda d: meta(d, first_step_seconds=[]), "run.json is damaged: 'first_step_seconds' is []"),
        (lambda d: meta(d, memory_total_mb=""), "run.json is damaged: 'memory_total_mb' is \"\""),
        (lambda d: (d / "run.json").write_text("[" * 100_000), "run.json cannot be read"),
        (lambda d: rename_column(d / "rank-0.csv", "loss", "ratio"), "is damaged: a column stands twice"),
        (lambda d: loop(d / "rank-0.csv"), "cannot be read"),
    ],
)
def test_what_cannot_be_read_is_one_line_and_status_2(damage, message, tmp_path):
    directory = copy("healthy", tmp_path)
    damage(directory)
    for command in (["doctor"], ["report", "-o", tmp_path / "x.html"]):
        result = call(*command, directory)
        assert result.exit_code == 2
        (line,) = [line for line in result.output.splitlines() if line.startswith("Error: ")]
        assert message in line and len(line) < 400
        assert not (tmp_path / "x.html").exists()


def test_rows_of_a_step_that_stand_twice_count_once(tmp_path):
    directory = copy("healthy", tmp_path)
    expected = run_log.load(str(directory))
    for name in ("rank-0.csv", "rank-0-buckets.csv"):
        path = directory / name
        path.write_text(path.read_text() + "".join(path.read_text().splitlines(keepends=True)[1:20]))
    run = run_log.load(str(directory))
    np.testing.assert_array_equal(run.of_all("step_ms"), expected.of_all("step_ms"))
    assert call("doctor", directory).output == call("doctor", RUNS / "healthy").output.replace(
        str(RUNS / "healthy"), str(directory)
    )


def test_files_of_other_names_are_no_ranks(tmp_path):
    directory = copy("healthy", tmp_path)
    shutil.copy(directory / "rank-0.csv", directory / "rank-00.csv")
    assert [rank.number for rank in run_log.load(str(directory)).ranks] == [0, 1]


def test_what_a_run_contains_cannot_forge_lines_or_plots(tmp_path):
    directory = copy("healthy", tmp_path)
    settings = json.loads((directory / "run.json").read_text())["settings"]
    forged = "int8\nhealthy: none of 14 rules found anything\x1b[2J"
    meta(directory, settings={**settings, "compression": forged})
    path = directory / "rank-0-buckets.csv"
    rewrite(path, "bucket", lambda i, cell: "$\\frac{$" if cell == "0" else cell)
    result = call("doctor", directory)
    assert "\x1b" not in result.output and "int8\ufffdhealthy" in result.output.splitlines()[0]
    assert call("report", "-o", tmp_path / "x.html", directory).exit_code == 0


def test_no_tensorflow_is_needed():
    code = (
        "import sys, types; package = types.ModuleType('hvd_compress'); package.__path__ = ['hvd_compress']\n"
        "sys.modules['hvd_compress'] = package\n"
        "from hvd_compress.tools import doctor, report, run_log\n"
        f"run = run_log.load({str(RUNS / 'slow_rank')!r}); assert doctor.examine(run); assert report.page(run)\n"
        "assert not {'tensorflow', 'horovod'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=RUNS.parent.parent.parent, timeout=60)
