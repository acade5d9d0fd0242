"""Types of options whose values have units (see `common.units`), and such values as text: 12.3 ms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click
from click.shell_completion import CompletionItem

from .. import formats
from ..common.units import parse_bytes, parse_count, parse_rate, parse_seconds

# Larger values are typing errors, and a prediction would take very long.
_MOST_PARAMETERS, _MOST_RANKS = 10**11, 10**6


def _parse_duration(text: str) -> float:
    seconds = parse_seconds(text)
    if not seconds:
        raise ValueError(f"{text!r} is no time above 0")
    return seconds


def _parse_ranks(text: str) -> tuple[int, ...]:
    ranks = tuple(parse_count(part) for part in text.split(","))
    if min(ranks) < 2:
        raise ValueError("ranks start from 2: a single one exchanges nothing")
    if max(ranks) > _MOST_RANKS:
        raise ValueError(f"{max(ranks)} ranks are more than there can be: give at most 1M")
    return ranks


def _parse_parameters(text: str) -> int:
    parameters = parse_count(text)
    if parameters > _MOST_PARAMETERS:
        raise ValueError(f"{text!r} is more than a worker holds: give at most 100G")
    return parameters


def _parse_spec(text: str) -> str:
    name = text.partition(":")[0].strip()
    if name == "auto":
        raise ValueError("auto is no compressor, it chooses among some: name one of these, such as 'int8'")
    if name == "schedule":
        raise ValueError("a schedule uses one compressor after the other: name each of them, such as 'int8'")
    return formats.parse(text).spec


class Parsed(click.ParamType):
    """The type of an option. Its error says what `parse` says; that of click's FuncParamType says only the value."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Called by click."""
        if not isinstance(value, str):  # a default
            return value
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)

    def shell_complete(self, ctx: Any, param: Any, incomplete: str) -> list[CompletionItem]:
        """Called by click: completes the names of files."""
        return click.Path().shell_complete(ctx, param, incomplete) if self.name == "path" else []


COUNT = Parsed("count", parse_count)
PARAMETERS = Parsed("count", _parse_parameters)
RATE = Parsed("rate", parse_rate)
SECONDS = Parsed("time", parse_seconds)
BYTES = Parsed("bytes", parse_bytes)
DURATION = Parsed("time", _parse_duration)
RANKS = Parsed("ranks", _parse_ranks)
SPEC = Parsed("spec", _parse_spec)


def show_rate(bits_per_second: float) -> str:
    """Bits per second as text: 10 Gbit/s."""
    return _show(bits_per_second, {"Tbit/s": 1e12, "Gbit/s": 1e9, "Mbit/s": 1e6, "kbit/s": 1e3, "bit/s": 1.0})


def show_bytes(nbytes: float) -> str:
    """Bytes as text: 102 MB."""
    return _show(nbytes, {"GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 1.0})


def show_seconds(seconds: float) -> str:
    """Seconds as text: 12.3 ms."""
    return _show(seconds, {"s": 1.0, "ms": 1e-3, "us": 1e-6}) if seconds else "0 s"


def show_count(count: float) -> str:
    """A number as text: 25.6M."""
    return _show(count, {"G": 1e9, "M": 1e6, "K": 1e3, "": 1.0}).replace(" ", "")


def _show(value: float, units: Mapping[str, float]) -> str:
    """The value in the largest of the units, which come in falling order, that is not larger than it."""
    *_, smallest = units
    name = next((name for name, size in units.items() if value >= 0.9995 * size), smallest)
    number = f"{value / units[name]:.3g}"
    if "e" in number:
        number = f"{value / units[name]:.0f}"
    return f"{number} {name}".rstrip()
