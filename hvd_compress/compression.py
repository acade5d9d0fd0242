"""The `Compression` namespace and the spec strings."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import os
import re
from collections.abc import Mapping
from typing import Any, Union

import horovod.tensorflow as hvd

from .checks import shown
from .compressors import (
    Auto,
    BFloat16,
    BlockSparse,
    BlockTopK,
    Compressor,
    Float16,
    Hybrid,
    NoCompression,
    OneBit,
    Quantize,
    RandomK,
    TopK,
)

CompressionLike = Union[Compressor, str, type, None]

_CLASSES: dict[str, type] = {
    cls.name: cls
    for cls in (
        NoCompression, Float16, BFloat16, Quantize, OneBit, TopK, RandomK, BlockTopK, BlockSparse, Hybrid, Auto,
    )
}  # fmt: skip
# A comma that is not inside of parentheses.
_COMMA = re.compile(r",(?![^(]*\))")
_LONGEST_NAME = 50  # of what is compared with known names
_PRESETS: dict[str, Compressor] = {"int8": Quantize(8), "int4": Quantize(4)}


class Compression:
    """The compressors, as Horovod's `Compression`: `hvdc.Compression.int8`, `hvdc.Compression.topk(0.01)`.

    Each has a spec string (`str(compressor)`) from which `parse` makes it again.
    """

    none = NoCompression()
    fp16 = Float16()
    bf16 = BFloat16()
    int8 = _PRESETS["int8"]
    int4 = _PRESETS["int4"]
    onebit = OneBit()
    quantize = Quantize
    topk = TopK
    randomk = RandomK
    block_topk = BlockTopK
    block_sparse = BlockSparse
    hybrid = Hybrid
    auto = Auto

    @staticmethod
    def parse(spec: str) -> Compressor:
        """Makes a compressor from its spec string, such as `"topk:ratio=0.01"`.

        Args:
            spec: A name, then optionally a colon and arguments as `key=value`, separated by commas.

        Raises:
            TypeError: `spec` is no string.
            ValueError: The name, an argument or a value is not known or not valid.
        """
        if not isinstance(spec, str):
            raise TypeError(f"a spec must be a string such as 'topk:ratio=0.01', got {shown(spec)}")
        return _parse(spec)


def spec_of(compressor: Any) -> str:
    """The spec string of a built-in compressor: its name and the arguments that are not defaults."""
    for name, preset in _PRESETS.items():
        if compressor == preset:
            return name
    arguments = [
        f"{field.name}={_show(getattr(compressor, field.name))}"
        for field in dataclasses.fields(compressor)
        if getattr(compressor, field.name) != _default(compressor, field)
    ]
    return compressor.name + (":" + ",".join(arguments) if arguments else "")


def _default(compressor: Any, field: Any) -> Any:
    """The default as the compressor keeps it: candidates are named by strings and kept as compressors."""
    if isinstance(compressor, Auto) and field.name == "candidates":
        return tuple(map(_parse, field.default))
    return field.default


def resolve(compression: CompressionLike) -> Compressor:
    """The compressor that a user means by `compression`.

    Args:
        compression: A compressor; a subclass of `Compressor` or one of Horovod's own (`hvd.Compression.fp16`);
            a spec string; or None for what the environment variable `HVD_COMPRESS` says, else no compression.

    Raises:
        ValueError: A spec string, or the environment variable's, does not parse.
        TypeError: It is none of these.
    """
    if compression is None:
        spec = os.environ.get("HVD_COMPRESS", "").strip()
        try:
            return _parse(spec) if spec else Compression.none
        except ValueError as error:
            raise ValueError(f"environment variable HVD_COMPRESS: {error}") from None
    if isinstance(compression, Compressor):
        return compression
    if isinstance(compression, str):
        return _parse(compression)
    if compression is hvd.Compression.none:
        return Compression.none
    if compression is hvd.Compression.fp16:
        return Compression.fp16
    if (
        isinstance(compression, type)
        and issubclass(compression, Compressor)
        and compression is not Compressor
    ):
        return _instance(compression)
    raise TypeError(
        f"compression must be a hvdc.Compressor, a spec string such as 'int8' or 'topk:ratio=0.01', or None; "
        f"got {shown(compression)}"
    )


def policies(policy: Mapping[str, CompressionLike] | None) -> tuple[tuple[str, Compressor], ...]:
    """Pairs of a pattern and its compressor, in the order of `policy`.

    Raises:
        TypeError: It is no mapping of strings, or a value no compressor.
        ValueError: A spec string does not parse.
    """
    if policy is None:
        return ()
    if not isinstance(policy, Mapping) or not all(isinstance(pattern, str) for pattern in policy):
        raise TypeError(
            f"policy must map patterns on variable paths to compressors, such as {{'*embedding*': 'none'}}; "
            f"got {shown(policy)}"
        )
    found = []
    for pattern, compression in policy.items():
        if compression is None:
            raise TypeError(f"policy[{pattern!r}] is None: write 'none' for no compression")
        try:
            found.append((pattern, resolve(compression)))
        except (TypeError, ValueError) as error:
            raise type(error)(f"policy[{pattern!r}]: {error}") from None
    return tuple(found)


@functools.cache
def _instance(cls: type) -> Compressor:
    """One instance per class: residuals of a custom loop are found by it."""
    try:
        compressor: Compressor = cls()
    except TypeError as error:
        raise TypeError(
            f"compression={cls.__name__} is a class that needs arguments: "
            f"pass an instance, {cls.__name__}(...) ({error})"
        ) from None
    return compressor


def _parse(spec: str) -> Compressor:
    name, _, rest = spec.strip().partition(":")
    name = name.strip()
    if name in _PRESETS:
        if rest.strip():
            raise ValueError(f"compressor {name!r} takes no arguments, got {shown(rest.strip())}")
        return _PRESETS[name]
    if name not in _CLASSES:
        known = sorted([*_CLASSES, *_PRESETS])
        word = re.split(r"[^a-z0-9_]", name[:_LONGEST_NAME].lower())[0]  # "topk(0.01)" is near to "topk", too
        near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"unknown compressor {shown(name)}: {hint}Known are {', '.join(known)}")
    fields = {field.name: field for field in dataclasses.fields(_CLASSES[name])}
    arguments: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in _COMMA.split(rest))):
        key, equals, value = (part.strip() for part in item.partition("="))
        if key not in fields:
            takes = ", ".join(fields) or "no arguments"
            raise ValueError(
                f"compressor {name!r} has no argument {shown(key)} (in {shown(spec)}): it takes {takes}"
            )
        if not equals:
            raise ValueError(f"argument {key!r} in {shown(spec)} has no value: write {key}=...")
        if key in arguments:
            raise ValueError(f"argument {key!r} stands twice in {shown(spec)}")
        arguments[key] = _value(value)
    missing = [
        key for key, field in fields.items() if field.default is dataclasses.MISSING and key not in arguments
    ]
    if missing:
        example = ",".join(f"{key}={'0.01' if key == 'ratio' else '4'}" for key in missing)
        raise ValueError(f"compressor {name!r} needs {', '.join(missing)}: for example '{name}:{example}'")
    return _CLASSES[name](**arguments)


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
