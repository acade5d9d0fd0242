"""The tools as a user runs them: calibrate and bench under horovodrun, tune around it."""

import json
import re
import sys
from pathlib import Path

import pytest

from hvd_compress.cost import Calibration

pytestmark = pytest.mark.timeout(620)  # the runs have time-outs of their own

SPECS = ["-c", "int8", "-c", "randomk:ratio=0.01"]
SCRIPT = """
import keras
import numpy as np
import horovod.tensorflow.keras as hvd
import hvd_compress as hvdc

hvd.init()
keras.utils.set_random_seed(hvd.rank())
x = np.random.default_rng(hvd.rank()).standard_normal((256, 32)).astype("float32")
y = x @ np.random.default_rng(9).standard_normal((32, 8)).astype("float32")
model = keras.Sequential([keras.layers.Input((32,)), keras.layers.Dense(64), keras.layers.Dense(8)])
model.compile(optimizer=hvdc.DistributedOptimizer(keras.optimizers.SGD(1e-2)), loss="mse", jit_compile=False)
callbacks = [hvdc.callbacks.BroadcastGlobalVariablesCallback(0), hvdc.callbacks.MetricAverageCallback()]
model.fit(x, y, batch_size=16, epochs=2, verbose=0, callbacks=callbacks)
"""


def only_rank_0(result):
    """What rank 0 printed; the others print nothing."""
    lines = result.stdout.splitlines()
    assert not [line for line in lines if line.startswith("[1]<stdout>:")]
    return "\n".join(line[len("[0]<stdout>:") :] for line in lines if line.startswith("[0]<stdout>:"))


def test_calibrate(horovodrun, tmp_path):
    path = tmp_path / "link.json"
    command = [
        "-m",
        "hvd_compress.tools.cli",
        "calibrate",
        "-o",
        str(path),
        "--rate",
        "1gbit",
        "--elements",
        "16384",
    ]
    result = horovodrun(2, [*command, *SPECS, "--json"], timeout=200)
    assert result.returncode == 0
    found, kept = json.loads(only_rank_0(result)), Calibration.load(path)
    assert kept.ranks == found["ranks"] == 2
    assert set(kept.kernels) == {"int8", "randomk:ratio=0.01"}
    for name, link in kept.links.items():
        error_text = found["links"][name]
        assert (error_text["alpha"], error_text["beta"]) == (link.alpha, link.beta)
        assert error_text["residual"] == kept.residuals[name] >= 0.0
        if link.beta:
            assert (
                error_text["efficiency"] * 1e9 * link.beta / 8 == 1.0
                or abs(error_text["rate"] * link.beta / 8 - 1) < 1e-9
            )


def test_bench(python, tmp_path):
    """It starts its workers itself, and shows what rank 0 prints as if there were no horovodrun."""
    plot, output = tmp_path / "bench.png", tmp_path / "bench.json"
    command = [
        "-m",
        "hvd_compress.tools.cli",
        "bench",
        "-np",
        "2",
        "--launcher",
        f"{Path(sys.executable).parent / 'horovodrun'} --gloo",
        "--params",
        "200k",
        "--rounds",
        "3",
        "--plot",
        str(plot),
        "-o",
        str(output),
    ]
    result = python([*command, *SPECS, "--json"], timeout=600)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert not [line for line in result.stderr.splitlines() if line.startswith("[0]")]
    assert json.loads(output.read_text()) == found
    rows = {row["compressor"]: row for row in found["compressors"]}
    assert list(rows) == ["none", "int8", "randomk:ratio=0.01"] and found["ranks"] == 2
    assert rows["none"]["error"] == 0.0 and 0.0 < rows["int8"]["error"] < 0.1
    assert 0.9 < rows["randomk:ratio=0.01"]["error"] < 1.1  # all but 1% is left for later
    assert rows["none"]["ratio"] == 1.0 and 3.5 < rows["int8"]["ratio"] < 4.0
    assert rows["int8"]["encode"] > 0.0 and rows["none"]["encode"] == rows["none"]["decode"] == 0.0
    for row in rows.values():
        total = row["total"]
        assert 0.0 < total["low"] <= total["median"] <= total["high"] and row["predicted"] > 0.0
        assert row["speedup"] == rows["none"]["total"]["median"] / total["median"]
    # Without --backward and --forward, a step is its exchange.
    assert rows["int8"]["step"] == pytest.approx(rows["int8"]["total"]["median"])
    assert rows["int8"]["per_progress"] == pytest.approx(rows["int8"]["step"] / rows["int8"]["progress"], rel=1e-4)
    assert rows["none"]["training"] == 1.0 and isinstance(found["auto"], list)
    assert plot.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_tune(python, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    run = Path(sys.executable).parent / "horovodrun"
    options = [
        "--trials",
        "3",
        "--max-loss-increase",
        "1000",
        "--time-limit",
        "200s",
        "-c",
        "quantize",
        "-c",
        "onebit",
    ]
    result = python(
        ["-m", "hvd_compress.tools.cli", "tune", "-np", "2", "--launcher", f"{run} --gloo", *options,
         "--study", str(tmp_path / "study.log"), "--json", str(script)],
        timeout=600,
    )  # fmt: skip
    assert result.returncode == 0
    found = json.loads(result.stdout)
    # Without a network a compressor may well be too slow.
    statuses = [row["status"] for row in found["trials"]]
    assert len(statuses) == 3 and statuses[0] == "done" and set(statuses) <= {"done", "too slow"}
    assert found["trials"][0]["compression"] == "none" and found["trials"][1]["compression"] == "int8"
    done = [row for row in found["trials"] if row["status"] == "done"]
    assert all(0.0 < row["step"] < 10.0 and row["metric"] > 0.0 for row in done)
    assert re.fullmatch(r'hvdc\.DistributedOptimizer\(optimizer, compression=".+\)', found["line"])
