"""Names of variables and of collectives."""

from __future__ import annotations

import re
from typing import Any


def path_of(variable: Any) -> str:
    """A variable's path (Keras 3), or its name without TensorFlow's suffix `:0`."""
    return str(getattr(variable, "path", None) or getattr(variable, "name", None) or "").removesuffix(":0")


def without_counters(path: str) -> str:
    """The names of layer and variable in a path, without the counters that Keras and TensorFlow append.

    Earlier parts depend on how the model was made: `sequential/dense/kernel` is `dense/kernel` after the model was
    saved and loaded.
    """
    return "/".join(re.sub(r"_\d+$", "", name) for name in path.split("/")[-2:])


def plain_name(name: str) -> str:
    """The name with an underscore for each character that is not an ASCII letter or digit."""
    return "".join(c if c.isascii() and c.isalnum() else "_" for c in name)
