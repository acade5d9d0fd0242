"""deploy/slurm: a job of two nodes trains, each node in a network namespace of its own, with Slurm from Debian."""

import os
import re
import shutil
from pathlib import Path

import pytest
import slurm
from conftest import BIN, ROOT
from test_netlab import works

SCRIPT = str(ROOT / "deploy" / "slurm" / "train.sbatch")

needs_slurm = pytest.mark.skipif(
    bool(slurm.missing()) or not works(), reason="needs root, network namespaces, and Debian's slurmd and slurmctld"
)


@needs_slurm
@pytest.mark.slow
@pytest.mark.timeout(500)
def test_two_nodes_train_the_mnist_example(tmp_path):
    output = tmp_path / "job.out"
    train = ["python", str(ROOT / "examples" / "keras_mnist.py"), "--data", "digits", "--epochs", "2"]
    path = os.pathsep.join([str(BIN), os.environ["PATH"]])
    environment = {
        "PATH": path,
        "PYTHONPATH": str(ROOT),
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "HOROVOD_GLOO_TIMEOUT_SECONDS": "120",
    }
    with slurm.Slurm(tmp_path) as cluster:
        command = ["sbatch", "--wait", f"--output={output}", SCRIPT, *train]
        done = cluster.run(command, env=environment, cwd=tmp_path, timeout=420)
        text = output.read_text(errors="replace") if output.exists() else cluster.logs()
    assert done.returncode == 0, done.stderr + text[-4000:]
    assert re.search(r"^\[0\]<stdout>:workers: +2$", text, re.MULTILINE), text[-4000:]
    sent = re.search(r"^\[0\]<stdout>:sent per step: +([\d,]+) bytes by each worker$", text, re.MULTILINE)
    assert sent and int(sent.group(1).replace(",", "")) > 0
    assert "<stderr>:Traceback" not in text


def test_the_script_starts_ranks_through_slurm(tmp_path):
    """With stand-ins for Slurm and horovodrun: what the stand-in for ssh makes of horovodrun's command."""
    import subprocess

    def tool(name, text):
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)

    tool("scontrol", "printf 'n1\\nn2\\n'")
    tool("srun", 'printf "srun: %s\\n" "$@"')
    tool(
        "horovodrun",
        'echo "horovodrun: $*"; ssh -o A=no -o B=no n2 -p 22 -o ConnectTimeout=3 "cd /x ; env A=\'b c\' python t.py"',
    )
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_GPUS_ON_NODE": "4",
        "INTERFACE": "ib0",
    }  # fmt: skip
    done = subprocess.run(
        ["bash", SCRIPT, "python", "train.py", "--lr", "1"], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    first, *rest = done.stdout.splitlines()
    assert first == "horovodrun: --gloo -np 8 -H n1:4,n2:4 --network-interfaces ib0 python train.py --lr 1"
    assert "srun: --nodelist=n2" in rest
    assert rest[-3:] == ["srun: bash", "srun: -c", "srun: cd /x ; env A='b c' python t.py"]
    assert not shutil.which("ssh", path=str(tmp_path)) and not Path("ssh").exists()
