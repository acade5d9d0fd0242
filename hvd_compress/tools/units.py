"""Numbers with units, as people write them: 25.6M, 10gbit, 50us, 25MiB. `parse_*` raises ValueError for other text."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import click
from click.shell_completion import CompletionItem

from .. import formats

_NUMBER = r"(\d+(?:\.\d*)?(?:e[+-]?\d+)?|\.\d+(?:e[+-]?\d+)?)"
_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9}
_RATES = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_BYTES = {
    "": 1.0, "B": 1.0, "kB": 1e3, "KB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30,
}  # fmt: skip
# Larger values are typing errors, and a prediction would take very long.
_MOST_PARAMETERS, _MOST_RANKS = 10**11, 10**6
_SLOWEST, _FASTEST = 1.0, 1e18  # bits per second
_LONGEST = 24 * 3600.0


def parse_count(text: str) -> int:
    """A whole number: 25600000, 25.6M."""
    value = _parse(text.lower(), _COUNTS, text, "a number such as 25600000 or 25.6M (K, M, G)")
    if value < 1 or value != round(value):
        raise ValueError(f"{text!r} is not a whole number from 1 on")
    return round(value)


def parse_rate(text: str) -> float:
    """Bits per second: 10gbit, 500 Mbit/s, 1Gbps."""
    # Gb/s is Gbit/s; a capital B would be bytes.
    bits = re.sub(r"(?<![a-zA-Z])([kKmMgGtT]?)b(?=ps$|/s$)", r"\1bit", text.strip())
    short = re.sub(r"(/s|ps)$", "", bits)
    value = _parse(short.lower(), _RATES, text, "a rate in bits per second, such as 10gbit or 500mbit")
    if not _SLOWEST <= value <= _FASTEST:
        raise ValueError(f"{text!r} is not a rate of a network: give 1 bit to 1e6 Tbit per second")
    return value


def parse_seconds(text: str) -> float:
    """Seconds: 50us, 120ms, 1.5s, 10min; 0 needs no unit."""
    if text.strip() == "0":
        return 0.0
    value = _parse(text.lower(), _SECONDS, text, "a time such as 50us, 120ms, 1.5s or 10min")
    if value > _LONGEST:
        raise ValueError(f"{text!r} is longer than 24h")
    return value


def parse_bytes(text: str) -> int:
    """Bytes: 26214400, 25MiB, 10MB."""
    value = _parse(text, _BYTES, text, "a size such as 10MB or 25MiB")
    if value < 1:
        raise ValueError(f"{text!r} is not a size from 1 byte on")
    return round(value)


def _parse(text: str, units: Mapping[str, float], original: str, what: str) -> float:
    match = re.fullmatch(_NUMBER + r"\s*(\D*)", text.strip())
    if match is None or match.group(2) not in units:
        raise ValueError(f"{original!r} is not {what}")
    value = float(match.group(1)) * units[match.group(2)]
    if not math.isfinite(value):
        raise ValueError(f"{original!r} is too large")
    # 25.6 * 1e6 is 25600000.000000004 or so.
    return round(value) if value >= 1 and abs(value - round(value)) < 1e-6 * value else value


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
    if text.strip() == "auto":
        raise ValueError("auto is no compressor, it chooses among some: name one of these, such as 'int8'")
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
