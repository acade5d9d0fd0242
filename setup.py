"""Packaging of hvd_compress.

TensorFlow and Horovod are not requirements here: as with Horovod itself, the user chooses and builds
them for the machine at hand (scripts/setup_env.py does it for this clone), and the import checks them.
"""

import re
from pathlib import Path

from setuptools import Extension, find_packages, setup

HERE = Path(__file__).resolve().parent
README = HERE / "README.md"
VERSION_FILE = HERE / "hvd_compress" / "version.py"
VERSION = re.search(r'__version__ = "(.+?)"', VERSION_FILE.read_text(encoding="utf-8"))

EXAMPLES = ["scikit-learn", "matplotlib"]
TOPOLOGY = ["networkx"]
# The command hvd-compress. psutil: Horovod needs it, too.
# TensorFlow 2.21 does not bring tensorboard along, and Keras's callback of this name needs it.
TOOLS = ["click>=8.1", "rich", "matplotlib", "jinja2>=3", "optuna>=4", "psutil", "tensorboard"]
TEST = [*TOPOLOGY, *TOOLS, "pytest>=7", "pytest-timeout", "pytest-xdist", "hypothesis", "scikit-learn"]
BENCH = ["rich", "tqdm", "matplotlib", "scikit-learn", "psutil"]
# The pages of docs/ as a site: make docs.
DOCS = ["mkdocs-material>=9,<10", "mkdocstrings-python>=1.13"]
# The formatter changes from one minor release to the next.
DEV = [*TEST, *BENCH, "ruff==0.17.*", "mypy<3", "import-linter>=2.5"]

# Native operations, see hvd_compress/kernels/native.py. TensorFlow is not needed to build them. Without a C++ compiler,
# the package is installed without them, and XLA's kernels are used.
# Without contraction, all processors round alike.
FLOATS = ["-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
NATIVE = Extension(
    "hvd_compress.kernels._native",
    sources=["native/ops.cc"],
    depends=[str(header.relative_to(HERE)) for header in sorted((HERE / "native").glob("*.h"))],
    extra_compile_args=["-std=c++17", "-O3", "-fvisibility=hidden", *FLOATS],
    extra_link_args=["-pthread"],
    language="c++",
    optional=True,
)

setup(
    name="hvd_compress",
    version=VERSION.group(1),
    description="Gradient compression for Horovod with TensorFlow and Keras",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    ext_modules=[NATIVE],
    packages=find_packages(include=["hvd_compress*"]),
    package_data={"hvd_compress.tools": ["templates/*.html", "data/*.npz"]},
    python_requires=">=3.9",
    entry_points={"console_scripts": ["hvd-compress=hvd_compress.tools.cli:main"]},
    install_requires=["numpy", "packaging"],
    extras_require={
        "examples": EXAMPLES,
        "test": TEST,
        "tools": TOOLS,
        "topology": TOPOLOGY,
        "bench": BENCH,
        "docs": DOCS,
        "dev": DEV,
    },
)
