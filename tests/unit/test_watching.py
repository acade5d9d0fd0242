"""`HVD_COMPRESS_MONITOR`: which plan is watched, and that an error of the watch does not end the training."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import tensorflow as tf

from hvd_compress.monitor import end_summary, environment, files, session


class CountingRecorder:
    """Has the numbers of steps that a test gives it."""

    def __init__(self, steps, nbytes):
        self.steps, self.buckets, self.ranks, self.is_first = steps, [SimpleNamespace(nbytes=nbytes)], 2, True

    def pending(self, reader):
        return self.steps

    def skip(self, reader):
        pass


def test_the_largest_plan_is_watched_although_a_smaller_one_steps_first(monkeypatch):
    monkeypatch.setattr(session.hvd, "rank", lambda: 0)
    monkeypatch.setattr(session, "recorder_of", lambda plan: plan.recorder)
    monkeypatch.setattr(session, "Reader", lambda *_: None)
    small, large = (SimpleNamespace(recorder=CountingRecorder(0, nbytes), auto=None) for nbytes in (10, 1000))
    reducers = [SimpleNamespace(plans={0: plan}, round_log=None) for plan in (small, large)]
    watch = session.Session(lambda: reducers, None, "test")
    small.recorder.steps = 1  # in the middle of the first step
    assert watch.read(least=2) is None and not watch.has_steps
    large.recorder.steps = 1
    assert watch.read(least=2) is None and not watch.has_steps
    small.recorder.steps = 2
    assert watch._start(2) and watch.buckets[0].nbytes == 1000


@pytest.mark.parametrize("error", [tf.errors.ResourceExhaustedError(None, None, "disk full"), KeyError("step")])
def test_an_error_ends_the_watch_and_not_the_training(monkeypatch, capfd, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(environment, "_LOOK_EVERY", 0.01)
    watch = environment._Watch("runs/1")
    watch._session, watch._exports = SimpleNamespace(stepped=fail, new_epoch=fail, read=fail), SimpleNamespace()
    watch._thread.start()
    watch._thread.join(60)
    watch.new_epoch(1)
    watch.finish()
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("hvd_compress: HVD_COMPRESS_MONITOR: nothing more is recorded (")
    assert line.endswith("; training goes on")


def test_an_error_at_the_end_is_one_line(monkeypatch, capfd):
    def fail():
        raise ValueError("Horovod has not been initialized")

    monkeypatch.setattr(end_summary, "before", [fail, lambda: print("written")])
    monkeypatch.setattr(end_summary, "shows", lambda level: False)
    end_summary._at_exit()
    out, err = capfd.readouterr()
    assert out == "written\n" and "Horovod has not been initialized" in err and len(err.splitlines()) == 1


def test_a_rank_number_of_which_another_process_writes(tmp_path):
    """As after an elastic reset: a worker that joins has the number that another one had before."""
    directory, code = str(tmp_path), "import sys; from hvd_compress.monitor.files import RunFiles"
    own = files.RunFiles(directory, 1)
    again = files.RunFiles(directory, 1)  # of the same process
    other = [sys.executable, "-c", f"{code}; print(RunFiles({directory!r}, 1)._is_closed)"]
    joined = subprocess.run(other, capture_output=True, text=True, timeout=120)
    assert joined.stdout == "True\n" and "another process writes" in joined.stderr, joined.stderr
    again.close()
    own.close()
    joined = subprocess.run(other, capture_output=True, text=True, timeout=120)
    assert joined.stdout == "False\n", joined.stderr
