"""The wheel of Horovod: built once, kept in the user's cache directory, installed from there."""

from __future__ import annotations

import os
import re
import shutil
import socket
import sysconfig
import tempfile
import zipfile
from pathlib import Path
from platform import libc_ver

from . import prerequisites
from .environment import Environment, SetupError, say
from .progress import Progress
from .recipe import BUILD_TOOLS, HOROVOD, PLAIN, RECIPE, Features, patch


def wheel_is_good(wheel: Path) -> bool:
    """True if the file is a whole Horovod wheel with the TensorFlow library in it."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            return archive.testzip() is None and any("tensorflow/mpi_lib" in n for n in archive.namelist())
    except (OSError, zipfile.BadZipFile):
        return False


def cache_directory() -> Path:
    """Where wheels and the log of the last build are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hvd_compress"


def wheel_directory(env: Environment, features: Features = PLAIN) -> Path:
    """The cache directory for the Horovod wheel of this TensorFlow, Python, machine, and these features."""
    python = "cp{}{}".format(*env.version)
    system = "".join(libc_ver())
    name = f"horovod{HOROVOD}-tf{env.tf}-{python}-{sysconfig.get_platform()}-{system}-{RECIPE}"
    if features.mpi:
        # Another MPI has another library.
        name += "-mpi" + "".join(re.findall(r"\d[\d.]*", prerequisites.output("mpirun", "--version"))[:1])
    if features.nccl:
        cuda = Path(prerequisites.cuda_home(), "bin", "nvcc")
        name += "-nccl" + "".join(re.findall(r"release ([\d.]+)", prerequisites.output(str(cuda), "--version"))[:1])
    if features.pytorch:
        name += f"-torch{env.torch}"
    return cache_directory() / "wheels" / name


def kept_wheel(env: Environment, features: Features = PLAIN) -> Path | None:
    """The wheel in the cache; None if there is none that is whole."""
    wheels = wheel_directory(env, features).glob("horovod*.whl")
    return next((wheel for wheel in wheels if wheel_is_good(wheel)), None)


def build(env: Environment, work: Path, features: Features = PLAIN) -> Path:
    """Builds the wheel of Horovod for the environment's TensorFlow.

    The build's own tools (an older setuptools, and CMake if the machine has none) are put into `work`, so that those of
    the environment stay as they are.

    Args:
        env: The environment, TensorFlow in it.
        work: An empty directory to work in.
        features: What it is built with.

    Returns:
        The wheel, in `work`.

    Raises:
        SetupError: It did not build.
    """
    say(f"Building Horovod {HOROVOD} for TensorFlow {env.tf} (2 to 5 minutes) ...")
    source, tools = work / f"horovod-{HOROVOD}", work / "tools"
    cmake = ["cmake"] if prerequisites.needs_cmake() else []
    env.pip("install", "--target", str(tools), *BUILD_TOOLS, *cmake, *features.needs())
    no_binary = ["--no-deps", "--no-build-isolation", "--no-binary", "horovod"]
    env.pip("download", *no_binary, "-d", str(work), f"horovod=={HOROVOD}", variables={"PYTHONPATH": str(tools)})
    shutil.unpack_archive(str(next(work.glob("horovod*.tar.gz"))), str(work))
    patch(source, env.tf)
    with Progress("compiling") as progress:
        built = env.run(
            [str(env.python), "-m", "pip", "wheel", "-v", *no_binary, "-w", str(work), str(source)],
            path=str(tools / "bin"),
            on_line=progress.line,
            variables={
                "PYTHONPATH": str(tools),
                "PYTHONUNBUFFERED": "1",
                "CMAKE_POLICY_VERSION_MINIMUM": "3.5",  # CMake 4 would refuse what Gloo asks for
                "MAKEFLAGS": f"-j{prerequisites.jobs()}",
                **features.variables(),
            },
        )
    wheels = list(work.glob("horovod*.whl"))
    if not built or not wheels or not wheel_is_good(wheels[0]):
        raise SetupError(f"Horovod {HOROVOD} did not build for TensorFlow {env.tf}: see {env.log}")
    return wheels[0]


def keep(wheel: Path, directory: Path) -> None:
    """Copies a wheel into a directory, or says why it cannot."""
    try:
        # Renamed into place, so that nobody meets half a wheel.
        directory.mkdir(parents=True, exist_ok=True)
        partial = directory / f"{wheel.name}.{os.getpid()}"
        shutil.copyfile(wheel, partial)
        os.replace(partial, directory / wheel.name)
    except OSError as error:
        say(f"Note: the built wheel could not be kept in {directory} ({error.strerror})")


def works(env: Environment, features: Features = PLAIN) -> bool:
    """Whether the environment's Horovod starts and has these features."""
    return env.run([str(env.python), "-c", features.check()])


def require(env: Environment, features: Features = PLAIN) -> None:
    """Raises SetupError, one line for each thing, unless there is what the build needs and PyPI does not have."""
    lines = prerequisites.missing(features, env.torch)
    if lines:
        raise SetupError("\n".join(lines))


def install(env: Environment, features: Features = PLAIN) -> Path | None:
    """Installs Horovod from the cache; or builds it, installs it, and keeps the wheel there.

    Args:
        env: The environment, TensorFlow and what Horovod needs in it.
        features: What it is built with.

    Returns:
        The wheel in the cache; None if it could not be kept.

    Raises:
        SetupError: Something is missing, it did not build, or it does not start.
    """

    def starts(wheel: Path) -> bool:
        env.pip("install", "--force-reinstall", "--no-deps", str(wheel))
        return works(env, features)

    name = socket.gethostname()
    if not prerequisites.has_address(name):
        raise SetupError(
            f"this host's name {name} has no address, without which Horovod does not start: add it to /etc/hosts, with "
            "the address of the interface that joins the hosts"
        )
    kept = kept_wheel(env, features)
    if kept:
        say(f"Installing Horovod {HOROVOD} as built before ...")
        if starts(kept):
            return kept
    require(env, features)
    with tempfile.TemporaryDirectory(prefix="hvd_compress-") as work:
        wheel = build(env, Path(work), features)
        if not starts(wheel):
            raise SetupError(f"Horovod {HOROVOD} was built but does not start: see the errors in {env.log}")
        keep(wheel, wheel_directory(env, features))
    return kept_wheel(env, features)
