"""A training is watched from outside, by environment variables, and rank 0 says at the end what it sent."""

import csv
import json
import re

import pytest

pytestmark = pytest.mark.timeout(400)

SCRIPT = """
import sys
import horovod.tensorflow.keras as hvd
import keras
import numpy as np
import hvd_compress as hvdc

def main():
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input([64]), keras.layers.Dense(200), keras.layers.Dense(64)])
    optimizer = hvdc.DistributedOptimizer(keras.optimizers.SGD(0.01), compression="int8")
    model.compile(optimizer, "mse", jit_compile=False)
    x = np.random.default_rng(hvd.rank()).normal(size=[160, 64]).astype("float32")
    callbacks = [hvdc.callbacks.BroadcastGlobalVariablesCallback(0)]
    history = model.fit(x, x, epochs=2, batch_size=16, callbacks=callbacks, verbose=0)
    print("losses", *history.history["loss"], "bytes", *model.optimizer.bytes_sent(), flush=True)

hvd.init()
main()  # the optimizer is deleted before the process ends
"""


def test_a_script_that_knows_nothing_of_it_is_watched(horovodrun, tmp_path):
    directory = tmp_path / "runs" / "1"
    result = horovodrun(2, ["-c", SCRIPT], timeout=180, env={"HVD_COMPRESS_MONITOR": str(directory)})
    assert result.returncode == 0, result.stderr[-3000:]
    sent, stock = map(int, re.search(r"\[0\]<stdout>:losses .* bytes (\d+) (\d+)", result.stdout).groups())
    for rank in range(2):
        (told,) = re.findall(rf"\[{rank}\]<stdout>:losses (\S+) (\S+)", result.stdout)
        with open(directory / f"rank-{rank}.csv") as file:
            rows = list(csv.DictReader(file))
        assert [int(row["step"]) for row in rows] == list(range(1, 21))
        assert [int(row["epoch"]) for row in rows] == [0] * 10 + [1] * 10
        for epoch in range(2):
            losses = [float(row["loss"]) for row in rows if int(row["epoch"]) == epoch]
            assert sum(losses) / 10 == pytest.approx(float(told[epoch]), rel=1e-4)
        assert {float(row["bytes"]) for row in rows} == {sent}
    run = json.loads((directory / "run.json").read_text())
    assert run["what"] == "HVD_COMPRESS_MONITOR" and run["finished"] and run["first_step_seconds"] > 0
    assert list((directory / "tensorboard").iterdir())

    first, measured = (line for line in result.stderr.splitlines() if "hvd_compress: 20 steps" in line)
    ours = f"sent per step: {sent:,} bytes by each worker; stock Horovod: {stock:,} bytes; ratio: {stock / sent:.1f}"
    assert first == f"[0]<stderr>:hvd_compress: 20 steps with int8; {ours}"
    with open(directory / "rank-0.csv") as file:
        rows = list(csv.DictReader(file))
    timed = [row for row in rows if row["step_ms"]]
    share = sum(float(row["exposed_ms"]) for row in timed) / sum(float(row["step_ms"]) for row in timed)
    assert f"this rank sent {20 * sent / 1e3:.3g} kB in place of {20 * stock / 1e6:.3g} MB" in measured
    assert measured.endswith(f" for exchanges, {share:.0%} of the time")


@pytest.mark.slow
def test_a_directory_that_cannot_be_written_does_not_stop_training(horovodrun, tmp_path):
    (tmp_path / "file").write_text("")
    environment = {"HVD_COMPRESS_MONITOR": str(tmp_path / "file" / "run"), "HVD_COMPRESS_VERBOSITY": "warning"}
    result = horovodrun(2, ["-c", SCRIPT], timeout=180, env=environment)
    assert result.returncode == 0, result.stderr[-3000:]
    lines = [line for line in result.stderr.splitlines() if "hvd_compress:" in line]
    (line,) = lines  # of one rank on each host
    assert line.startswith("[0]") and "cannot be written to (Not a directory); training goes on" in line


@pytest.mark.slow
def test_the_script_has_a_monitor_of_its_own_and_shuts_horovod_down(horovodrun, tmp_path):
    own, watched = tmp_path / "own", tmp_path / "watched"
    monitor = f", hvdc.callbacks.CompressionMonitor({str(own)!r})]"
    script = SCRIPT.replace("BroadcastGlobalVariablesCallback(0)]", f"BroadcastGlobalVariablesCallback(0){monitor}")
    assert monitor in script
    environment = {"HVD_COMPRESS_MONITOR": str(watched)}
    result = horovodrun(2, ["-c", script + "hvd.shutdown()\n"], timeout=180, env=environment)
    assert result.returncode == 0 and "Traceback" not in result.stderr, result.stderr[-3000:]
    for rank in range(2):
        rows = []
        for directory in (own, watched):
            with open(directory / f"rank-{rank}.csv") as file:
                rows.append([(row["step"], row["epoch"], row["loss"], row["time"]) for row in csv.DictReader(file)])
        assert len(rows[0]) == 20 and rows[0] == rows[1]
    run = json.loads((watched / "run.json").read_text())
    assert run["what"] == "HVD_COMPRESS_MONITOR" and run["finished"] and run["ranks"] == 2


DETERMINISTIC = """
main()
SPEC = "auto"
try:
    main()
except ValueError as error:
    print("error:", error, flush=True)
"""


def test_with_deterministic_operations(horovodrun, tmp_path):
    script = SCRIPT.replace('"int8"', "SPEC").replace("def main", 'SPEC = "int8"\n\ndef main')
    enable = "import tensorflow as tf\ntf.config.experimental.enable_op_determinism()\n"
    script = script.replace("hvd.init()\n", f"{enable}hvd.init()\n") + DETERMINISTIC
    result = horovodrun(2, ["-c", script], timeout=180, env={"HVD_COMPRESS_MONITOR": str(tmp_path)})
    assert result.returncode == 0, result.stderr[-3000:]
    for rank in range(2):
        first, second = re.findall(rf"\[{rank}\]<stdout>:losses (.*)", result.stdout)
        assert first == second
        assert f"[{rank}]<stdout>:error: auto: after tf.config.experimental.enable_op_determinism()" in result.stdout
        with open(tmp_path / f"rank-{rank}.csv") as file:
            timed = [float(row["step_ms"]) for row in csv.DictReader(file) if row["step_ms"]]
        assert len(timed) > 10 and min(timed) > 0.0
