"""Spec strings: one line that names a compressor and its arguments."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping
from typing import Any

from ..common.error_text import error_text
from . import cast as casts
from . import dgc, sparse
from . import power_sgd as low_rank
from . import quantize as quantized
from .base import Format

# What `auto` chooses from, unless it is told otherwise.
CANDIDATES = ("none", "int8", "int4", "quantize:bits=2")
# The share of a bucket's energy that it wants through, and what that may cost: see `compressors.auto`.
TARGET = 0.01
MAX_SLOWDOWN = 0.02
# Shorter names of some.
PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "int8": ("quantize", {"bits": 8}),
    "int4": ("quantize", {"bits": 4}),
}

_FORMATS: dict[str, type] = {
    cls.name: cls
    for cls in (
        casts.NoCompression, casts.Float16, casts.BFloat16, quantized.Quantize, quantized.OneBit, sparse.TopK,
        sparse.RandomK, sparse.BlockTopK, sparse.BlockSparse, sparse.Hybrid, dgc.DGC, low_rank.PowerSGD,
    )
}  # fmt: skip
# A comma that is not inside of parentheses.
_COMMA = re.compile(r",(?![^(]*\))")
_LONGEST_NAME = 50  # of what is compared with known names


def parse(spec: str) -> Format:
    """The format that a spec string names.

    Raises:
        ValueError: The name, an argument or a value is not known or not valid.
    """
    cls, arguments = split(spec, _FORMATS)
    found: Format = cls(**arguments)
    return found


def split(spec: str, classes: Mapping[str, type]) -> tuple[type, dict[str, Any]]:
    """The class that a spec string names, and the arguments to make one.

    Args:
        spec: A name, then optionally a colon and arguments as `key=value`, separated by commas.
        classes: Dataclasses by their names.

    Raises:
        ValueError: The name or an argument is not known, or one is missing.
    """
    name, _, rest = spec.strip().partition(":")
    name = name.strip()
    if name in PRESETS:
        if rest.strip():
            raise ValueError(f"compressor {name!r} takes no arguments, got {error_text(rest.strip())}")
        long, arguments = PRESETS[name]
        return classes[long], dict(arguments)
    if name not in classes:
        known = sorted([*classes, *PRESETS])
        word = re.split(r"[^a-z0-9_]", name[:_LONGEST_NAME].lower())[0]  # "topk(0.01)" is near to "topk", too
        near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"unknown compressor {error_text(name)}: {hint}Known are {', '.join(known)}")
    fields = {field.name: field for field in dataclasses.fields(classes[name])}
    arguments = {}
    for item in filter(None, (part.strip() for part in _COMMA.split(rest))):
        key, equals, value = (part.strip() for part in item.partition("="))
        if key not in fields:
            takes = ", ".join(fields) or "no arguments"
            raise ValueError(
                f"compressor {name!r} has no argument {error_text(key)} (in {error_text(spec)}): it takes {takes}"
            )
        if not equals:
            raise ValueError(f"argument {key!r} in {error_text(spec)} has no value: write {key}=...")
        if key in arguments:
            raise ValueError(f"argument {key!r} stands twice in {error_text(spec)}")
        arguments[key] = _value(value)
    missing = [
        key for key, field in fields.items() if field.default is dataclasses.MISSING and key not in arguments
    ]
    if missing:
        example = ",".join(f"{key}={'0.01' if key == 'ratio' else '4'}" for key in missing)
        raise ValueError(f"compressor {name!r} needs {', '.join(missing)}: for example '{name}:{example}'")
    return classes[name], arguments


def spec_of(compressor: Any) -> str:
    """The spec string of a built-in compressor: its name and the arguments that are not defaults."""
    values = {field.name: getattr(compressor, field.name) for field in dataclasses.fields(compressor)}
    given = {
        field.name: values[field.name]
        for field in dataclasses.fields(compressor)
        if values[field.name] != compressor.default_of(field)
    }
    for name, preset in PRESETS.items():
        if (compressor.name, given) == preset:
            return name
    arguments = [f"{key}={_show(value)}" for key, value in given.items()]
    return compressor.name + (":" + ",".join(arguments) if arguments else "")


def _value(text: str) -> Any:
    """An argument's value: none, true, false, a whole number, a number, (several|values), else the text itself."""
    if text.startswith("(") and text.endswith(")"):
        return tuple(part.strip() for part in text[1:-1].split("|") if part.strip())
    words = {"none": None, "true": True, "false": False}
    if text.lower() in words:
        return words[text.lower()]
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            pass
    return text


def _show(value: Any) -> str:
    if isinstance(value, tuple):
        parts = (":".join(map(_show, part)) if isinstance(part, tuple) else _show(part) for part in value)
        return f"({'|'.join(parts)})"
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
