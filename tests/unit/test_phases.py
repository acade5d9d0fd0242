"""What is said of phases that take long, and what `set_verbosity` leaves out."""

import logging
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import tensorflow as tf

import hvd_compress as hvdc
from hvd_compress.common import phases, verbosity
from hvd_compress.common.phases import Phase
from hvd_compress.kernels import compile


@pytest.fixture(autouse=True)
def same_level_afterwards():
    before = verbosity._level
    yield
    verbosity._level = before


def test_a_short_phase_says_nothing(capfd):
    with Phase("calibrating", "usually less than a second"):
        time.sleep(0.05)
    assert capfd.readouterr().err == ""


def test_a_long_phase_says_what_it_does_until_it_ends(capfd, monkeypatch):
    monkeypatch.setattr(phases, "EVERY", 0.1)
    monkeypatch.setattr(phases, "time", SimpleNamespace(monotonic=lambda: 0.0))
    now = ["allreduce"]
    with Phase(lambda: f"calibrating {now[0]}", "usually a second"), Phase("hidden", show=False):
        deadline, err = time.monotonic() + 30, ""
        while "int8: " not in err and time.monotonic() < deadline:
            time.sleep(0.05)
            err += capfd.readouterr().err
            if "allreduce" in err:
                now[0] = "int8"
    time.sleep(0.3)
    err += capfd.readouterr().err
    time.sleep(0.3)
    assert capfd.readouterr().err == ""
    assert err.startswith("hvd_compress: calibrating allreduce: 0 s so far, usually a second\n")
    assert "hvd_compress: calibrating int8: done after 0.0 s\n" in err and "hidden" not in err


def test_a_phase_ends_when_something_else_says_so(capfd, monkeypatch):
    monkeypatch.setattr(phases, "EVERY", 0.05)
    monkeypatch.setattr(phases, "time", SimpleNamespace(monotonic=lambda: 0.0))
    asked = []
    Phase("tracing", is_over=lambda: asked.append(1) or len(asked) == 3).begin()
    deadline = time.monotonic() + 30
    while len(asked) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.2)
    assert len(asked) == 3
    assert capfd.readouterr().err.count("tracing: 0 s so far") == 2


@pytest.mark.parametrize(
    "level, shown",
    [("debug", "debug info warning error"), ("info", "info warning error"), (logging.WARNING, "warning error"),
     ("ERROR", "error")],
)  # fmt: skip
def test_the_level_says_which_lines_are_printed(level, shown, capfd):
    hvdc.set_verbosity(level)
    for name in verbosity.LEVELS:
        verbosity.say(name, name)
    assert capfd.readouterr().err == "".join(f"hvd_compress: {name}\n" for name in shown.split())


def test_kernels_of_many_sizes_cause_no_warnings(caplog):
    @compile.compiled
    def doubled(x):
        return 2.0 * x

    for size in range(1, 9):  # TensorFlow warns from the fifth on
        assert float(tf.reduce_sum(doubled(tf.ones([size])))) == 2.0 * size
    assert not [record for record in caplog.records if "retracing" in record.getMessage()]


@pytest.mark.parametrize("level", ["loud", 15, None, True, 2.5])
def test_an_unknown_level_is_an_error(level):
    with pytest.raises(ValueError, match="level must be one of debug, info, warning, error, got"):
        hvdc.set_verbosity(level)


def test_the_environment_sets_the_level():
    code = "from hvd_compress.common.verbosity import say; say('a'); say('b', 'warning'); say('c', 'debug')"

    def run(value, rank="0"):
        environment = {**os.environ, verbosity.VARIABLE: value, "HOROVOD_RANK": rank}
        return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)

    assert run("warning").stderr == "hvd_compress: b\n"
    warning, *rest = run("silent").stderr.splitlines()
    assert warning == (
        "hvd_compress: environment variable HVD_COMPRESS_VERBOSITY must be one of debug, info, warning, error, got "
        "'silent'; the level is info"
    )
    assert rest == run("silent", rank="1").stderr.splitlines() == ["hvd_compress: a", "hvd_compress: b"]
