"""Types of options whose values have units, see `common.units`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
from click.shell_completion import CompletionItem

from .. import formats
from ..common.units import parse_bytes, parse_count, parse_rate, parse_seconds
from ..common.units import show_bytes as show_bytes
from ..common.units import show_count as show_count
from ..common.units import show_rate as show_rate
from ..common.units import show_seconds as show_seconds

# Larger values are typing errors, and a prediction would take very long.
_MOST_PARAMETERS, _MOST_RANKS = 10**11, 10**6


def _parse_duration(text: str) -> float:
    seconds = parse_seconds(text)
    if not seconds:
        raise ValueError(f"{text!r} is no time above 0")
    return seconds


def _parse_counts(text: str) -> tuple[int, ...]:
    return tuple(map(parse_count, text.split(",")))


def _parse_ranks(text: str) -> tuple[int, ...]:
    ranks = _parse_counts(text)
    if min(ranks) < 2:
        raise ValueError("ranks start from 2: a single one exchanges nothing")
    if max(ranks) > _MOST_RANKS:
        raise ValueError(f"{max(ranks)} ranks are more than there can be: give at most 1M")
    return ranks


def _parse_local_steps(text: str) -> tuple[int, ...]:
    counts = _parse_counts(text)
    if min(counts) < 2:
        raise ValueError("local steps start from 2: with 1, each step exchanges")
    return counts


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
LOCAL_STEPS = Parsed("local steps", _parse_local_steps)
SPEC = Parsed("spec", _parse_spec)
