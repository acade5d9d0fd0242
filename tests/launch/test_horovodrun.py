"""The fixtures of this folder, on which the other tests rely."""

import sys
import uuid

import psutil
import pytest


def test_output_and_status_of_all_ranks(horovodrun):
    result = horovodrun(2, ["-c", "import os; print('rank', os.environ['HOROVOD_RANK'])"], timeout=120)
    assert result.returncode == 0
    assert sorted(result.stdout.split("\n")[:2]) == ["[0]<stdout>:rank 0", "[1]<stdout>:rank 1"]


def test_a_failing_rank_fails_the_run(horovodrun):
    script = "import os, sys; sys.exit('rank one says why') if os.environ['HOROVOD_RANK'] == '1' else None"
    result = horovodrun(2, ["-c", script], timeout=120)
    assert result.returncode != 0
    assert "rank one says why" in result.stderr


def test_a_hang_is_a_failure_and_leaves_nothing_behind(horovodrun, tmp_path):
    mark = uuid.uuid4().hex
    for timeout in (5, 30, 200):  # a busy machine is slow to start
        folder = tmp_path / str(timeout)
        folder.mkdir()
        script = f"import os, time; open(r'{folder}/' + str(os.getpid()), 'w'); time.sleep(1000)  # {mark}"
        with pytest.raises(pytest.fail.Exception, match=f"still running after {timeout} s"):
            horovodrun(2, ["-c", script], timeout=timeout)
        started = [int(path.name) for path in folder.iterdir()]
        if len(started) == 2:
            break
    assert not [p.pid for p in psutil.process_iter(["cmdline"]) if mark in " ".join(p.info["cmdline"] or [])]
    assert len(started) == 2
    assert not [pid for pid in started if psutil.pid_exists(pid)]


def test_python_is_this_one(python):
    result = python(["-c", "import sys; print(sys.prefix)"], timeout=120)
    assert result.stdout.strip() == sys.prefix
