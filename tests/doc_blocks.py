"""Runs the Python blocks of pages (or cells of notebooks), each page's in order, in a namespace and folder of its own.

    python tests/doc_blocks.py FOLDER docs/auto.md README.md

A page whose code needs several ranks says so in a comment, `<!-- needs: horovodrun -->`.
"""

from __future__ import annotations

import json
import linecache
import os
import re
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
_PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[tuple[int, str]]:
    """The page's Python blocks, each with the number of its first line."""
    text = source(page)
    return [(text.count("\n", 0, found.start(1)) + 1, found.group(1)) for found in _PYTHON.finditer(text)]


def source(page: Path) -> str:
    """The page's text; of a notebook, its code cells as blocks of a page."""
    text = page.read_text(encoding="utf-8")
    if page.suffix != ".ipynb":
        return text
    cells = ["".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    return "\n".join(f"```python\n{cell}\n```" for cell in cells)


def needs_ranks(page: Path) -> bool:
    """Whether the page's blocks are to run under horovodrun."""
    return "<!-- needs: horovodrun -->" in page.read_text(encoding="utf-8")


def name(page: Path) -> str:
    """The page's path in the repository."""
    return page.relative_to(ROOT).as_posix()


def main(folder: str, *pages: str) -> None:
    """Runs the pages' blocks and prints how many each has."""
    for page in pages:
        start = time.monotonic()
        place = Path(folder) / Path(page).stem
        place.mkdir(exist_ok=True)
        os.chdir(place)
        lines = source(ROOT / page).splitlines(keepends=True)
        linecache.cache[page] = (0, None, lines, page)  # AutoGraph and tracebacks look for the source
        namespace = {"__name__": "page"}
        found = blocks(ROOT / page)
        for line, code in found:
            # After so many blank lines the code's lines have the page's numbers.
            exec(compile("\n" * (line - 1) + code, page, "exec"), namespace)
        if "keras" in sys.modules:  # a page may have set another
            sys.modules["keras"].mixed_precision.set_global_policy("float32")
        print(f"ran {len(found)} blocks of {page} in {time.monotonic() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
