"""A Python environment that Horovod is installed into, and the log of what was done to it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Callable

TENSORFLOWS = ("tensorflow", "tensorflow-cpu", "tensorflow-rocm", "tf-nightly")
NO_NETWORK = (
    "NewConnectionError|NameResolutionError|ConnectTimeout|ReadTimeout|ProxyError|Max retries exceeded"
    "|Temporary failure in name resolution|Connection refused|Network is unreachable|connection broken"
)


class SetupError(Exception):
    """What is wrong and what to do about it, in one line."""


def say(text: str) -> None:
    """Prints one line at once, so that it is seen before the step that it announces."""
    print(text, flush=True)


def installed(*packages: str) -> str:
    """The version of the first of these packages that the running Python has; empty if it has none."""
    for package in packages:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            pass
    return ""


class Environment:
    """A Python environment.

    Args:
        python: Its interpreter.
        version: Major and minor version of its Python.
        tf: The version of its TensorFlow, such as "2.21.0".
        log: The file to which the output of all commands is appended.
        torch: The version of its PyTorch; empty if there is none, or if it does not matter.
        search: Where its Python also looks for packages, as in PYTHONPATH.
    """

    def __init__(
        self, python: Path, version: tuple[int, int], tf: str, log: Path, torch: str = "", search: str = ""
    ) -> None:
        self.python = python
        self.version = version
        self.tf = tf
        self.log = log
        self.torch = torch
        self.search = search

    @classmethod
    def this(cls, log: Path) -> Environment:
        """The environment of the running Python; `tf` is empty if it has no TensorFlow."""
        version, search = sys.version_info[:2], os.environ.get("PYTHONPATH", "")
        return cls(Path(sys.executable), version, installed(*TENSORFLOWS), log, installed("torch"), search)

    @property
    def minor(self) -> str:
        """Major and minor version of TensorFlow, such as "2.21"."""
        return ".".join(self.tf.split(".")[:2])

    def run(
        self,
        command: list[str],
        *,
        path: str = "",
        cwd: Path | None = None,
        on_line: Callable[[str], None] | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> bool:
        """Runs a command, the environment first on PATH, its output into the log.

        Args:
            command: The command.
            path: A folder before the environment's on PATH.
            cwd: Where it runs; by default in the folder of the log, where no package of a clone is imported.
            on_line: Called with each line of its output.
            variables: Environment variables. PYTHONPATH comes before `search`.

        Returns:
            Whether it succeeded.
        """
        # Without the caller's Horovod settings: they could ask for GPU operations, or name a rank.
        caller = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
        environment = {"PIP_RETRIES": "2", "PIP_DISABLE_PIP_VERSION_CHECK": "1", **caller, **(variables or {})}
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, [(variables or {}).get("PYTHONPATH", ""), self.search])
        )
        folders = [path, str(self.python.parent), os.environ.get("PATH", os.defpath)]
        environment["PATH"] = os.pathsep.join(filter(None, folders))
        environment["PIP_USER"] = "0"
        with open(self.log, "ab", buffering=0) as log:
            log.write(("\n$ " + " ".join(command) + "\n").encode())
            process = subprocess.Popen(
                command,
                cwd=cwd or self.log.parent,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if on_line else log,
                stderr=subprocess.STDOUT,
            )
            try:
                for line in process.stdout or ():
                    log.write(line)
                    if on_line:
                        on_line(line.decode(errors="replace"))
                return process.wait() == 0
            except BaseException:  # such as Ctrl-C
                process.terminate()
                process.wait()
                raise

    def pip(self, *arguments: str, variables: Mapping[str, str] | None = None) -> None:
        """Runs pip, with these environment variables.

        Raises:
            SetupError: It failed; the message says why, and what to do.
        """
        start = self.log.stat().st_size if self.log.exists() else 0
        if self.run([str(self.python), "-m", "pip", *arguments], variables=variables):
            return
        output = self.log.read_bytes()[start:].decode(errors="replace")
        missing = re.search(r"No matching distribution found for (\S+)", output)
        if re.search(NO_NETWORK, output, re.IGNORECASE):
            what = "cannot reach its package index: check the network and pip's settings (proxy, index)"
        elif missing:
            what = f"finds no {missing.group(1)}: check the network and pip's settings (index, no-index)"
        elif "externally-managed-environment" in output:
            what = f"may not change the system's Python: make one of your own ({self.python} -m venv .venv)"
        elif "No module named pip" in output:
            what = f"is missing: {self.python} -m ensurepip"
        elif "No space left" in output:
            what = "ran out of disk space: the environment needs about 3 GB"
        elif "Permission denied" in output:
            what = f"may not write to the environment of {self.python}: make one of your own (python -m venv .venv)"
        else:
            what = f"{arguments[0]} failed"
        raise SetupError(f"pip {what}, then run this again; details in {self.log}")
