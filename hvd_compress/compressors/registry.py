"""The `Compression` namespace and the spec strings."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Union

import horovod.tensorflow as hvd

from ..common.error_text import error_text
from ..formats import specs
from . import (
    DGC,
    Auto,
    BFloat16,
    BlockSparse,
    BlockTopK,
    Compressor,
    Float16,
    Hybrid,
    NoCompression,
    OneBit,
    PowerSGD,
    Quantize,
    RandomK,
    TopK,
)

CompressionLike = Union[Compressor, str, type, None]

_CLASSES: dict[str, type] = {
    cls.name: cls
    for cls in (
        NoCompression, Float16, BFloat16, Quantize, OneBit, TopK, RandomK, BlockTopK, BlockSparse, Hybrid, DGC,
        PowerSGD,
        Auto,
    )
}  # fmt: skip
_PRESETS: dict[str, Compressor] = {
    alias: _CLASSES[name](**arguments) for alias, (name, arguments) in specs.PRESETS.items()
}


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
    dgc = DGC
    powersgd = PowerSGD
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
            raise TypeError(f"a spec must be a string such as 'topk:ratio=0.01', got {error_text(spec)}")
        return _parse(spec)


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
        f"got {error_text(compression)}"
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
            f"got {error_text(policy)}"
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
    if spec.strip() in _PRESETS:
        return _PRESETS[spec.strip()]
    cls, arguments = specs.split(spec, _CLASSES)
    found: Compressor = cls(**arguments)
    return found
