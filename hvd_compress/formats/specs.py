"""The grammar of spec strings: `name` or `name:argument=value,argument=value`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..common.error_text import error_text

# A comma outside of parentheses.
_COMMA = re.compile(r",(?![^(]*\))")


def format_spec(name: str, arguments: Mapping[str, Any]) -> str:
    """The spec string of a compressor with these arguments."""
    text = ",".join(f"{key}={_to_text(value)}" for key, value in arguments.items())
    return f"{name}:{text}" if text else name


def parse_arguments(spec: str, known: Sequence[str]) -> dict[str, Any]:
    """The arguments in a spec string of a compressor that takes the `known` ones.

    Raises:
        ValueError: An argument is not known, has no value or stands twice.
    """
    name, _, text = spec.strip().partition(":")
    arguments: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in _COMMA.split(text))):
        key, equals, value = (part.strip() for part in item.partition("="))
        if key not in known:
            raise ValueError(
                f"compressor {name.strip()!r} has no argument {error_text(key)} (in {error_text(spec)}): "
                f"it takes {', '.join(known) or 'no arguments'}"
            )
        if not equals:
            raise ValueError(f"argument {key!r} in {error_text(spec)} has no value: write {key}=...")
        if key in arguments:
            raise ValueError(f"argument {key!r} stands twice in {error_text(spec)}")
        arguments[key] = _from_text(value)
    return arguments


def _from_text(text: str) -> Any:
    """A value: none, true, false, an integer, a float, a (list|of|texts), else the text itself."""
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


def _to_text(value: Any) -> str:
    """The inverse of `_from_text`; pairs in a list become `first:second`."""
    if isinstance(value, tuple):
        items = (":".join(map(_to_text, item)) if isinstance(item, tuple) else _to_text(item) for item in value)
        return f"({'|'.join(items)})"
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
