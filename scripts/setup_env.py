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
import shutil
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from hvd_compress.install import environment, horovod  # noqa: E402
from hvd_compress.install.environment import SetupError, say  # noqa: E402
from hvd_compress.install.recipe import BUILD_TOOLS, HOROVOD, HOROVOD_NEEDS, PYTHONS, RECIPE  # noqa: E402

DEFAULT_TF = "2.21.0"


class Environment(environment.Environment):
    """One virtual environment: what it is to hold, and the log of how it was made.

    Its record is a small file in it that says which TensorFlow and Python it was made for, which build of
    Horovod is in it, and whether (and for which requirements) it was completed.

    Args:
        path: its directory.
        tf: the TensorFlow version wanted; empty for the one it has, or else the default.
    """

    def __init__(self, path: Path, tf: str) -> None:
        self.path = path
        self.record_file = path / "hvd_compress.json"
        record = self.read_record()
        python, tf = path / "bin" / "python", tf or record.get("tf", DEFAULT_TF)
        # Another TensorFlow or another place means a new environment; otherwise it is kept, with its Python.
        self.keep = record.get("tf") == tf and record.get("path") == str(path) and python.exists()
        version: tuple[int, int] = tuple(record["python"]) if self.keep else sys.version_info[:2]
        super().__init__(python, version, tf, path / "setup.log")

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
        files = [ROOT / "pyproject.toml", ROOT / "setup.py", *sorted((ROOT / "native").iterdir())]
        packaging = [file.read_text(encoding="utf-8") for file in files]
        asked = [HOROVOD, RECIPE, BUILD_TOOLS, self.requirements(), *packaging]
        return hashlib.sha256(repr(asked).encode()).hexdigest()


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


def install_horovod(env: Environment) -> None:
    """Installs Horovod, unless it is there."""
    if env.read_record().get("horovod") != horovod.wheel_directory(env).name or not horovod.works(env):
        horovod.install(env)


def set_up(env: Environment) -> None:
    """Makes the environment, or completes the one that is there."""
    if not horovod.kept_wheel(env):
        horovod.require(env)  # before the long downloads
    if not env.keep:
        make_venv(env)
    env.write_record(done="")
    env.pip("install", *BUILD_TOOLS)
    say(f"Installing TensorFlow {env.tf} and the other packages (about 500 MB) ...")
    env.pip("install", "--no-build-isolation", *env.requirements())
    if env.minor != "2.15":
        # Without its dependencies: they name the package tensorflow, which tensorflow-cpu replaces.
        env.pip("install", "--no-deps", f"tf_keras=={env.minor}.*")
    install_horovod(env)
    env.write_record(done=env.wanted(), horovod=horovod.wheel_directory(env).name)


def say_ready(env: Environment) -> None:
    say(f"{env.path} is ready (TensorFlow {env.tf}, Horovod {HOROVOD}). Activate it: . {env.path}/bin/activate")


def main() -> int:
    """Reads the command line and sets the environment up if it is not."""
    parser = argparse.ArgumentParser(description="Make the virtual environment of this clone.")
    parser.add_argument("--venv", default=".venv", help="its directory (default: %(default)s)")
    parser.add_argument("--tf", default="", help=f"TensorFlow (default: the environment's, or {DEFAULT_TF})")
    arguments = parser.parse_args()
    path = Path(os.path.abspath(arguments.venv))
    env = Environment(path, arguments.tf)
    if env.keep and env.read_record().get("done") == env.wanted():
        say_ready(env)
        return 0
    check_python(env)
    # One set-up at a time in this clone; another one may have done the work while this one waited.
    lock = os.open(ROOT, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    env = Environment(path, arguments.tf)
    if not env.keep or env.read_record().get("done") != env.wanted():
        set_up(env)
    say_ready(env)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SetupError as problem:
        sys.exit(f"setup_env: {problem}")
    except KeyboardInterrupt:
        sys.exit("setup_env: interrupted; run it again to go on")
