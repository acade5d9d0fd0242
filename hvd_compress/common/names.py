"""Names of variables and of collectives."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from typing import Any

# A part of a variable's path, or a word: its stem and its number, if it ends with one.
_NUMBERED = re.compile(r"([^\s/]+?)(?:_(\d+))?(?=[\s/]|$)")


def path_of(variable: Any) -> str:
    """A variable's path (Keras 3), or its name without TensorFlow's suffix `:0`."""
    return str(getattr(variable, "path", None) or getattr(variable, "name", None) or "").removesuffix(":0")


def checksum(spec: str) -> int:
    """A number that stands for a spec string in checkpoints; int64."""
    return zlib.crc32(spec.encode())


def without_counters(path: str) -> str:
    """The names of layer and variable in a path, without the counters that Keras and TensorFlow append.

    Earlier parts depend on how the model was made: `sequential/dense/kernel` is `dense/kernel` after the model was
    saved and loaded.
    """
    return "/".join(re.sub(r"_\d+$", "", name) for name in path.split("/")[-2:])


def renumbered(texts: Sequence[str]) -> list[str]:
    """The texts with new numbers in the names of variables: 0, 1, ... in the order of the old ones.

    Keras numbers the layers of one class from the first one that the process has made, and other processes may have
    made other models before. But the order of two layers is the same wherever the same model is made. A name without a
    number has number 0.
    """
    numbers: dict[str, set[int]] = {}
    for text in texts:
        for stem, number in _NUMBERED.findall(text):
            numbers.setdefault(stem, set()).add(int(number or 0))
    places = {stem: {number: place for place, number in enumerate(sorted(some))} for stem, some in numbers.items()}

    def numbered(match: re.Match[str]) -> str:
        stem, number = match.groups()
        return f"{stem}_{places[stem][int(number or 0)]}"

    return [_NUMBERED.sub(numbered, text) for text in texts]


def plain_name(name: str) -> str:
    """The name with an underscore for each character that is not an ASCII letter or digit."""
    return "".join(c if c.isascii() and c.isalnum() else "_" for c in name)
