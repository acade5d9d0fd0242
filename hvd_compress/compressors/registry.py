"""The register of compressors. A compressor registers itself, and spec strings and `hvdc.Compression` then know it.

A built-in compressor is a format in `hvd_compress/formats` and a class on it in this folder, both decorated with their
register's `@register` and both imported in the `__init__` of their folder. A compressor that is not predicted without
TensorFlow may have its `name` and `parts` in the class itself:

    @register
    @dataclasses.dataclass(frozen=True)
    class Ternary(BuiltinCompressor):
        name = "ternary"
"""

from __future__ import annotations

from typing import Any

from ..formats.registry import Registry

COMPRESSORS: Registry[Any] = Registry()
register = COMPRESSORS.register
parse = COMPRESSORS.parse
