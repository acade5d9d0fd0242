#!/usr/bin/env python3
"""Make the virtual environment of this clone: TensorFlow, Horovod built for it, and this package.

Uses the standard library only. A second call with nothing changed returns at once. The Horovod wheel that
was built is kept in the user's cache directory, so that a new clone or environment need not build it again.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_TF = "2.21.0"
HOROVOD = "0.28.1"
RECIPE = 1  # raise it when the way the wheel is built changes: cached ones are then left alone

# The oldest and the newest Python that each TensorFlow has wheels for.
PYTHONS = {
    "2.15": ((3, 9), (3, 11)),
    "2.16": ((3, 9), (3, 12)),
    "2.17": ((3, 9), (3, 12)),
    "2.18": ((3, 9), (3, 12)),
    "2.19": ((3, 9), (3, 12)),
    "2.20": ((3, 9), (3, 13)),
    "2.21": ((3, 10), (3, 13)),
}

BUILD_TOOLS = ["pip>=22.3", "setuptools>=64,<70", "wheel"]  # Horovod's setup.py needs an older setuptools
HOROVOD_NEEDS = ["cloudpickle", "packaging", "psutil", "pyyaml"]
CHECK = "import horovod.tensorflow as hvd; hvd.init(); assert hvd.gloo_built() and hvd.size() == 1"
NO_NETWORK = (
    "NewConnectionError|NameResolutionError|ConnectTimeout|ReadTimeout|ProxyError|Max retries exceeded"
    "|Temporary failure in name resolution|Connection refused|Network is unreachable|connection broken"
)


class SetupError(Exception):
    """What is wrong and what to do about it, in one line."""


class Environment:
    """One virtual environment: what it is to hold, and the log of how it was made.

    Its record is a small file in it that says which TensorFlow and Python it was made for, which build of
    Horovod is in it, and whether (and for which requirements) it was completed.

    Args:
        path: its directory.
        tf: the TensorFlow version wanted; empty for the one it has, or else the default.
    """

    def __init__(self, path: Path, tf: str) -> None:
        self.path = path
        self.python = path / "bin" / "python"
        self.log = path / "setup.log"
        self.record_file = path / "hvd_compress.json"
        record = self.read_record()
        self.tf: str = tf or record.get("tf", DEFAULT_TF)
        self.minor = ".".join(self.tf.split(".")[:2])
        # Another TensorFlow or another place means a new environment; otherwise it is kept, with its Python.
        self.keep = record.get("tf") == self.tf and record.get("path") == str(path) and self.python.exists()
        self.version: tuple[int, int] = tuple(record["python"]) if self.keep else sys.version_info[:2]

    def read_record(self) -> dict:
        """Returns the record, empty if there is none."""
        try:
            return json.loads(self.record_file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}

    def write_record(self, **changes: str) -> None:
        """Changes the record; `done` in it is empty until the environment is complete."""
        record = {"tf": self.tf, "python": self.version, "path": str(self.path)}
        self.record_file.write_text(json.dumps({**self.read_record(), **record, **changes}), encoding="utf-8")

    def requirements(self) -> list[str]:
        """What pip installs besides Horovod and tf_keras, in one call so that the versions fit together."""
        tensorflow = "tensorflow-cpu" if platform.machine() == "x86_64" else "tensorflow"
        return [f"{tensorflow}=={self.tf}", *HOROVOD_NEEDS, "-e", f"{ROOT}[dev,examples]"]

    def wanted(self) -> str:
        """A hash of everything that was asked for."""
        setup_py = (ROOT / "setup.py").read_text(encoding="utf-8")
        asked = [HOROVOD, RECIPE, BUILD_TOOLS, self.requirements(), setup_py]
        return hashlib.sha256(repr(asked).encode()).hexdigest()

    def run(self, command: list[str], **variables: str) -> bool:
        """Runs a command, the environment first on PATH, its output into the log; True if it succeeded."""
        # Without the caller's Horovod settings: they could ask for GPU operations, or name a rank.
        caller = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
        environment = {"PIP_RETRIES": "2", "PIP_DISABLE_PIP_VERSION_CHECK": "1", **caller, **variables}
        environment["PATH"] = os.pathsep.join([str(self.path / "bin"), os.environ.get("PATH", os.defpath)])
        environment["PIP_USER"] = "0"
        environment.pop("PYTHONPATH", None)
        with open(self.log, "a", encoding="utf-8") as log:
            print("\n$", *command, file=log, flush=True)
            null = subprocess.DEVNULL
            return not subprocess.call(command, cwd=ROOT, env=environment, stdin=null, stdout=log, stderr=log)

    def pip(self, *arguments: str) -> None:
        """Runs pip; if it fails, says why in one line."""
        start = self.log.stat().st_size if self.log.exists() else 0
        if self.run([str(self.python), "-m", "pip", *arguments]):
            return
        output = self.log.read_bytes()[start:].decode(errors="replace")
        missing = re.search(r"No matching distribution found for (\S+)", output)
        if re.search(NO_NETWORK, output, re.IGNORECASE):
            what = "cannot reach its package index: check the network and pip's settings (proxy, index)"
        elif missing:
            what = f"finds no {missing.group(1)}: check the network and pip's settings (index, no-index)"
        elif "No space left" in output:
            what = "ran out of disk space: the environment needs about 3 GB"
        else:
            what = f"{arguments[0]} failed"
        raise SetupError(f"pip {what}, then run this again; details in {self.log}")


def say(text: str) -> None:
    """Prints one line at once, so that it is seen before the step that it announces."""
    print(text, flush=True)


def check_python(env: Environment) -> None:
    """Raises SetupError unless the Python fits the TensorFlow."""
    if env.minor not in PYTHONS:
        known = ", ".join(PYTHONS)
        raise SetupError(f"no support for TensorFlow {env.tf}: name a release of {known} (TF={DEFAULT_TF})")
    oldest, newest = PYTHONS[env.minor]
    if not oldest <= env.version <= newest:
        wrong = "old" if env.version < oldest else "new"
        raise SetupError(
            f"Python {platform.python_version()} ({sys.executable}) is too {wrong} for TensorFlow {env.tf}, "
            f"which needs {oldest[0]}.{oldest[1]} to {newest[0]}.{newest[1]}: name another, as in "
            "PYTHON=python3.11"
        )


def check_tools() -> None:
    """Raises SetupError unless there is what Horovod's build needs and PyPI does not have."""
    missing = [tool for tool in (os.environ.get("CXX", "g++"), "make") if not shutil.which(tool)]
    if missing:
        names = " and ".join(missing)
        raise SetupError(f"no {names} found, which Horovod's build needs: apt-get install g++ make")


def needs_cmake() -> bool:
    """True if the machine's CMake is missing or too old for Horovod."""
    try:
        output = subprocess.run(["cmake", "--version"], capture_output=True, text=True).stdout
    except OSError:
        return True
    found = re.search(r"version (\d+)\.(\d+)", output)
    return found is None or (int(found.group(1)), int(found.group(2))) < (3, 13)


def make_venv(env: Environment) -> None:
    """Makes the environment anew, with pip in it."""
    if env.path.exists() and not env.record_file.exists() and any(env.path.iterdir()):
        raise SetupError(f"{env.path} was not made by this script: remove it, or name another (VENV=...)")
    say(f"Making {env.path} with Python {platform.python_version()} ...")
    shutil.rmtree(env.path, ignore_errors=True)
    env.path.mkdir(parents=True)
    env.record_file.write_text("{}", encoding="utf-8")  # marks it as ours, and as not yet usable
    venv = [sys.executable, "-m", "venv", str(env.path)]
    if env.run(venv):
        return
    # Debian keeps ensurepip in a package of its own; any pip can put itself into the environment instead.
    library = sysconfig.get_path("purelib", "posix_prefix", {"base": str(env.path)})
    copy_pip = [sys.executable, "-m", "pip", "install", "--target", library, "pip"]
    add_scripts = [str(env.python), "-m", "pip", "install", "--force-reinstall", *BUILD_TOOLS]
    if env.run([*venv, "--without-pip"]) and env.run(copy_pip) and env.run(add_scripts):
        return
    if env.run([sys.executable, "-m", "virtualenv", "--python", sys.executable, str(env.path)]):
        return
    raise SetupError(
        f"{sys.executable} cannot make virtual environments: install its venv module (apt-get install "
        f"python3-venv); details in {env.log}"
    )


def wheel_is_good(wheel: Path) -> bool:
    """True if the file is a whole Horovod wheel with the TensorFlow library in it."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            return archive.testzip() is None and any("tensorflow/mpi_lib" in n for n in archive.namelist())
    except (OSError, zipfile.BadZipFile):
        return False


def wheel_directory(env: Environment) -> Path:
    """The cache directory for the Horovod wheel of this TensorFlow, Python and machine."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    python = "cp{}{}".format(*env.version)
    system = "".join(platform.libc_ver())
    name = f"horovod{HOROVOD}-tf{env.tf}-{python}-{sysconfig.get_platform()}-{system}-{RECIPE}"
    return cache / "hvd_compress" / "wheels" / name


def build_horovod(env: Environment, work: Path) -> Path:
    """Builds the wheel of Horovod, with Gloo only, for the environment's TensorFlow.

    Args:
        env: the environment, TensorFlow in it.
        work: an empty directory to work in.

    Returns:
        The wheel, in `work`.
    """
    say(f"Building Horovod {HOROVOD} for TensorFlow {env.tf} (2 to 5 minutes) ...")
    source = work / f"horovod-{HOROVOD}"
    no_binary = ["--no-deps", "--no-build-isolation", "--no-binary", "horovod"]
    env.pip("download", *no_binary, "-d", str(work), f"horovod=={HOROVOD}")
    shutil.unpack_archive(str(next(work.glob("horovod*.tar.gz"))), str(work))
    if env.minor != "2.15":
        # Holds only the optional ops inside XLA, and needs headers that TensorFlow 2.16 moved.
        (source / "horovod" / "tensorflow" / "xla_mpi_ops.cc").write_text("", encoding="utf-8")
    built = env.run(
        [str(env.python), "-m", "pip", "wheel", "-v", *no_binary, "-w", str(work), str(source)],
        HOROVOD_WITH_TENSORFLOW="1",
        HOROVOD_WITHOUT_PYTORCH="1",
        HOROVOD_WITHOUT_MXNET="1",
        HOROVOD_WITH_GLOO="1",
        HOROVOD_WITHOUT_MPI="1",
        CMAKE_POLICY_VERSION_MINIMUM="3.5",  # CMake 4 would refuse what Gloo asks for
        MAKEFLAGS=f"-j{os.cpu_count() or 1}",
    )
    wheels = list(work.glob("horovod*.whl"))
    if not built or not wheels or not wheel_is_good(wheels[0]):
        raise SetupError(f"Horovod {HOROVOD} did not build for TensorFlow {env.tf}: see {env.log}")
    return wheels[0]


def install_horovod(env: Environment) -> None:
    """Installs Horovod, unless it is there, from the cache; or builds it and keeps the wheel there."""

    def works(wheel: Path) -> bool:
        env.pip("install", "--force-reinstall", "--no-deps", str(wheel))
        return env.run([str(env.python), "-c", CHECK])

    cache = wheel_directory(env)
    if env.read_record().get("horovod") == cache.name and env.run([str(env.python), "-c", CHECK]):
        return
    kept = [wheel for wheel in cache.glob("horovod*.whl") if wheel_is_good(wheel)]
    if kept:
        say(f"Installing Horovod {HOROVOD} as built before ...")
        if works(kept[0]):
            return
    check_tools()
    with tempfile.TemporaryDirectory(prefix="hvd_compress-") as work:
        wheel = build_horovod(env, Path(work))
        if not works(wheel):
            raise SetupError(f"Horovod {HOROVOD} was built but does not start: see the errors in {env.log}")
        try:
            # Renamed into place, so that nobody meets half a wheel.
            cache.mkdir(parents=True, exist_ok=True)
            partial = cache / f"{wheel.name}.{os.getpid()}"
            shutil.copyfile(wheel, partial)
            os.replace(partial, cache / wheel.name)
        except OSError as error:
            say(f"Note: the built wheel could not be kept in {cache} ({error.strerror})")


def set_up(env: Environment) -> None:
    """Makes the environment, or completes the one that is there."""
    if not any(wheel_is_good(wheel) for wheel in wheel_directory(env).glob("horovod*.whl")):
        check_tools()  # before the long downloads
    if not env.keep:
        make_venv(env)
    env.write_record(done="")
    env.pip("install", *BUILD_TOOLS, *(["cmake"] if needs_cmake() else []))
    say(f"Installing TensorFlow {env.tf} and the other packages (about 500 MB) ...")
    env.pip("install", "--no-build-isolation", *env.requirements())
    if env.minor != "2.15":
        # Without its dependencies: they name the package tensorflow, which tensorflow-cpu replaces.
        env.pip("install", "--no-deps", f"tf_keras=={env.minor}.*")
    install_horovod(env)
    env.write_record(done=env.wanted(), horovod=wheel_directory(env).name)


def main() -> int:
    """Reads the command line and sets the environment up if it is not."""
    parser = argparse.ArgumentParser(description="Make the virtual environment of this clone.")
    parser.add_argument("--venv", default=".venv", help="its directory (default: %(default)s)")
    parser.add_argument("--tf", default="", help=f"TensorFlow (default: the environment's, or {DEFAULT_TF})")
    arguments = parser.parse_args()
    path = Path(os.path.abspath(arguments.venv))
    env = Environment(path, arguments.tf)
    if env.keep and env.read_record().get("done") == env.wanted():
        say(f"{path} is ready (TensorFlow {env.tf}, Horovod {HOROVOD})")
        return 0
    check_python(env)
    # One set-up at a time in this clone; another one may have done the work while this one waited.
    lock = os.open(ROOT, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    env = Environment(path, arguments.tf)
    if not env.keep or env.read_record().get("done") != env.wanted():
        set_up(env)
    say(f"{path} is ready (TensorFlow {env.tf}, Horovod {HOROVOD})")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SetupError as problem:
        sys.exit(f"setup_env: {problem}")
    except KeyboardInterrupt:
        sys.exit("setup_env: interrupted; run it again to go on")
