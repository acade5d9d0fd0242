"""The readme and the license of the package. Everything else is in pyproject.toml."""

import re
from pathlib import Path

from setuptools import setup

README = Path(__file__).resolve().parent / "README.md"


def readme() -> str:
    """The README without links to files and images of the clone, which a package index does not have."""
    text = README.read_text(encoding="utf-8")
    text = re.sub(r"!\[[^]]*\]\((?!http)[^)]*\)\n\n?", "", text)
    return re.sub(r"\[([^]]*)\]\((?!http)[^)]*\)", r"\1", text)


# The license: setuptools before 77 and since then want it in different forms in pyproject.toml.
setup(long_description=readme(), long_description_content_type="text/markdown", license="Apache-2.0")
