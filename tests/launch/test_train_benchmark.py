"""benchmarks/train.py: a training of the table, its file, and what it does not repeat."""

import json
import subprocess
import sys

import pytest
from conftest import ROOT
from test_netlab import needs_root


def train(path, *more):
    command = [sys.executable, str(ROOT / "benchmarks" / "train.py"), "--task", "digits", "--rate", "1gbit"]
    command += ["--seeds", "0", "--steps", "22", "--json", str(path), *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=180, cwd=ROOT)


@needs_root
@pytest.mark.timeout(400)
def test_a_training_is_measured_once(tmp_path):
    path = tmp_path / "digits.json"
    result = train(path, "--target", "30", "--methods", "int4")
    assert result.returncode == 0, result.stderr[-3000:]
    found = json.loads(path.read_text())
    (run,) = found["runs"]
    assert (run["method"], run["seed"], run["metric_name"]) == ("int4", 0, "test accuracy, %")
    steps, seconds, sent, metric = zip(*run["curve"])
    assert steps == (0, 22)  # the accuracy is about 90% then
    assert seconds[0] == sent[0] == 0 and list(seconds) == sorted(seconds)
    assert 0 < run["first_step"] < seconds[1]
    assert metric[1] >= 30 and (run["steps"], run["seconds"], run["bytes"]) == (22, seconds[1], sent[1])
    assert run["step_ms"] == pytest.approx((seconds[1] - run["first_step"]) / 21 * 1e3, abs=0.1)
    parameters = 1_199_882
    assert 1.0 < sent[1] / (22 * parameters / 2) < 1.1  # half a byte for each, scales and biases aside

    before = path.read_bytes()
    again = train(path, "--target", "30", "--methods", "int4")
    assert again.returncode == 0 and path.read_bytes() == before
    assert "int4" in again.stdout
    refused = train(path, "--target", "40", "--methods", "int4")
    assert refused.returncode == 2 and "was made with other settings: name another file" in refused.stderr
    assert path.read_bytes() == before

    page = tmp_path / "results.md"
    page.write_text("Before\n<!-- table: digits 1gbit -->\n<!-- end of table -->\nafter\n")
    command = [sys.executable, str(ROOT / "benchmarks" / "train_results.py"), str(path), "--out", str(tmp_path)]
    subprocess.run([*command, "--page", str(page)], check=True, capture_output=True, timeout=180, cwd=ROOT)
    rows = [line.split(" | ") for line in page.read_text().splitlines() if line.startswith("| int4")]
    assert [row[2] for row in rows] == [str(run["steps"])]
    assert rows[0][1] == f"{run['seconds']:.1f}" and rows[0][5] == f"{run['first_step']:.1f}"
    assert (tmp_path / "train_digits_1gbit.png").stat().st_size > 10_000
