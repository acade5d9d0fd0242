"""Runs the Python blocks of pages, each page's in order, in a namespace and a folder of its own.

    python tests/doc_blocks.py FOLDER docs/auto.md README.md

A page whose code needs several ranks says so in a comment, `<!-- needs: horovodrun -->`.
"""

from __future__ import annotations

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
    text = page.read_text(encoding="utf-8")
    return [(text.count("\n", 0, found.start(1)) + 1, found.group(1)) for found in _PYTHON.finditer(text)]


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
        lines = (ROOT / page).read_text(encoding="utf-8").splitlines(keepends=True)
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
