"""The readme, the license and the native operations of the package. Everything else is in pyproject.toml."""

import re
from pathlib import Path

from setuptools import Extension, setup

README = Path(__file__).resolve().parent / "README.md"

# Native operations, see hvd_compress/kernels/native.py. TensorFlow is not needed to build them. Without a C++ compiler,
# the package is installed without them, and XLA's kernels are used.
NATIVE = Extension(
    "hvd_compress.kernels._native",
    sources=["native/ops.cc"],
    depends=[f"native/{header.name}" for header in sorted((README.parent / "native").glob("*.h"))],
    extra_compile_args=[
        "-std=c++17",
        "-O3",
        "-fvisibility=hidden",
        # Without contraction, all processors round alike.
        "-ffp-contract=off",
        "-fno-math-errno",
        "-fno-trapping-math",
        "-Wno-psabi",  # vectors never leave a function
    ],
    extra_link_args=["-pthread"],
    language="c++",
    optional=True,
)


def readme() -> str:
    """The README without links to files and images of the clone, which a package index does not have."""
    text = README.read_text(encoding="utf-8")
    text = re.sub(r"!\[[^]]*\]\((?!http)[^)]*\)\n\n?", "", text)
    return re.sub(r"\[([^]]*)\]\((?!http)[^)]*\)", r"\1", text)


# The license: setuptools before 77 and since then want it in different forms in pyproject.toml.
setup(
    long_description=readme(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    ext_modules=[NATIVE],
)
