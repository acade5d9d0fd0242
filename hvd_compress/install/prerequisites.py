"""What a build of Horovod needs besides PyPI: compilers, MPI, CUDA, NCCL. Each thing that is missing is one line."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sysconfig
from pathlib import Path

from .recipe import Features

_OLDEST_CMAKE = (3, 13)
_BYTES_PER_COMPILER = 2 * 2**30  # of one file of TensorFlow's headers
USUAL_CUDA = "/usr/local/cuda"
CUDA_HOMES = ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH")


def output(*command: str) -> str:
    """What a command prints; empty if there is no such command, or it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def needs_cmake() -> bool:
    """Whether the machine's CMake is missing or too old for Horovod; PyPI has one."""
    found = re.search(r"version (\d+)\.(\d+)", output("cmake", "--version"))
    return found is None or (int(found.group(1)), int(found.group(2))) < _OLDEST_CMAKE


def jobs() -> int:
    """How many compilers run at once: one for each core that this process may use, if memory suffices."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(cores, memory // _BYTES_PER_COMPILER))


def cuda_home() -> str:
    """CUDA's folder: from the environment, the usual one, or that of nvcc on PATH; empty if there is none."""
    named = [os.environ[name] for name in CUDA_HOMES if os.environ.get(name)]
    nvcc = shutil.which("nvcc")
    places = [*named, USUAL_CUDA, *([str(Path(nvcc).resolve().parent.parent)] if nvcc else [])]
    return next((place for place in places if os.access(Path(place, "bin", "nvcc"), os.X_OK)), "")


def nccl_home(given: str, cuda: str) -> str:
    """The folder with NCCL's include/nccl.h and lib*/libnccl.so; empty if there is none.

    Args:
        given: The folder that the user names; empty for the usual ones.
        cuda: CUDA's folder.
    """
    usual = [os.environ.get("HOROVOD_NCCL_HOME", ""), os.environ.get("NCCL_HOME", ""), cuda, "/usr", "/usr/local"]
    for place in [given] if given else filter(None, usual):
        libraries = [*Path(place).glob("lib*/libnccl.so"), *Path(place).glob("lib*/*/libnccl.so")]
        if Path(place, "include", "nccl.h").exists() and libraries:
            return place
    return ""


def compiler() -> str:
    """The C++ compiler: $CXX, or g++."""
    return os.environ.get("CXX") or "g++"


def _knows_cxx17() -> bool:
    # `-x c++ -` compiles what stands on standard input; g++ 7 is the first whose library has <optional>.
    command = [*compiler().split(), "-std=c++17", "-fsyntax-only", "-x", "c++", "-"]
    try:
        return subprocess.run(command, input=b"#include <optional>\n", capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def has_address(name: str) -> bool:
    """Whether this host finds an address for a name."""
    try:
        return bool(socket.getaddrinfo(name, None))
    except OSError:
        return False


def missing(features: Features, torch: str = "") -> list[str]:
    """What the build would fail for the lack of, one line each, with what to do.

    Args:
        features: What Horovod is to be built with.
        torch: The version of PyTorch in the environment; empty if there is none.
    """
    lines = []
    tools = [tool for tool in (compiler(), "make") if not shutil.which(tool.split()[0])]
    if tools:
        names = " and ".join(tools)
        lines.append(f"no {names} found, which Horovod's build needs: apt-get install g++ make")
    elif not _knows_cxx17():
        lines.append(f"{compiler()} cannot compile C++17: install g++ 8 or later, or name one (CXX=g++-12)")
    if features.mpi and not shutil.which("mpicxx"):
        lines.append("--mpi: no mpicxx found: apt-get install libopenmpi-dev openmpi-bin")
    if features.pytorch and not torch:
        lines.append("--pytorch: there is no PyTorch in this environment: pip install torch")
    if features.pytorch and not Path(sysconfig.get_path("include"), "Python.h").exists():
        lines.append("--pytorch: no Python.h found: apt-get install python3-dev")
    if features.nccl:
        if not cuda_home():
            lines.append("--nccl: no nvcc found: install the CUDA toolkit that your TensorFlow names, or set CUDA_HOME")
        if not nccl_home(features.nccl_home, cuda_home()):
            place = features.nccl_home or "the usual places"
            lines.append(
                f"--nccl: no include/nccl.h and lib/libnccl.so in {place}: apt-get install libnccl-dev from NVIDIA's "
                "repository, or name the folder (--nccl-home DIR)"
            )
    return lines
