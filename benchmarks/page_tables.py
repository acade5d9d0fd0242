"""Markdown tables, and the pages that contain them.

In a page, a table is between `<!-- table: NAME -->` and `<!-- end of table -->`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

_END = "<!-- end of table -->"


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> str:
    """A Markdown table. The first columns contain words, the others numbers."""
    rules = ["---" if i < words else "---:" for i in range(len(columns))]
    lines = [" | ".join(cells) for cells in (columns, *rows)]
    return "\n".join([f"| {lines[0]} |", f"|{'|'.join(rules)}|", *(f"| {line} |" for line in lines[1:])])


def show(tables: Mapping[str, str], page: Path | None) -> None:
    """Prints named tables, and writes them into the places of a page that have these names."""
    for name, text in tables.items():
        print(f"\n### {name}\n\n{text}")
    if page is None:
        return
    page_text = page.read_text(encoding="utf-8")
    for name, text in tables.items():
        place = re.compile(rf"(<!-- table: {re.escape(name)} -->\n).*?({_END})", re.DOTALL)
        page_text, count = place.subn(lambda match, new=text: f"{match[1]}\n{new}\n\n{match[2]}", page_text)
        if count != 1:
            sys.exit(f"{page} has {count} places for the table {name!r}: write <!-- table: {name} -->, then {_END}")
    page.write_text(page_text, encoding="utf-8")
