"""The grammar of spec strings: `name` or `name:argument=value,argument=value`.

A value is a word, a number or a list, `(item|item)`. Items of a list are text, which may be a spec string: separators
within parentheses belong to the inner text. Before a list, the name of the first argument may be left out:
`name:(item|item),argument=value`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..common.error_text import error_text

_LONGEST = 10_000  # characters


def format_spec(name: str, arguments: Mapping[str, Any]) -> str:
    """The spec string of a compressor with these arguments."""
    text = ",".join(f"{key}={_to_text(value)}" for key, value in arguments.items())
    return f"{name}:{text}" if text else name


def parse_arguments(spec: str, known: Sequence[str], kind: str = "compressor") -> dict[str, Any]:
    """The arguments in a spec string of a compressor, or of another `kind`, that takes the `known` ones.

    Raises:
        ValueError: An argument is not known, has no value or stands twice, or parentheses do not match.
    """
    name, _, text = spec.strip().partition(":")
    if len(spec) > _LONGEST:
        raise ValueError(f"{error_text(spec)} is too long: a spec string has at most {_LONGEST:,} characters")
    if not _matches(text):
        raise ValueError(f"the parentheses in {error_text(spec)} do not match")
    arguments: dict[str, Any] = {}
    for item in filter(None, _split(text, ",")):
        if item.startswith("(") and known and not arguments:
            item = f"{known[0]}={item}"
        key, equals, value = (part.strip() for part in item.partition("="))
        if key not in known:
            raise ValueError(
                f"{kind} {name.strip()!r} has no argument {error_text(key)} (in {error_text(spec)}): "
                f"it takes {', '.join(known) or 'no arguments'}"
            )
        if not equals:
            raise ValueError(f"argument {key!r} in {error_text(spec)} has no value: write {key}=...")
        if key in arguments:
            raise ValueError(f"argument {key!r} stands twice in {error_text(spec)}")
        arguments[key] = _from_text(value)
    return arguments


def _split(text: str, separator: str) -> list[str]:
    """The parts of `text` between separators outside of parentheses, which must match."""
    parts, depth = [""], 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if character == separator and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def _matches(text: str) -> bool:
    """Whether each parenthesis in `text` has its counterpart."""
    depth = 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if depth < 0:
            return False
    return depth == 0


def _from_text(text: str) -> Any:
    """A value: none, true, false, an integer, a float, a (list|of|texts), else the text itself."""
    if text.startswith("(") and text.endswith(")") and _matches(text[1:-1]):
        return tuple(filter(None, _split(text[1:-1], "|")))
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
