"""The register of formats. Spec strings, the names that users may write and the tests' examples come from it."""

from __future__ import annotations

import dataclasses
import difflib
import re
from typing import Any, Generic, TypeVar

from ..common.error_text import error_text
from .base import Format
from .specs import parse_arguments

T = TypeVar("T")
Class = TypeVar("Class", bound=type)

_LONGEST_NAME = 50  # characters of an unknown name that are compared with known names


class Registry(Generic[T]):
    """Dataclasses by the first word of their spec string.

    Attributes:
        classes: The registered classes by `Format.name`.
        instances: What a word alone stands for: a class without arguments, or one of `Format.short_names`.
    """

    def __init__(self) -> None:
        self.classes: dict[str, Any] = {}
        self.instances: dict[str, T] = {}

    def register(self, cls: Class) -> Class:
        """Adds a dataclass with the `name`, `short_names` and `examples` of a `Format`; used as a decorator."""
        added: Any = cls
        self.classes[added.name] = added
        if not dataclasses.fields(added):
            self.instances[added.name] = added()
        for spec, short_name in added.short_names.items():
            self.instances[short_name] = self.parse(spec)
        return cls

    def parse(self, spec: str) -> T:
        """Makes what a spec string names.

        Raises:
            ValueError: The name, an argument or a value is not known or not valid, or an argument is missing.
        """
        name, _, text = (part.strip() for part in spec.partition(":"))
        if name in self.instances and not text:
            return self.instances[name]
        if name not in self.classes:
            no_arguments = f"compressor {name!r} takes no arguments, got {error_text(text)}"
            raise ValueError(no_arguments if name in self.instances else self._unknown(name))
        fields = dataclasses.fields(self.classes[name])
        arguments = parse_arguments(spec, [field.name for field in fields])
        required = [field.name for field in fields if field.default is dataclasses.MISSING]
        missing = [key for key in required if key not in arguments]
        if missing:
            example = ",".join(f"{key}={'0.01' if key == 'ratio' else '4'}" for key in missing)
            raise ValueError(f"compressor {name!r} needs {', '.join(missing)}: for example '{name}:{example}'")
        return self.classes[name](**arguments)

    def _unknown(self, name: str) -> str:
        known = sorted({*self.classes, *self.instances})
        word = re.split(r"[^a-z0-9_]", name[:_LONGEST_NAME].lower())[0]  # "topk(0.01)" is close to "topk", too
        close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]!r}? " if close else ""
        return f"unknown compressor {error_text(name)}: {hint}Known are {', '.join(known)}"


FORMATS: Registry[Format] = Registry()
register = FORMATS.register
parse = FORMATS.parse
