"""`hvd-compress tune`, with a launcher that starts one process and scripts that take no time."""

import json
import re
import sys
import time

import numpy as np
import pytest
from click.testing import CliRunner

from hvd_compress import formats
from hvd_compress.cost import CostModel, Link
from hvd_compress.monitor.tune_protocol import MARK
from hvd_compress.tools import cli, prediction, search, trial
from hvd_compress.tools import tune as tune_command
from hvd_compress.tools.trial import Run, run

# Instead of horovodrun: drops its own options, and starts the command once, as rank 0.
LAUNCHER = """
import subprocess, sys
command = sys.argv[1:]
while command[0] in ("-np", "-H"):
    command = command[2:]
process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
for line in process.stdout:
    print("[0]<stdout>:" + line, end="", flush=True)
sys.exit(process.wait())
"""
# Steps take the time that the setting's name decides, and so does the loss.
SCRIPT = """
import json, os, sys
open(sys.argv[1], "a").write(os.environ["HVD_COMPRESS"] + "\\n")
spec, size = os.environ["HVD_COMPRESS"], int(os.environ["HVD_COMPRESS_BUCKET_BYTES"])
name = spec.partition(":")[0]
step = {"none": 0.1, "int8": 0.05, "hybrid": 0.01}.get(name, 0.08) * (0.9 if size < 2**23 else 1.0)
loss = {"none": 1.0, "int8": 1.01, "hybrid": 1.5}.get(name, 1.005)
mark = "\\nhvd_compress-tune: "
print("loss: 7.0")
print(mark + json.dumps({"compression": spec, "bucket_bytes": size}))
print(mark + json.dumps({"steps": [3.0] * 5 + [step] * 20}))
print(mark + json.dumps({"metrics": {"loss": 2.0, "val_accuracy": 0.9 - (loss - 1) / 2}}))
print(mark + json.dumps({"metrics": {"loss": loss, "val_accuracy": 0.9 - (loss - 1) / 2}}))
print(f"final loss: {loss}")
"""
# What follows then.
GOES_ON = """
import time
while name == "hybrid":
    print("going on", flush=True)
    time.sleep(0.1)
"""


@pytest.fixture
def tune(tmp_path):
    launcher = tmp_path / "launcher.py"
    launcher.write_text(LAUNCHER)

    def start(*options, script=SCRIPT, study="study.log"):
        path = tmp_path / "train.py"
        path.write_text(script)
        return CliRunner().invoke(
            cli.main,
            ["tune", "-np", "2", "--launcher", f"{sys.executable} {launcher}", "--study", str(tmp_path / study),
             *options, str(path), str(tmp_path / "runs")],
        )  # fmt: skip

    start.runs = lambda: (tmp_path / "runs").read_text().split()
    start.path = tmp_path
    return start


def test_the_fastest_within_the_loss_is_found_and_the_study_goes_on(tune):
    first = tune("--trials", "4", "--json")
    assert first.exit_code == 0, first.output
    found = json.loads(first.stdout)
    # No compression, then what is good in many cases.
    assert tune.runs()[:3] == ["none", "int8", "hybrid:ratio=0.01,bits=4"]
    assert len(found["trials"]) == 4
    assert found["baseline"]["step"] == pytest.approx(0.1) and found["baseline"]["metric"] == 1.0
    by_spec = {row["compression"]: row for row in found["trials"]}
    assert by_spec["hybrid:ratio=0.01,bits=4"]["step"] == pytest.approx(0.01)
    assert by_spec["hybrid:ratio=0.01,bits=4"]["loss_increase"] == pytest.approx(0.5)
    assert found["best"]["compression"] == "int8"  # hybrid is faster but loses too much
    assert found["line"] == 'hvdc.DistributedOptimizer(optimizer, compression="int8")'
    count = len(tune.runs())
    second = json.loads(tune("--trials", "8", "--json").stdout)
    assert second["trials"][:4] == found["trials"]
    assert len(second["trials"]) == 8 and len(tune.runs()) <= count + 4
    # What is allowed may change.
    more = json.loads(tune("--trials", "8", "--json", "--max-loss-increase", "1").stdout)
    assert more["best"]["compression"].startswith("hybrid")
    plot = tune.path / "tune.svg"
    third = tune("--trials", "8", "--plot", str(plot))
    assert f"plot: {plot}" in " ".join(third.output.split()) and "<svg" in plot.read_text()
    # As after the first run, with three more to go.
    study = search.open_study(tune.path / "study.log", 0.02)
    seconds = np.mean([run.user_attrs["seconds"] for run in search.runs(study)])
    assert tune_command._outlook(study, 0.02, 3) == f"; about {3 * seconds:.0f} s left; best so far int8, 2.00x"
    assert third.exit_code == 0 and "Write into the script:" in third.output
    assert "loses too much" in third.output


# The loss is too high with local steps, and with 30 of them too few rounds are made to time them.
WITH_EXCHANGES = SCRIPT.replace('"bucket_bytes": size}', '"bucket_bytes": size, "exchange": exchange or "each step"}')
WITH_EXCHANGES = WITH_EXCHANGES.replace("[3.0] * 5 + [step] * 20", "[3.0] * (count // 4) + [step] * count").replace(
    "mark =",
    """exchange = os.environ["HVD_COMPRESS_EXCHANGE"]
step /= {"": 1, "delay=1": 2}.get(exchange, 4)
loss += exchange.startswith("local")
count = 0 if exchange == "local_steps=30" else 20
mark =""",
)


def test_exchanges_that_are_asked_for_are_tried(tune):
    options = ["--trials", "10", "-c", "quantize", "--delay", "--local-steps", "8,30"]
    result = tune(*options, "--json", script=WITH_EXCHANGES)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    rows = {(row["compression"], row["exchange"]): row for row in found["trials"]}
    others = [(spec, e) for e in ("delay=1", "local_steps=8", "local_steps=30") for spec in ("int8", "int4")]
    assert list(rows) == [(spec, "each step") for spec in ("none", "int8", "int4", "quantize:bits=3")] + others
    assert rows["int8", "local_steps=8"]["step"] == pytest.approx(0.05 / 4)
    assert rows["int8", "local_steps=8"]["loss_increase"] > 0.5
    assert rows["int8", "local_steps=30"]["status"] == "failed"
    assert found["line"] == 'hvdc.DistributedOptimizer(optimizer, compression="int8", delay=1)'
    shown = tune(*options, script=WITH_EXCHANGES).output
    assert "exchange" in shown and "local_steps=8" in shown
    again = tune("--trials", "5", "-c", "quantize", script=WITH_EXCHANGES)
    assert again.exit_code == 2 and "it is of another choice of exchanges" in " ".join(again.output.split())
    one_step = tune("--local-steps", "1", script=WITH_EXCHANGES)
    assert one_step.exit_code == 2 and "local steps start from 2" in one_step.output


def test_a_delay_of_the_script_is_its_own_matter(tune):
    script = SCRIPT.replace('"bucket_bytes": size}', '"bucket_bytes": size, "exchange": "delay=1"}')
    assert tune("--trials", "2", script=script).exit_code == 0
    result = tune("--trials", "2", "--delay", script=script, study="2")
    assert result.exit_code == 1 and "the script sets exchange to delay=1 itself" in " ".join(result.output.split())


def test_what_was_run_is_not_run_again(tune):
    assert tune("--trials", "14", "-c", "onebit").exit_code == 0
    runs = tune.runs()
    assert set(runs) == {"none", "onebit"}
    # Each once, but for the best and its rival, which may be run again; then there is nothing left to try.
    assert len(runs) <= 2 * len(search.BUCKETS) + 2 < 14


def test_more_may_be_better(tune):
    result = tune("--trials", "3", "--metric", "val_accuracy", "--json", "--max-loss-increase", "0.3")
    found = json.loads(result.stdout)
    assert found["best"]["compression"] == "hybrid:ratio=0.01,bits=4"
    assert [row["metric"] for row in found["trials"]] == pytest.approx([0.9, 0.895, 0.65])
    strict = tune("--trials", "3", "--metric", "val_accuracy", "--json", "--max-loss-increase", "0.1", study="2")
    assert json.loads(strict.stdout)["best"]["compression"] == "int8"


def test_the_metric_may_be_printed(tune):
    result = tune("--trials", "3", "--metric-regex", r"loss: ([0-9.]+)", "--json")
    assert [row["metric"] for row in json.loads(result.stdout)["trials"]] == [1.0, 1.01, 1.5]


def test_steps_that_make_little_progress_must_be_shorter(tune):
    """Steps that take a fifth less time, of which training needs twice as many, are not faster."""
    script = SCRIPT.replace('"hybrid": 0.01', '"hybrid": 0.04')
    found = json.loads(tune("--trials", "3", "--json", "--max-loss-increase", "1", script=script).stdout)
    int8, hybrid = found["trials"][1:]
    assert hybrid["progress"] < 0.6 and hybrid["per_progress"] > int8["per_progress"] == pytest.approx(0.05, rel=1e-3)
    assert hybrid["step"] < int8["step"] and found["best"]["compression"] == "int8"
    assert "training is about 2.00 times as fast" in " ".join(tune("--trials", "3", script=script).output.split())


def test_local_steps_and_a_delay_make_their_own_progress():
    each, delayed, rounds = (
        search.Setting("int8", search.BASELINE.bucket_bytes, e) for e in ("each step", "delay=1", "local_steps=8")
    )
    assert each.progress == pytest.approx(1.0, abs=1e-3)
    assert delayed.progress == pytest.approx(0.6 * each.progress)
    assert rounds.progress == pytest.approx(8**-0.07 * each.progress)
    assert delayed.cost(0.06) == pytest.approx(0.1, rel=1e-3)


def test_what_takes_too_long_is_ended(tune):
    script = SCRIPT + "\nimport time\ntime.sleep(0 if name == 'none' else 600)\n"
    start = time.monotonic()
    result = tune("--trials", "2", "--time-limit", "15s", "--json", script=script)
    assert time.monotonic() - start < 300
    assert [row["status"] for row in json.loads(result.stdout)["trials"]] == ["done", "too slow"]


def test_what_is_slower_than_the_best_by_far_is_ended_early(tune):
    slow = SCRIPT + GOES_ON
    slow = slow.replace('"hybrid": 0.01', '"hybrid": 0.5')
    start = time.monotonic()
    found = json.loads(tune("--trials", "3", "--json", script=slow).stdout)
    assert time.monotonic() - start < 60
    assert [row["status"] for row in found["trials"]] == ["done", "done", "too slow"]
    assert found["trials"][2]["step"] == pytest.approx(0.5) and found["trials"][2]["loss_increase"] is None


def test_what_diverges_is_ended_early(tune):
    script = SCRIPT.replace('"hybrid": 1.5', '"hybrid": float("nan")')
    script += GOES_ON
    start = time.monotonic()
    found = json.loads(tune("--trials", "3", "--json", script=script).stdout)
    assert time.monotonic() - start < 60
    assert found["trials"][2]["metric"] is None and found["trials"][2]["loss_increase"] > 1e6
    assert found["best"]["compression"] == "int8"


def test_one_setting_that_fails_is_no_end(tune):
    script = "import os\nif os.environ['HVD_COMPRESS'] == 'int8': raise SystemExit(3)\n" + SCRIPT
    result = tune("--trials", "3", "--json", "--max-loss-increase", "1", script=script)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [row["status"] for row in found["trials"]] == ["done", "failed", "done"]
    assert found["best"]["compression"] == "hybrid:ratio=0.01,bits=4"


@pytest.mark.parametrize(
    ("script", "options", "status", "message"),
    [
        ("raise SystemExit('boom')", [], 1, "the script fails without compression:\nboom"),
        ("print('hello')", [], 1, "the script made too few steps with hvdc.DistributedOptimizer"),
        (SCRIPT.replace('"none": 1.0', '"none": float("nan")'), [], 1, "without compression loss is nan"),
        (SCRIPT, ["--metric", "val_loss"], 1, "no metric 'val_loss': the script has loss, val_accuracy"),
        (SCRIPT, ["--metric-regex", "nothing ([0-9])"], 1, "matches no number in the output"),
        (SCRIPT, ["--metric-regex", "(loss)"], 1, "matches no number in the output"),
        (SCRIPT, ["--launcher", ""], 2, "--launcher': it is empty"),
        (SCRIPT, ["--launcher", "'"], 2, "--launcher': No closing quotation"),
        (SCRIPT, ["--time-limit", "0"], 2, "'0' is no time above 0"),
        (SCRIPT, ["--study", "/nowhere/study.log"], 2, "there is no directory /nowhere"),
        (SCRIPT, ["--metric-regex", "loss"], 2, "has no group"),
        (SCRIPT, ["--metric-regex", "("], 2, "is no regular expression"),
        (SCRIPT, ["--launcher", "no-such-program"], 1, "no-such-program was not found"),
        (SCRIPT.replace('"compression": spec', '"compression": "onebit"'), [], 1, "sets compression to onebit itself"),
        (SCRIPT.replace('"bucket_bytes": size', '"bucket_bytes": 7'), [], 1, "sets bucket_bytes to 7 itself"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(tune, script, options, status, message):
    result = tune("--trials", "2", *options, script=script)
    assert result.exit_code == status
    assert message in result.output


def test_what_failed_as_a_whole_does_not_count(tune):
    assert tune("--trials", "2", script="raise SystemExit(1)").exit_code == 1
    found = json.loads(tune("--trials", "2", "--json").stdout)
    assert [row["compression"] for row in found["trials"]] == ["none", "int8"]


def test_a_setting_of_the_opening_that_was_interrupted_is_tried_again(tune):
    broken = SCRIPT.replace('"bucket_bytes": size', '"bucket_bytes": 7 if name == "hybrid" else size')
    assert tune("--trials", "3", script=broken).exit_code == 1
    found = json.loads(tune("--trials", "4", "--json").stdout)
    assert tune.runs() == ["none", "int8", *["hybrid:ratio=0.01,bits=4"] * 2, "int4"]
    assert [row["compression"] for row in found["trials"]] == [
        "none", "int8", "hybrid:ratio=0.01,bits=4", "int4",
    ]  # fmt: skip


def test_a_study_belongs_to_its_runs(tune):
    assert tune("--trials", "2").exit_code == 0
    other = tune("--trials", "2", "--metric", "loss")
    assert other.exit_code == 2 and "it is of another metric, None: name another file" in other.output
    other = tune("--trials", "2", "-c", "onebit")
    assert other.exit_code == 2 and "it is of another choice of compressors" in other.output
    (tune.path / "text").write_text("no study\n")
    broken = tune(study="text")
    assert broken.exit_code == 2 and "is no study of `hvd-compress tune`" in broken.output


def test_what_a_run_says():
    found, pattern = Run(), re.compile("loss=([0-9.]+)")
    for line in [
        "[0]<stdout>:1/10 loss=0.5\n", f"[0]<stdout>:{MARK}" + '{"steps": [1, 2]}\n', f"x {MARK}" + '{"steps": [3]}\n',
        f"{MARK}broken\n", f"{MARK}" + '{"compression": "int8", "bucket_bytes": 5}\n',
        f"{MARK}" + '{"compression": "int4", "bucket_bytes": 6}\n', "loss=0.25\n", "\n",
    ]:  # fmt: skip
        found.read(line, pattern)
    assert found.steps == [1, 2, 3] and found.printed == 0.25
    assert (found.compression, found.bucket_bytes) == ("int8", 5)  # the first optimizer's
    assert found.last_lines == ["1/10 loss=0.5"] and found.launcher_lines == ["loss=0.25"]
    assert Run(steps=list(range(100))).usual_steps() == list(range(10, 100))
    assert Run(steps=list(range(8))).usual_steps() == list(range(2, 8))


def test_a_run_that_is_ended_leaves_nothing(tmp_path):
    import psutil

    child = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
    inner = f"[sys.executable, '-c', {child!r}, sys.argv[1]]"
    code = f"import subprocess, sys; subprocess.run({inner}, start_new_session=True)"
    pid = tmp_path / "pid"
    found = run(
        [sys.executable, "-c", code, str(pid)],
        {},
        limit=100.0,
        pattern=None,
        watch=lambda _: "stopped" if pid.exists() and pid.read_text() else None,
    )
    assert found.status == "stopped"
    number = int(pid.read_text())
    # Where nobody collects orphans a zombie remains.
    assert not psutil.pid_exists(number) or psutil.Process(number).status() == psutil.STATUS_ZOMBIE


def test_settings_are_known_specs():
    class Trial:
        """Takes the last of all choices."""

        def __init__(self, kind):
            self.kind = kind

        def suggest_categorical(self, name, choices):
            return self.kind if name == "compressor" else choices[-1]

        def suggest_float(self, name, low, high, log):
            return 0.0345678

    for kind in search.KINDS:
        setting = search.suggest(Trial(kind), search.KINDS, ["each step", "delay=1"])
        assert formats.parse(setting.compression).name == kind
        delay = "" if kind == "powersgd" else ", delay=1"  # its second exchange depends on its first
        assert setting.line().endswith(f'"{setting.compression}", bucket_bytes=52428800{delay})')
    assert search.is_maximized("val_accuracy") and not search.is_maximized("val_loss")


def outcome(spec, numbers, step, worse, runs=1):
    setting = search.Setting(spec, search.BASELINE.bucket_bytes)
    parameters = {**numbers, "bucket_bytes": setting.bucket_bytes, "exchange": setting.exchange}
    return search.Outcome(setting, parameters, "done", step, 1.0, worse, 0.1, runs)


def quantized(bits, step, worse):
    return outcome(f"quantize:bits={bits}", {"compressor": "quantize", "bits": bits}, step, worse)


def hybrid(ratio, step, worse):
    return outcome(f"hybrid:ratio={ratio},bits=4", {"compressor": "hybrid", "ratio": ratio, "bits": 4}, step, worse)


@pytest.mark.parametrize(
    ("tried", "number"),
    [
        ([quantized(8, 0.4, 0.0), quantized(2, 0.1, 0.5)], ("bits", 5)),  # between bad and good
        ([quantized(8, 0.4, 0.0), quantized(3, 0.2, 0.0), quantized(2, 0.1, 0.5)], None),
        ([quantized(8, 0.4, 0.0)], ("bits", 2)),  # the fastest so far: is there a faster one?
        ([quantized(8, 0.4, 0.5)], None),  # the mildest there is
        ([hybrid(0.01, 0.1, 0.5)], ("ratio", 0.3)),
        ([hybrid(0.01, 0.1, 0.5), hybrid(0.04, 0.2, 0.0)], ("ratio", 0.021)),
        ([hybrid(0.01, 0.1, 0.5), hybrid(0.04, 2.0, None)], ("ratio", 0.021)),  # too slow: it ended early
        ([hybrid(0.01, 0.1, 0.5), hybrid(0.011, 0.2, 0.0)], ("ratio", 0.3)),  # a milder one makes more progress
        # The next one of the first family failed.
        ([hybrid(0.01, 0.1, 0.5), hybrid(0.3, np.inf, None), quantized(8, 0.4, 0.0)], ("bits", 2)),
        # What loses too much at 0.02 does so at 0.01; and nothing above 0.02 is faster than 0.2.
        ([hybrid(0.01, 0.1, 0.5), hybrid(0.02, 0.3, 0.5), quantized(2, 0.2, 0.0)], None),
        # Of two gaps the one with more to gain.
        ([hybrid(0.01, 0.2, 0.5), quantized(8, 0.4, 0.0), quantized(2, 0.1, 0.5)], ("bits", 5)),
        ([hybrid(0.01, 0.1, 0.5), quantized(8, 0.4, 0.0), quantized(2, 0.2, 0.5)], ("ratio", 0.3)),
    ],
)  # fmt: skip
def test_the_gap_of_a_family_is_halved(tried, number):
    baseline = outcome("none", {"compressor": "none"}, 1.0, 0.0)
    tried = sorted([baseline, *tried], key=lambda outcome: outcome.cost)
    found = search.halve_gap(tried, search.KINDS)
    assert (found and {key: found[key] for key in ("bits", "ratio") if key in found}) == (
        number and {**({"bits": 4} if number[0] == "ratio" else {}), number[0]: number[1]}
    )


def test_the_best_and_its_rival_are_run_again():
    a, b, far = quantized(2, 0.1, 0.0), quantized(3, 0.105, 0.0), quantized(8, 0.2, 0.0)
    assert search.uncertain([a, b, far]) == a.parameters
    again = outcome("quantize:bits=2", a.parameters, 0.1, 0.0, runs=2)
    assert search.uncertain([again, b, far]) == b.parameters
    assert search.uncertain([again, far]) is None
    bad = quantized(3, 0.05, 0.5)
    assert search.uncertain([bad, again, b]) == b.parameters


# At 100 Mbit/s, 5 MB of gradient: what is lost grows as less is sent.
LOST = {"none": 0.0, "fp16": 0.0, "bf16": 0.001, "onebit": 0.3, "int2": 0.06, "hadamard": 0.05}


def lost(spec):
    chosen = formats.parse(spec)
    if chosen.name in LOST:
        return LOST[chosen.name]
    if hasattr(chosen, "ratio"):
        return 0.02 / chosen.ratio**0.5
    return 0.4 / chosen.rank if hasattr(chosen, "rank") else 0.15 / 4.0 ** (chosen.bits - 2)


@pytest.mark.parametrize("allowed", [0.01, 0.06, 0.09, 0.2])
def test_the_default_number_of_runs_finds_one_of_the_fastest(tune, monkeypatch, allowed):
    model, random = CostModel(Link.of_rate(1e8, 3e-4), 2), np.random.default_rng(0)

    def step(spec):
        return 0.024 + model.predict(spec, 5e6).total

    def cost(spec):
        return step(spec) / prediction.expected_progress(formats.parse(spec))

    def instead(command, environment, limit, pattern, watch):
        spec = environment["HVD_COMPRESS"]
        noise = 1.0 + 0.03 * random.standard_normal(60)
        found = Run("done", 10.0, list(step(spec) * noise), {"loss": 1.0 + lost(spec)})
        found.compression, found.bucket_bytes = spec, int(environment["HVD_COMPRESS_BUCKET_BYTES"])
        found.status = watch(found) or "done"
        return found

    monkeypatch.setattr(trial, "run", instead)
    result = tune("--json", "--max-loss-increase", str(allowed))
    assert result.exit_code == 0, result.output
    best = json.loads(result.stdout)["best"]["compression"]
    ratios = np.geomspace(0.001, 0.3, 60)
    every = ["none", "fp16", "bf16", "onebit", "int2", "hadamard"]
    every += [f"quantize:bits={bits}" for bits in search.VALUES["bits"]] + [
        f"powersgd:rank={n}" for n in search.VALUES["rank"]
    ]
    every += [f"{kind}:ratio={r:.3g}" for kind in ("topk", "block_topk", "randomk") for r in ratios]
    every += [f"hybrid:ratio={r:.3g},bits=4" for r in ratios]
    assert lost(best) <= allowed
    assert cost(best) <= 1.1 * min(cost(spec) for spec in every if lost(spec) <= allowed)
