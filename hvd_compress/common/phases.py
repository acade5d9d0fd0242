"""Says what takes long before the first step is done: calibrating, tracing, compiling."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from .verbosity import say, shows

# Seconds after which a phase is mentioned, again and again. One that ends before is not mentioned.
EVERY = 10.0


class Phase:
    """What this process is doing, for users who wait for it.

    A phase is begun and ended by `with`. Or it is begun by `begin`, and ends when `is_over` says so, which a thread
    asks every ten seconds.

    Args:
        what: What is being done; a function if that changes.
        usual: How long it usually takes, such as "usually less than a second"; "" if that is not known.
        show: Whether this process prints; one rank is enough.
        is_over: Whether the phase has ended.
    """

    def __init__(
        self,
        what: str | Callable[[], str],
        usual: str = "",
        show: bool = True,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        self._what = what if callable(what) else lambda: what
        self._usual = f", {usual}" if usual else ""
        self._show = show and shows("info")
        self._is_over = is_over
        self._end = threading.Event()
        self._start = 0.0
        self._has_spoken = False

    def begin(self) -> None:
        """Begins the phase."""
        self._start = time.monotonic()
        if self._show:
            say(f"{self._what()}{self._usual}", "debug")
            threading.Thread(target=self._beat, name="hvd_compress phase", daemon=True).start()

    def _beat(self) -> None:
        while not self._end.wait(EVERY) and not self._is_over():
            self._has_spoken = True
            say(f"{self._what()}: {time.monotonic() - self._start:.0f} s so far{self._usual}")

    def __enter__(self) -> Phase:
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        if self._show:
            level = "info" if self._has_spoken else "debug"
            say(f"{self._what()}: done after {time.monotonic() - self._start:.1f} s", level)
