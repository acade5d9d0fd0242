"""What `compression_report()` says about steps of `auto`, against sums by hand."""

import numpy as np
import pytest
import reference
import tensorflow as tf

import hvd_compress as hvdc
from hvd_compress.auto import policy, report
from hvd_compress.engine.compression_report import AutoReport, BucketReport, CompressionReport, StepForecast

AUTO = hvdc.Compression.auto(candidates=["none", "int8", "hybrid:ratio=0.05,bits=4"])
NBYTES = [3_000_000, 1_000_000]
SECONDS = np.array([[0.3, 0.1, 0.02], [0.1, 0.05, 0.01]], np.float32)
HALF = np.array([[0.15], [0.05]], np.float32)
WAITS, REST = np.array([0.01, 0.03], np.float32), 0.2
PROGRESS, LOST = np.array([1.0, 0.9, 0.5], np.float32), np.array([0.0, 0.1, 0.7], np.float32)


def costs(seconds):
    return policy.Costs(tf.zeros_like(seconds), tf.zeros_like(seconds), tf.constant(seconds), tf.zeros_like(seconds))


def auto_report():
    state = policy.initial(tf.constant([1, 2]), 3)._replace(
        waits=tf.constant(WAITS), rest=tf.constant(REST), bias=tf.constant([1.0, 2.0, 1.0]),
        age=tf.constant([200.0, 0.0, 17.0]),
    )  # fmt: skip
    value = policy.Value(PROGRESS, LOST)
    return report.of_steps(report.Known(AUTO, NBYTES, costs(SECONDS), {"fp16": costs(HALF)}, value, state), 50)


def test_steps_of_auto_by_hand():
    found = auto_report()
    ready = np.cumsum(WAITS)
    # Half of the error of the choice, whose three quarters are int8, is taken to be common to all.
    seconds = np.concatenate([SECONDS * [1.0, 2.0, 1.0], HALF * 2.0 ** (0.75 / 2)], 1)
    assert [each.compressor for each in found.fixed] == ["none", "int8", "hybrid:ratio=0.05,bits=4", "fp16"]
    for c, each in enumerate(found.fixed):
        step, progress = REST + reference.queue(ready, seconds[:, c]), [*PROGRESS, 1.0][c]
        assert each.step == pytest.approx(step, rel=1e-5) and each.progress == pytest.approx(progress)
        assert each.per_progress == pytest.approx(step / progress * (1 + 0.02 * [*LOST, 0.0][c]), rel=1e-5)
    # int8 for the first bucket, which holds three quarters of the bytes.
    step = REST + reference.queue(ready, [seconds[0, 1], seconds[1, 2]])
    assert found.choice.step == pytest.approx(step, rel=1e-5)
    assert found.choice.progress == pytest.approx(0.75 * 0.9 + 0.25 * 0.5)
    assert [each.tried for each in found.fixed] == [None, 0, 17, None]


def test_what_auto_has_gained():
    choice = StepForecast("auto", 0.1, 0.8, 0.125)
    fixed = (StepForecast("none", 0.5, 1.0, 0.5), StepForecast("int8", 0.2, 1.0, 0.2))
    found = AutoReport(100, choice, fixed)
    # The progress of 80 uncompressed steps: 40 and 16 s, in place of 10.
    assert found.gained(fixed[0]) == pytest.approx(30.0) and found.gained(fixed[1]) == pytest.approx(6.0)
    assert found.best_fixed is fixed[1]
    lines = str(found).splitlines()
    assert lines[0].startswith("auto after 100 steps") and "no switches" in lines[0]
    assert lines[2].split() == ["auto", "100", "80%", "125"]
    assert lines[3].split() == ["none", "500", "100%", "500", "+30", "s"]
    assert str(CompressionReport((BucketReport(8, "int8", auto=found),))).startswith(str(found))
    assert CompressionReport((BucketReport(8, "int8"),)).auto is None
