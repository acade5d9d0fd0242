"""The packages, and the files that ship beside them: what they hold, and that they agree with each other."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest
import yaml

from hvd_compress.install.recipe import PYTHONS
from hvd_compress.version import __version__

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy of the files that packaging reads."""
    copy = tmp_path_factory.mktemp("clone") / "clone"
    copy.mkdir()
    for file in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / file, copy)
    shutil.copytree(ROOT / "native", copy / "native")
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(ROOT / "hvd_compress", copy / "hvd_compress", ignore=ignored)
    code = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
    built = subprocess.run(
        [sys.executable, "-c", code, str(copy)], cwd=copy, capture_output=True, text=True, timeout=280
    )
    assert built.returncode == 0, built.stderr[-2000:]
    with zipfile.ZipFile(copy / built.stdout.split()[-1]) as archive:
        yield archive


def test_the_wheel_holds_the_package_and_its_data(wheel):
    names = set(wheel.namelist())
    source = {path.relative_to(ROOT).as_posix() for path in (ROOT / "hvd_compress").rglob("*.py")}
    data = {
        "hvd_compress/py.typed",
        "hvd_compress/tools/templates/report.html",
        "hvd_compress/tools/data/gradients.npz",
    }
    assert source | data <= names
    assert len([name for name in names if re.fullmatch(r"hvd_compress/kernels/_native\..*so", name)]) == 1
    assert not [name for name in names if not name.startswith(("hvd_compress/", "hvd_compress-"))]


def test_metadata(wheel):
    folder = f"hvd_compress-{__version__}.dist-info"
    metadata = HeaderParser().parsestr(wheel.read(f"{folder}/METADATA").decode())
    assert metadata["Version"] == __version__ and metadata["License"] == "Apache-2.0"
    assert metadata["Author"] == "hvd_compress developers"
    assert "hvd-compress = hvd_compress.tools.entry:main" in wheel.read(f"{folder}/entry_points.txt").decode()
    oldest, newest = min(low for low, _ in PYTHONS.values()), max(high for _, high in PYTHONS.values())
    assert metadata["Requires-Python"] == ">={}.{}".format(*oldest)
    listed = [line.rsplit(" ", 1)[1] for line in metadata.get_all("Classifier") if "Python :: 3." in line]
    assert listed == [f"3.{minor}" for minor in range(oldest[1], newest[1] + 1)]
    readme = (ROOT / "README.md").read_text(encoding="utf-8").replace("\n", " ")
    first, *_, last = PYTHONS
    assert "TensorFlow ({} to {}, Python {}.{} to {}.{})".format(first, last, *oldest, *newest) in readme
    # A package index has neither the files nor the images of the clone.
    targets = re.findall(r"\]\(([^)]+)\)", metadata.get_payload())
    assert targets and all(target.startswith("http") for target in targets)
    assert "{} needs Python {}.{}".format(last, *PYTHONS[last][0]) in readme
    assert "{} at most {}.{}".format(first, *PYTHONS[first][1]) in readme
    assert "docs/install.md" in metadata.get_payload() and "![" not in metadata.get_payload()


def table_rows():
    """The rows of the table of tested versions: (TensorFlow, Python)."""
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    return re.findall(r"^\| (2\.\d+\.\d+) \| [^|]+ \| (3\.\d+) \| ([^|]+) \|$", page, re.MULTILINE)


def test_ci_runs_the_table():
    """Each row that says so is a job of the workflow, and the other way around."""
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    jobs = {(job["tensorflow"], job["python"]) for job in workflow["jobs"]["test"]["strategy"]["matrix"]["include"]}
    assert jobs == {(tensorflow, python) for tensorflow, python, what in table_rows() if what.startswith("CI")}
    for tensorflow, python, _ in table_rows():
        oldest, newest = PYTHONS[".".join(tensorflow.split(".")[:2])]
        assert oldest <= tuple(map(int, python.split("."))) <= newest


@pytest.mark.parametrize("workflow", ["ci.yml", "release.yml"])
def test_workflows_call_what_exists(workflow):
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / workflow).read_text(encoding="utf-8"))["jobs"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    called = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    for line in called:
        for target in re.findall(r"\bmake ([\w-]+)", line):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
        for script in re.findall(r"scripts/\w+\.py", line):
            assert (ROOT / script).exists()
    assert any("make release-check" in line for line in called)


# The fields of MPIJobSpec and RunPolicy in the API v2beta1 of the MPI operator, and those of a container in use here.
JOB_FIELDS = {
    "slotsPerWorker", "runLauncherAsWorker", "runPolicy", "mpiReplicaSpecs", "sshAuthMountPath",
    "launcherCreationPolicy", "mpiImplementation",
}  # fmt: skip
POLICY_FIELDS = {
    "cleanPodPolicy", "ttlSecondsAfterFinished", "activeDeadlineSeconds", "backoffLimit", "schedulingPolicy",
    "suspend", "managedBy",
}  # fmt: skip
CONTAINER_FIELDS = {"name", "image", "command", "args", "env", "resources", "volumeMounts", "workingDir", "ports"}


class TestKubernetes:
    def test_the_job_is_one_of_the_operator(self):
        job = yaml.safe_load((DEPLOY / "kubernetes" / "mpijob.yaml").read_text(encoding="utf-8"))
        assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
        assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", job["metadata"]["name"])
        spec = job["spec"]
        assert set(spec) <= JOB_FIELDS and set(spec["runPolicy"]) <= POLICY_FIELDS
        assert spec["runPolicy"]["cleanPodPolicy"] in ("Running", "All", "None")
        assert set(spec["mpiReplicaSpecs"]) == {"Launcher", "Worker"}
        for replica in spec["mpiReplicaSpecs"].values():
            assert set(replica) <= {"replicas", "template", "restartPolicy"}
            assert replica.get("restartPolicy", "Never") in ("Never", "OnFailure", "Always", "ExitCode")
            assert set(replica["template"]) <= {"metadata", "spec"}
            (container,) = replica["template"]["spec"]["containers"]
            assert set(container) <= CONTAINER_FIELDS
            assert all(isinstance(word, str) for word in [*container["command"], *container["args"]])
        launcher, worker = (spec["mpiReplicaSpecs"][name] for name in ("Launcher", "Worker"))
        words = launcher["template"]["spec"]["containers"][0]["args"]
        assert int(words[words.index("-np") + 1]) == worker["replicas"] * spec["slotsPerWorker"]
        assert (ROOT / next(word for word in words if word.endswith(".py"))).exists()
        (container,) = worker["template"]["spec"]["containers"]
        assert container["command"] == ["/usr/sbin/sshd"]
        # horovodrun passes the launcher's environment on; that of the workers' sshd does not reach the ranks.
        environment = {each["name"]: each["value"] for each in launcher["template"]["spec"]["containers"][0]["env"]}
        cores = int(container["resources"]["limits"]["cpu"])
        assert int(environment["TF_NUM_INTRAOP_THREADS"]) * spec["slotsPerWorker"] == cores and "env" not in container


class TestDocker:
    TEXT = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")

    def instructions(self):
        joined = re.sub(r"\\\n", "", re.sub(r"^#.*\n", "", self.TEXT, flags=re.MULTILINE))
        return [line.split(None, 1) for line in joined.splitlines() if line.strip()]

    def test_instructions(self):
        found = [name for name, _ in self.instructions()]
        assert found[:2] == ["ARG", "FROM"] and found[-1] == "CMD"
        assert set(found) <= {"ARG", "FROM", "RUN", "ENV", "COPY", "WORKDIR", "CMD"}
        arguments = {rest.partition("=")[0] for name, rest in self.instructions() if name == "ARG"}
        assert set(re.findall(r"--build-arg (\w+)=", self.TEXT)) == arguments

    def test_each_line_is_shell(self):
        for name, rest in self.instructions():
            if name == "RUN":
                checked = subprocess.run(["sh", "-n", "-c", rest], capture_output=True, text=True, timeout=60)
                assert checked.returncode == 0, checked.stderr

    def test_nothing_of_the_machine_goes_into_the_image(self):
        ignored = (DEPLOY / "Dockerfile.dockerignore").read_text(encoding="utf-8").split()
        assert {".git", ".venv*", "build", "dist", "**/*.so"} <= set(ignored)

    def test_training_starts_outside_of_the_clone(self):
        """`python -c` there would import the clone, in which no library is built, and not the installed package."""
        copies = [rest.split() for name, rest in self.instructions() if name == "COPY"]
        (folder,) = (rest for name, rest in self.instructions() if name == "WORKDIR")
        assert copies == [[".", "/opt/hvd_compress"], ["examples", f"{folder}/examples"]]
        assert not folder.startswith("/opt/hvd_compress")
        (command,) = (json.loads(rest) for name, rest in self.instructions() if name == "CMD")
        assert command[-1].startswith("examples/") and (ROOT / command[-1]).exists()

    def test_what_is_installed_for_horovod(self, tmp_path):
        """With stand-ins for the commands: the build argument reaches the command."""
        for tool in ("hvd-compress", "rm"):
            (tmp_path / tool).write_text(f'#!/bin/sh\necho {tool} "$@"\n')
            (tmp_path / tool).chmod(0o755)
        line = next(rest for name, rest in self.instructions() if name == "RUN" and "horovod install" in rest)
        environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOROVOD": "--nccl --mpi"}
        done = subprocess.run(["sh", "-c", line], env=environment, capture_output=True, text=True, timeout=60)
        assert done.stdout.splitlines()[0] == "hvd-compress horovod install --nccl --mpi"
