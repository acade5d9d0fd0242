"""scripts/run_tests.py on suites of a few tests."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "run_tests.py"
PASSES = "def test_{}(): pass\n"
FAILS = "def test_{}(): assert False\n"
# The command `timeout`, this process's parent, ends it as soon as it gets this signal: nobody waits for the limit.
REACHES_THE_LIMIT = """
import os, signal, time
def test_{}():
    os.kill(os.getppid(), signal.SIGALRM)
    time.sleep(600)
"""
SLOW = "import pytest\n@pytest.mark.slow\ndef test_{}(): pass\n"
DIES = "import os\ndef test_{}(): os._exit(3)\n"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("run_tests", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(script, tmp_path, capfd):
    """Runs a part of these tests; returns how many passed and failed, and the lines that it has printed."""

    def run(*tests, slow=False):
        names = "abcdefghijklmnopqrstuvwxyz"
        (tmp_path / "test_some.py").write_text("".join(map(str.format, tests, names)))
        counts = script.run_part("some", script.Part(str(tmp_path), 0, "", 600), [], slow)
        return counts, capfd.readouterr().out.splitlines()

    return run


def names(lines, what):
    return [line.rpartition("_")[2] for line in lines if line.startswith(f"{what} ")]


def test_all_pass(run):
    counts, lines = run(PASSES, PASSES)
    assert counts == (2, 0)
    assert not names(lines, "FAILED") and not names(lines, "NOT RUN")


def test_slow_tests_are_left_out_unless_asked_for(run):
    assert run(PASSES, SLOW, PASSES)[0] == (2, 0)
    assert run(PASSES, SLOW, PASSES, slow=True)[0] == (3, 0)


def test_at_its_limit_a_part_says_what_was_not_run(run):
    counts, lines = run(PASSES, FAILS, REACHES_THE_LIMIT, PASSES, PASSES)
    assert counts == (1, 2)  # what failed, and the limit itself
    assert names(lines, "FAILED")[-1] == "b"
    assert "some reached its limit of 600 s: 3 tests were not run to their end" in lines
    assert names(lines, "NOT RUN") == ["c", "d", "e"]
    assert lines[-1].startswith("some: 1 passed, 2 failed, 0 skipped (")


def test_twenty_tests_are_named(run):
    counts, lines = run(REACHES_THE_LIMIT, *[PASSES] * 22)
    assert counts == (0, 1)
    assert names(lines, "NOT RUN")[:20] == list("abcdefghijklmnopqrst")
    assert "NOT RUN ... and 3 more" in lines


def test_a_test_that_ends_the_process_has_failed(run):
    counts, lines = run(PASSES, FAILS, DIES, PASSES)
    assert counts == (1, 2)
    assert names(lines, "FAILED") == ["b", "c"]
    assert "some ended with status 3: 1 tests were not run to their end" in lines
    assert names(lines, "NOT RUN") == ["d"]
    # Pytest had no time left to say so.
    assert any(line.startswith("E  ") and "assert False" in line for line in lines)
