#!/usr/bin/env python3
"""Builds the packages into dist/, and tries the wheel as a new user does: in an empty environment, outside the clone.

    make release-check

Without --tf it stops before TensorFlow, and takes a minute. With --tf 2.21.0 it goes on to install TensorFlow and
Horovod, and trains the documentation's first example on two ranks. Uses the standard library only.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
IMPORTS = """
import importlib.resources, sys
import hvd_compress as hvdc
assert "site-packages" in hvdc.__file__, hvdc.__file__
files = importlib.resources.files(hvdc)
for file in ("py.typed", "tools/templates/report.html", "tools/data/gradients.npz"):
    assert (files / file).is_file(), file
built = [file.name for file in (files / "kernels").iterdir() if file.name.startswith("_native")]
assert built, "the native kernels are not built: is g++ there?"
print("hvd_compress", hvdc.__version__, hvdc.CostModel(hvdc.Link(1e-4, 1e-9), 4).predict("int8", 10**6).wire)
assert "tensorflow" not in sys.modules
"""


def run(*command: str, cwd: Path) -> None:
    """Runs a command, and says so; raises CalledProcessError if it fails."""
    print("$", *command, flush=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["PATH"] = os.pathsep.join([str(Path(command[0]).parent), environment.get("PATH", "")])
    subprocess.run(command, cwd=cwd, env=environment, check=True, timeout=1800)


def first_example() -> str:
    """The first Python block of docs/index.md."""
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    found = re.search(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert found, "docs/index.md has no Python block"
    return found.group(1)


def main() -> None:
    """Builds, checks, installs, tries."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tf", default="", help="also install this TensorFlow and Horovod, and train")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hvd_compress-") as folder:
        work, dist = Path(folder), ROOT / "dist"
        python = str(work / "env" / "bin" / "python")
        command = str(work / "env" / "bin" / "hvd-compress")
        run(sys.executable, "-m", "venv", str(work / "tools"), cwd=work)
        run(sys.executable, "-m", "venv", str(work / "env"), cwd=work)
        tools = str(work / "tools" / "bin" / "python")
        run(tools, "-m", "pip", "install", "-q", "build", "twine", cwd=work)
        shutil.rmtree(dist, ignore_errors=True)
        run(tools, "-m", "build", "--outdir", str(dist), str(ROOT), cwd=work)  # the wheel from the source package
        packages = sorted(map(str, dist.iterdir()))
        run(tools, "-m", "twine", "check", "--strict", *packages, cwd=work)
        wheel = next(package for package in packages if package.endswith(".whl"))
        run(python, "-m", "pip", "install", "-q", wheel, cwd=work)
        run(python, "-c", IMPORTS, cwd=work)
        run(command, "horovod", "--help", cwd=work)
        run(python, "-m", "pip", "install", "-q", f"{wheel}[tools]", cwd=work)
        run(command, "plan", "--params", "25M", "--ranks", "4", "--bandwidth", "1gbit", cwd=work)
        if args.tf:
            run(python, "-m", "pip", "install", "-q", f"tensorflow-cpu=={args.tf}", cwd=work)
            run(command, "horovod", "install", cwd=work)
            run(command, "horovod", "check", cwd=work)
            (work / "train.py").write_text(first_example(), encoding="utf-8")
            run(str(Path(python).with_name("horovodrun")), "-np", "2", python, "train.py", cwd=work)
    print("The packages in dist/ are good:", *map(os.path.basename, packages))


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(f"release_check: {' '.join(error.cmd[:4])} ... failed")
