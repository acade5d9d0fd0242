"""What is shown while a compiler is busy: the time, and how far it has come."""

from __future__ import annotations

import re
import sys
import threading
import time
from types import TracebackType
from typing import TextIO

# Of CMake's Makefiles, "[ 12%] Building CXX object ..."; of Ninja, "[12/120] Building CXX object ...".
_STEP = re.compile(r"^\s*\[\s*(?:(\d+)%|(\d+)/(\d+))\]")
_ON_TERMINAL, _IN_FILE = 1.0, 15.0  # seconds between two updates


def compiled(line: str) -> int | None:
    """How many percent of the steps a line of a build's output says are done; None if it does not say."""
    found = _STEP.match(line)
    if found is None:
        return None
    percent, done, total = found.groups()
    return int(percent) if percent else 100 * int(done) // max(int(total), 1)


class Progress:
    """Shows elapsed time and percent while its block runs: on a terminal in one line, else in a line every 15 s.

    Args:
        what: What is being done.
        out: Where it is shown; by default standard output.
    """

    def __init__(self, what: str, out: TextIO | None = None) -> None:
        self._what = what
        self._out = out or sys.stdout
        self._terminal = self._out.isatty()
        self._percent: int | None = None
        self._start = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._repeat, daemon=True)

    def line(self, text: str) -> None:
        """Takes a line of the build's output."""
        percent = compiled(text)
        if percent is not None:
            self._percent = percent

    def text(self) -> str:
        """What is shown now."""
        minutes, seconds = divmod(int(time.monotonic() - self._start), 60)
        done = "" if self._percent is None else f", {self._percent}% of the files"
        return f"{self._what}: {minutes}:{seconds:02d} min{done}"

    def _repeat(self) -> None:
        while not self._ended.wait(_ON_TERMINAL if self._terminal else _IN_FILE):
            self._show()

    def _show(self) -> None:
        begin, end = ("\r\x1b[K  ", "") if self._terminal else ("  ", "\n")
        self._out.write(begin + self.text() + end)
        self._out.flush()

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        if self._terminal:
            self._out.write("\r\x1b[K")
        if kind is None:
            self._out.write(f"  {self.text()}\n")
        self._out.flush()
