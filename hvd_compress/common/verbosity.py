"""What is printed while training: the lines `hvd_compress: ...` on standard error, and `hvdc.set_verbosity`."""

from __future__ import annotations

import os
import sys
from typing import Any

from .error_text import error_text

# Names and numbers as in `logging`.
LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
VARIABLE = "HVD_COMPRESS_VERBOSITY"


def _checked(name: str, level: Any) -> int:
    if isinstance(level, str) and level.strip().lower() in LEVELS:
        return LEVELS[level.strip().lower()]
    if isinstance(level, int) and not isinstance(level, bool) and level in LEVELS.values():
        return level
    raise ValueError(f"{name} must be one of {', '.join(LEVELS)}, got {error_text(level)}")


def _level_at_start() -> int:
    """The level of the environment; "info" if that is wrong: no import fails for it."""
    try:
        return _checked(f"environment variable {VARIABLE}", os.environ.get(VARIABLE, "").strip() or "info")
    except ValueError as error:
        if os.environ.get("HOROVOD_RANK", "0") == "0":
            print(f"hvd_compress: {error}; the level is info", file=sys.stderr, flush=True)
        return LEVELS["info"]


_level = _level_at_start()


def set_verbosity(level: str | int) -> None:
    """Sets which lines this process prints while training. All of them go to standard error, most on rank 0 only.

    The environment variable `HVD_COMPRESS_VERBOSITY` sets the level without a change of the script. The lines about
    switches of `auto` are a part of the training step: set the level before the first step.

    Args:
        level: The least level that is printed, by its name or by its number in `logging`. "debug": also each phase of
            the first step, with its time. "info" (default): phases that take longer than ten seconds, the choices of
            `auto`, and the summary at the end of the run. "warning": what went wrong. "error": only what may end the
            training, such as ranks that wait for each other.

    Raises:
        ValueError: There is no such level.
    """
    global _level
    _level = _checked("level", level)


def shows(level: str) -> bool:
    """Whether lines of this level are printed."""
    return LEVELS[level] >= _level


def say(text: str, level: str = "info") -> None:
    """Prints a line, if lines of this level are printed."""
    if shows(level):
        print(f"hvd_compress: {text}", file=sys.stderr, flush=True)
