"""The native operations, built with the sanitizers of the compiler: no access out of bounds, no undefined behaviour."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLAGS = "-fsanitize=address,undefined"
# The process must be that of the library in this folder.
RUN = """
import sys
from pathlib import Path
import pytest
from hvd_compress.kernels import native
assert Path(native.__file__).is_relative_to(Path.cwd()) and native.library() is not None
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "tests/unit/test_native.py", "-k", "not xla_agree"]))
"""


def compiler():
    return os.environ.get("CC") or shutil.which("gcc")


@pytest.mark.slow
@pytest.mark.skipif(compiler() is None, reason="there is no gcc")
@pytest.mark.timeout(900)
def test_sanitizers_find_nothing(tmp_path):
    shutil.copytree(ROOT / "hvd_compress", tmp_path / "hvd_compress", ignore=shutil.ignore_patterns("*.so"))
    for name in ("native", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    build = {**os.environ, "CFLAGS": f"{FLAGS} -fno-sanitize-recover=all -g1", "LDFLAGS": FLAGS}
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    subprocess.run(command, cwd=tmp_path, env=build, check=True, capture_output=True, timeout=400)
    (library,) = (tmp_path / "hvd_compress" / "kernels").glob("_native*.so")
    assert b"__asan_report" in library.read_bytes() and b"__ubsan_handle" in library.read_bytes()

    runtimes = [
        subprocess.run([compiler(), f"-print-file-name=lib{name}.so"], capture_output=True, text=True).stdout.strip()
        for name in ("asan", "ubsan")
    ]
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(runtimes),
        "ASAN_OPTIONS": "detect_leaks=0",  # those of TensorFlow and Python
        "PYTHONPATH": str(tmp_path),
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    result = subprocess.run(
        [sys.executable, "-c", RUN], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=480
    )
    assert result.returncode == 0, (result.stdout + result.stderr)[-3000:]
