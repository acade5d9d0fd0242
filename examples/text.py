"""The text that examples train on, as bytes.

By default it is the source of Python's standard library, which every machine has: several MB that need no download.
"""

from __future__ import annotations

import platform
import random
import sysconfig
from pathlib import Path
from typing import NamedTuple

import numpy as np

MAX_BYTES = 8_000_000  # of the standard library
MIN_BYTES = 100_000
VALIDATION_SHARE, MIN_VALIDATION_BYTES = 0.05, 20_000
NOT_TRAINED_ON = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


class Text(NamedTuple):
    """Text for training and the text that follows it, for validation; uint8 [bytes]."""

    name: str
    train: np.ndarray
    validation: np.ndarray


def load(path: Path | None = None) -> Text:
    """Loads a text, the same on all workers. The last 5% of it are for validation.

    Args:
        path: A file. None takes the source of Python's standard library, which is the same for one version of Python.

    Raises:
        SystemExit: The file cannot be read, or there are fewer than 100,000 bytes.
    """
    if path is None:
        name, content = f"source of Python {platform.python_version()}", _standard_library()
    else:
        try:
            name, content = str(path), path.read_bytes()
        except OSError as error:
            raise SystemExit(f"cannot read the text {path}: {error.strerror}") from None
    if len(content) < MIN_BYTES:
        raise SystemExit(f"{name} is too short to train on: {len(content):,} bytes, at least {MIN_BYTES:,} are needed")
    values = np.frombuffer(content, np.uint8)
    split = len(values) - max(MIN_VALIDATION_BYTES, int(VALIDATION_SHARE * len(values)))
    return Text(name, values[:split], values[split:])


def _standard_library() -> bytes:
    """Files of the standard library in a random order, always the same: each part of the text has all kinds of them."""
    root = Path(sysconfig.get_path("stdlib"))
    names = sorted(file.relative_to(root) for file in root.rglob("*.py"))
    names = [name for name in names if NOT_TRAINED_ON.isdisjoint(name.parts)]
    random.Random(0).shuffle(names)
    return b"".join((root / name).read_bytes() for name in names)[:MAX_BYTES]
