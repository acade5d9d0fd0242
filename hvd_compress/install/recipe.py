"""How Horovod is built: versions, features, and the changes to its source."""

from __future__ import annotations

import dataclasses
from pathlib import Path

HOROVOD = "0.28.1"
RECIPE = 2  # raise it when the way the wheel is built changes: cached ones are then left alone

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


@dataclasses.dataclass(frozen=True)
class Features:
    """What Horovod is built with, besides TensorFlow and Gloo."""

    mpi: bool = False
    nccl: bool = False
    pytorch: bool = False
    nccl_home: str = ""  # the folder with NCCL's include/ and lib/; empty: where CMake looks by itself
    cuda_home: str = ""  # the folder with CUDA's bin/nvcc; empty: where CMake looks by itself

    def variables(self) -> dict[str, str]:
        """The environment variables that Horovod's build reads."""
        variables = {
            "HOROVOD_WITH_TENSORFLOW": "1",
            "HOROVOD_WITHOUT_MXNET": "1",
            "HOROVOD_WITH_GLOO": "1",
            "HOROVOD_WITH_PYTORCH" if self.pytorch else "HOROVOD_WITHOUT_PYTORCH": "1",
            "HOROVOD_WITH_MPI" if self.mpi else "HOROVOD_WITHOUT_MPI": "1",
        }
        if self.nccl:
            # The shared library: TensorFlow brings the same one.
            variables.update(HOROVOD_GPU_OPERATIONS="NCCL", HOROVOD_NCCL_LINK="SHARED")
        if self.nccl and self.nccl_home:
            variables["HOROVOD_NCCL_HOME"] = self.nccl_home
        if self.nccl and self.cuda_home:
            variables["HOROVOD_CUDA_HOME"] = self.cuda_home
        return variables

    def needs(self) -> list[str]:
        """The packages that Horovod imports, besides TensorFlow and PyTorch."""
        return [*HOROVOD_NEEDS, *(["cffi"] if self.pytorch else [])]

    def check(self) -> str:
        """Python code that fails unless Horovod starts and has these features."""
        code = "import horovod.tensorflow as hvd; hvd.init(); assert hvd.gloo_built() and hvd.size() == 1"
        code += "; assert hvd.mpi_built()" if self.mpi else ""
        code += "; assert hvd.nccl_built()" if self.nccl else ""
        return code + ("; import horovod.torch" if self.pytorch else "")


PLAIN = Features()  # TensorFlow and Gloo


# A call of Horovod's background thread that connects the ranks; what fails in it makes `init` fail.
_FAILS = """\
    try {{
      {call};
    }} catch (const std::exception& error) {{
      LOG(ERROR) << "Horovod could not be initialized: " << error.what();
      global_gloo_context.Finalize();
      state.initialization_failed = true;
      return;
    }}
"""


def patch(source: Path, tensorflow: str) -> None:
    """Changes Horovod's unpacked source for today's TensorFlow, PyTorch and compilers, and mends two defects.

    Args:
        source: Its folder.
        tensorflow: The version of TensorFlow, such as "2.21.0".
    """
    if not tensorflow.startswith("2.15."):
        # Holds only the optional ops inside XLA, and needs headers that TensorFlow 2.16 moved.
        (source / "horovod" / "tensorflow" / "xla_mpi_ops.cc").write_text("", encoding="utf-8")
    # Its files use these headers without including them. g++ 12 and earlier include them along with others.
    _replace(
        source / "CMakeLists.txt",
        " -pthread -fPIC ",
        " -include cstdint -include stdexcept -include string -pthread -fPIC ",
    )
    # Its `operator=` assigns this member, which g++ 14 no longer compiles.
    span = source / "third_party" / "flatbuffers" / "include" / "flatbuffers" / "stl_emulation.h"
    _replace(span, "  const size_type count_;", "  size_type count_;")
    # A rank that is lost while the others connect would end all of them with an exception that nobody catches. Elastic
    # jobs try again (`exchange.connections`).
    operations = source / "horovod" / "common" / "operations.cc"
    for call in (
        "global_gloo_context.Initialize(ParseGlooIface())",
        "state.process_set_table.Initialize(global_gloo_context)",
    ):
        _replace(operations, f"    {call};\n", _FAILS.format(call=call))
    _replace(
        operations,
        "horovod_global.initialization_done = false;\n    horovod_global.background_thread =",
        "horovod_global.initialization_done = false;\n    horovod_global.initialization_failed = false;\n"
        "    horovod_global.background_thread =",
    )
    # A rank waits for the connection of another one, which may wait for the address of a third one. Gloo waits for five
    # times its time-out; that is two of them.
    pair = source / "third_party" / "gloo" / "gloo" / "transport" / "tcp" / "pair.h"
    _replace(pair, "timeout_ * 5,", "timeout_ * 2,")
    # The headers of PyTorch 2.1 and later are C++17. (The part for TensorFlow takes TensorFlow's own flags.)
    _replace(
        source / "horovod" / "torch" / "CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 17)"
    )


def _replace(file: Path, old: str, new: str) -> None:
    file.write_text(file.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
