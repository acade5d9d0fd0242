"""hvd-compress horovod check, and doctor --env under horovodrun: faults that are planted on one rank."""

import re

DOCTOR = """
import os, sys
if os.environ["HOROVOD_RANK"] == "1":
    os.environ["HVD_COMPRESS"] = "int8"
sys.argv = ["hvd-compress", "doctor", "--env"]
from hvd_compress.tools.entry import main
main()
"""


def test_two_ranks_of_this_host_work(python):
    result = python(["-m", "hvd_compress.tools.entry", "horovod", "check"])
    assert result.returncode == 0, result.stderr
    assert re.fullmatch(r"Horovod works between two ranks: TensorFlow 2\.\d+\.\d+, built with gloo\S*\n", result.stdout)


def test_ranks_are_compared(horovodrun, tmp_path):
    script = tmp_path / "doctor.py"
    script.write_text(DOCTOR)
    result = horovodrun(2, [str(script)], env={"TF_NUM_INTRAOP_THREADS": "4096"})
    assert result.returncode == 0, result.stderr[-2000:]
    lines = [line.partition(">:")[2] for line in result.stdout.splitlines() if line.startswith("[0]<stdout>:")]
    assert len(lines) == len(result.stdout.splitlines())  # only rank 0 prints
    assert "2 ranks on 1 host" in lines and "network: horovodrun has taken lo" in lines
    problems = {
        line: lines[i + 1].partition(":")[2].strip() for i, line in enumerate(lines[:-1]) if "what:" in lines[i + 1]
    }
    differing = problems["ranks with different settings"]
    assert re.fullmatch(r"HVD_COMPRESS: rank 0 \(host \S+\): none; rank 1 \(host \S+\): int8", differing)
    assert problems["oversubscribed cores"].startswith("2 ranks with 4096 threads each on host")
    assert len(problems) == 2 or "few open files" in problems
